// An answer, read by read. Whatever the model says goes to the page as text, never as HTML.
import { NAMES, PAID, Tally, styleOf } from "./tally.js";

/** An element with classes and children; strings become text. */
export function element(name, classes = "", ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const shown = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵"));
const MARKER = /^<[|/]?[a-z_|"]+[|]?>$/;

export class Answer {
  tally = new Tally();
  #reads = [];
  #spans = [];
  #current = 0;
  #facts = element("p", "facts");
  #text = element("div", "reads");
  #detail = element("p", "detail");
  #summary = element("div", "summary");

  constructor() {
    this.#text.setAttribute("role", "listbox");
    this.#text.setAttribute("aria-label", "The answer, read by read: arrow keys move");
    this.#text.setAttribute("aria-orientation", "horizontal");
    this.#detail.setAttribute("aria-live", "polite");
    this.#detail.hidden = true;
    this.root = element("div", "", this.#facts, this.#text, this.#detail, this.#summary);
    this.#text.addEventListener("mouseover", (event) => this.#show(this.#indexOf(event.target)));
    this.#text.addEventListener("focusin", (event) => this.#show(this.#indexOf(event.target)));
    this.#text.addEventListener("keydown", (event) => this.#move(event));
  }

  /** One read, which arrived at this time in ms. */
  add(read, at) {
    this.tally.add(read, at);
    const number = this.#reads.push(read) - 1;
    const span = element("span", "read", ...read.tokens.map(tokenSpan));
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", told(read));
    span.tabIndex = number ? -1 : 0;
    span.dataset.index = number;
    this.#spans.push(span);
    this.#text.append(span);
    this.#tell();
  }

  /** Nothing follows. */
  finish() {
    this.#summary.replaceChildren(guessers(this.tally), positions(this.tally));
  }

  get words() {
    const { tokens, verifies, tau } = this.tally;
    return `${plural(tokens, "token")} from ${plural(verifies, "verify read")}, tau ${tau.toFixed(2)}`;
  }

  #tell() {
    const { tally } = this;
    const rate = tally.rate === null ? "–" : tally.rate.toFixed(1);
    const fact = (name, value) => element("span", "", `${name} `, element("b", "", value));
    this.#facts.replaceChildren(
      tally.drafter === null ? fact("drafter", "none") : fact("drafter", `${tally.drafter}, K = ${tally.k}`),
      fact("tau", tally.tau.toFixed(2)),
      fact("tok/s", rate),
      fact("tokens", `${tally.tokens}`),
      fact("verify reads", `${tally.verifies}`),
    );
  }

  #indexOf(target) {
    const span = target.closest?.(".read");
    return span ? Number(span.dataset.index) : -1;
  }

  #show(index) {
    if (index < 0) return;
    for (const [i, chosen] of [[this.#current, false], [index, true]]) {
      this.#spans[i].setAttribute("aria-selected", String(chosen));
      this.#spans[i].tabIndex = chosen ? 0 : -1;
    }
    this.#current = index;
    this.#detail.hidden = false;
    this.#detail.replaceChildren(...details(this.#reads[index], index));
  }

  #move(event) {
    const now = this.#indexOf(document.activeElement);
    const last = this.#spans.length - 1;
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
    if (now < 0 || to === undefined) return;
    event.preventDefault();
    this.#spans[Math.max(0, Math.min(last, to))].focus();
  }
}

function tokenSpan(token) {
  const marker = MARKER.test(token.text) ? " marker" : "";
  const parts = token.text.split(/(?=\n)/).flatMap((part) => {
    return part.startsWith("\n") ? [element("span", "newline"), part] : [part];
  });
  return element("span", `token ${styleOf(token.guessed_by)}${marker}`, ...parts);
}

function told(read) {
  const kept = read.tokens.filter((token) => token.guessed_by !== null).length;
  const text = read.tokens.map((token) => token.text).join("");
  return `${text}: ${plural(kept, "token")} guessed, ${read.rejected.length} rejected`;
}

function details(read, index) {
  const kept = read.tokens.filter((token) => token.guessed_by !== null);
  const who = [...new Set([...kept, ...read.rejected].map((token) => token.guessed_by))];
  const time = read.seconds === null ? "" : `, ${(1000 * read.seconds).toFixed(2)} ms`;
  const of = read.read === "prompt" ? "The prompt's read" : `Read ${index}`;
  const said = [`${of}: ${plural(read.tokens.length, "token")}${time}. `];
  if (who.length) said.push(`${kept.length} guessed right by ${who.join(", ")}. `);
  if (read.rejected.length) {
    const wrong = read.rejected.map((token) => {
      return element("del", `rejected ${styleOf(token.guessed_by)}`, shown(token.text));
    });
    said.push("Rejected: ", ...wrong);
  } else if (read.read === "verify") {
    said.push("Nothing rejected.");
  }
  return said;
}

function guessers(tally) {
  const list = element("ul");
  for (const [guesser, count] of tally.by) {
    const share = ((100 * count) / tally.tokens).toFixed(0);
    const name = guesser === null ? PAID : (NAMES[guesser] ?? guesser);
    const swatch = element("span", `swatch ${styleOf(guesser)}`);
    list.append(element("li", "", swatch, `${name}: ${count} (${share} %)`));
  }
  return element("section", "", element("h4", "", "Who guessed it"), list);
}

function positions(tally) {
  if (!tally.proposed.length) return "";
  const list = element("ul", "positions");
  tally.proposed.forEach((proposed, i) => {
    const share = tally.accepted[i] / proposed;
    const meter = element("meter");
    [meter.value, meter.max] = [share, 1];
    meter.setAttribute("aria-label", `position ${i + 1}`);
    const text = `${(100 * share).toFixed(0)} % of ${proposed}`;
    list.append(element("li", "", `${i + 1}`, meter, text));
  });
  return element("section", "", element("h4", "", "Accepted, by position in the draft"), list);
}
