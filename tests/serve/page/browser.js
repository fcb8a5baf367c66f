// As much of a browser as the page needs, for node: a tree of elements, and answers from a list.
class Node {
  hidden = false;
  value = "";
  checked = false;
  textContent = "";
  dataset = {};
  validity = {};
  files = [];
  labels = [{ firstChild: { textContent: "field" } }];
  scrollHeight = 0;
  scrollTop = 0;
  clientHeight = 0;
  #classes = new Set();
  #attributes = {};
  #children = [];
  #heard = {};
  #parts = {};
  classList = {
    toggle: (name, on) => (on ? this.#classes.add(name) : this.#classes.delete(name)),
    contains: (name) => this.#classes.has(name),
  };

  constructor(name) {
    this.name = name;
  }

  get children() {
    return this.#children;
  }

  get lastChild() {
    return this.#children.at(-1);
  }

  get words() {
    return this.#children.map((child) => child.words ?? child).join("") + this.textContent;
  }

  append(...children) {
    this.#children.push(...children);
  }

  replaceChildren(...children) {
    this.#children = children;
  }

  setAttribute(name, value) {
    this.#attributes[name] = value;
  }

  getAttribute(name) {
    return this.#attributes[name];
  }

  removeAttribute(name) {
    delete this.#attributes[name];
  }

  addEventListener(kind, work) {
    (this.#heard[kind] ??= []).push(work);
  }

  /** Tell the listeners; returns the event with what they did to it. */
  fire(kind, event = {}) {
    const whole = { defaultPrevented: false, target: this, ...event };
    whole.preventDefault = () => (whole.defaultPrevented = true);
    for (const work of this.#heard[kind] ?? []) work(whole);
    return whole;
  }

  requestSubmit() {
    this.fire("submit");
  }

  querySelector(which) {
    return (this.#parts[which] ??= new Node(which));
  }

  querySelectorAll(which) {
    return which === ".lanes > section" ? [this.querySelector("on"), this.querySelector("off")] : [];
  }

  getClientRects() {
    return [];
  }

  matches() {
    return false;
  }

  closest() {
    return null;
  }

  focus() {}
  scrollIntoView() {}
  remove() {}

  /** All elements below it with this name. */
  *named(name) {
    for (const child of this.#children) {
      if (child.name === name) yield child;
      if (child.named) yield* child.named(name);
    }
  }
}

const ids = {};
export const $ = (id) => (ids[id] ??= new Node(id));
export const pressed = (within, label) => {
  const found = [...within.named("button")].find((one) => one.getAttribute("aria-label") === label);
  found.fire("click");
};
export const posted = []; // the bodies of requests
export const answers = []; // what is answered next: a text, or a promise of one
export const rejections = [];
const kept = {};

const top = new Node("document");
Object.assign(globalThis, {
  document: Object.assign(top, {
    getElementById: $,
    createElement: (name) => new Node(name),
    baseURI: "http://here/",
    body: new Node("body"),
    activeElement: new Node("nothing"),
  }),
  window: new Node("window"),
  sessionStorage: { getItem: (at) => kept[at] ?? null, setItem: (at, text) => (kept[at] = text) },
  matchMedia: () => ({ matches: false }),
  requestAnimationFrame: (draw) => setTimeout(draw, 0),
  cancelAnimationFrame: clearTimeout,
  FileReader: class {
    readAsDataURL({ broken, name }) {
      this.result = `data:${name}`;
      this.error = new Error("NotFoundError");
      queueMicrotask(() => (broken ? this.onerror() : this.onload()));
    }
  },
  fetch: async (url, { body, signal } = {}) => {
    const path = new URL(url).pathname;
    if (path === "/ready") return Response.json({ status: "ready" });
    if (path === "/v1/models") {
      return Response.json({ data: [{ id: "m", input_modalities: ["text", "image"] }] });
    }
    posted.push(JSON.parse(body));
    const stopped = new Promise((_, fail) => {
      signal.addEventListener("abort", () => fail(signal.reason));
    });
    return new Response(streamed(await Promise.race([answers.shift(), stopped])));
  },
});
process.on("unhandledRejection", (problem) => rejections.push(problem.message));

/** A text as the server streams it: one read a character. */
function streamed(text) {
  const chunk = (content, index) => ({
    choices: [{ delta: { content }, speculation: [readOf(content, index)], finish_reason: null }],
  });
  const events = [...text].map((content, index) => JSON.stringify(chunk(content, index)));
  return [...events, "[DONE]"].map((data) => `data: ${data}\n\n`).join("");
}

function readOf(text, index) {
  const tokens = [{ id: index, text, guessed_by: null }];
  const read = index ? "verify" : "prompt";
  return { read, tokens, rejected: [], seconds: 0.001, drafter: null, k: 0, drafted: 0 };
}

/** Wait until something is so. */
export async function until(so) {
  for (let turns = 0; !so(); turns++) {
    if (turns > 2000) throw new Error(`never: ${so}`);
    await new Promise((later) => setTimeout(later, 1));
  }
}

/** Open the page. */
export async function opened() {
  $("skip").hidden = true;
  $("mode").value = "chat";
  $("view").value = "guesses";
  await import("./page.js");
  await until(() => $("model").textContent);
}

/** Type a message and send it; waits for the end of the answer. */
export async function sent(text, answer) {
  $("prompt").value = text;
  answers.push(answer);
  const before = posted.length;
  $("ask").requestSubmit();
  await until(() => posted.length > before && $("stop").hidden);
}

/** The turns on the page. */
export const turns = () => $("conversation").children.slice(1);

/** What the last request said: the texts of its messages. */
export const said = () => posted.at(-1).messages.map((message) => message.content);
