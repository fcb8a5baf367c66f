// One exchange: the messages that were sent, and the answer.
import { Answer } from "./answer.js";
import { gather, resultsForm, shownCall } from "./calls.js";
import { announce, button, copier, element } from "./dom.js";
import { markdown } from "./markdown.js";
import { thumbnail } from "./pictures.js";

const TICK = 250; // ms

export class Turn {
  text = "";
  thought = "";
  note = ""; // how it ended, where that is not plain
  calls = [];
  answer = new Answer();
  #reads = [];
  #thought = element("details", "thought", element("summary", "", "Thought"), element("div"));
  #formatted = element("div", "formatted");
  #calls = element("div", "calls");
  #note = element("p", "note");
  #tools = element("div", "tools");
  #drawing = 0; // the frame that will draw it
  #wait = element("p", "wait");
  #clock = 0; // what counts the wait's seconds

  /** path: the API's route; sent: its new messages; on: {edit, regenerate, results}, each with the
   * turn. */
  constructor(path, sent, on) {
    [this.path, this.sent, this.on] = [path, sent, on];
    const title = element("h3", "unseen", "Answer");
    this.#thought.hidden = true;
    this.#wait.hidden = true;
    this.box = element("article", "answer", title, this.#wait, this.answer.root, this.#thought);
    this.box.append(this.#formatted, this.#calls, this.#note, this.#tools);
    const shown = sent.map((message) => this.#shownMessage(message));
    this.root = element("div", "turn", ...shown, this.box);
  }

  /** A turn of an earlier page, as `kept` made it. */
  static from({ path, sent, reads, ...answer }, on) {
    const turn = Object.assign(new Turn(path, sent, on), answer);
    for (const { read, at } of reads) turn.#add(read, at);
    turn.finish();
    return turn;
  }

  /** What a reload brings back. */
  get kept() {
    const { path, sent, text, thought, note, calls } = this;
    return { path, sent, text, thought, note, calls, reads: this.#reads };
  }

  get empty() {
    return !this.text && !this.thought && !this.calls.length && !this.#reads.length;
  }

  /** Its messages for the next request: none where there is no answer. */
  get messages() {
    if (this.path !== "chat/completions" || !(this.text || this.calls.length)) return [];
    const said = { role: "assistant", content: this.text };
    if (this.thought) said.reasoning_content = this.thought;
    if (this.calls.length) said.tool_calls = this.calls;
    return [...this.sent, said];
  }

  /** Count seconds until something of the answer is there: the server is busy, or reads. */
  wait() {
    const start = performance.now();
    this.#clock = setInterval(() => {
      const seconds = Math.floor((performance.now() - start) / 1000);
      if (!seconds) return;
      if (this.#wait.hidden) announce("Waiting for the first token");
      this.#wait.hidden = false;
      this.#wait.textContent = `Waiting for the first token: ${seconds} s`;
    }, TICK);
  }

  #waited() {
    clearInterval(this.#clock);
    this.#wait.hidden = true;
  }

  /** A chunk of the answer, which came at this time. */
  take(choice, at) {
    this.text += choice.delta?.content ?? choice.text ?? "";
    this.thought += choice.delta?.reasoning_content ?? "";
    gather(this.calls, choice.delta?.tool_calls ?? []);
    for (const read of choice.speculation ?? []) this.#add(read, at);
    if (choice.finish_reason === "length") this.note = "Cut off: the limit of tokens is reached.";
    if (choice.notice) this.note = choice.notice;
    if (!this.empty) this.#waited();
    this.#drawing ||= requestAnimationFrame(() => this.#draw());
  }

  #add(read, at) {
    this.#reads.push({ read, at });
    this.answer.add(read, at);
  }

  /** Nothing follows. */
  finish() {
    cancelAnimationFrame(this.#drawing);
    this.#waited();
    this.answer.finish();
    this.#draw();
    this.#note.textContent = this.note;
    this.#tools.replaceChildren(
      copier("Copy the answer", () => this.text || JSON.stringify(this.calls, null, 2)),
      idle(button("Regenerate", "Regenerate the answer", () => this.on.regenerate(this))),
    );
    if (this.calls.length) {
      this.#calls.append(resultsForm(this.calls, (results) => this.on.results(this, results)));
    }
  }

  #draw() {
    this.#drawing = 0;
    this.#thought.hidden = !this.thought;
    this.#thought.lastChild.textContent = this.thought;
    this.#formatted.replaceChildren(...markdown(this.text));
    this.#calls.replaceChildren(...this.calls.map(shownCall));
  }

  #shownMessage({ role, content }) {
    const title =
      role === "tool" ? element("h3", "", "Result of a call") : element("h3", "unseen", "Message");
    const { text, pictures } = apart(content);
    const shown = pictures.map((part) => thumbnail(part.image_url.url, "picture"));
    const tools = element("div", "tools", copier("Copy the message", () => text));
    if (role === "user") {
      tools.append(idle(button("Edit", "Edit the message", () => this.on.edit(this))));
    }
    return element("article", role, title, ...shown, element("div", "words", text), tools);
  }
}

/** A button for which the page must be idle. */
function idle(made) {
  made.dataset.idle = "";
  return made;
}

/** A message's content as its text and its pictures' parts. */
export function apart(content) {
  if (typeof content === "string") return { text: content, pictures: [] };
  const pictures = content.filter((part) => part.type === "image_url");
  return { text: content.at(-1).text, pictures };
}
