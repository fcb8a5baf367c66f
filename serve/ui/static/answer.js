// An answer, read by read. A model's output goes to the page as text, never as HTML.
import { element } from "./dom.js";
import { NAMES, Tally, nameOf, styleOf } from "./tally.js";

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const shown = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵"));
const MARKER = /^<[|/]?[a-z_|"]+[|]?>$/;

export class Answer {
  tally = new Tally();
  #reads = [];
  #spans = [];
  #current = 0;
  #facts = element("p", "facts");
  #legend = element("ul", "legend");
  #text = element("div", "reads");
  #detail = element("p", "detail");
  #summary = element("div", "summary");

  constructor() {
    this.#text.setAttribute("role", "listbox");
    this.#text.setAttribute("aria-label", "The answer, read by read: arrow keys move");
    this.#text.setAttribute("aria-orientation", "horizontal");
    this.#detail.setAttribute("aria-live", "polite");
    this.#detail.hidden = true;
    this.#legend.setAttribute("aria-label", "Legend: the tokens by guesser");
    const read = element("div", "guesses", this.#legend, this.#text, this.#detail, this.#summary);
    this.root = element("div", "", this.#facts, read);
    this.#text.addEventListener("mouseover", (event) => this.#show(this.#indexOf(event.target)));
    this.#text.addEventListener("focusin", (event) => this.#show(this.#indexOf(event.target)));
    this.#text.addEventListener("keydown", (event) => this.#move(event));
  }

  /** One read, which arrived at this time in ms. */
  add(read, at) {
    this.tally.add(read, at);
    const number = this.#reads.push(read) - 1;
    const span = element("span", "read", ...tokenSpans(read.tokens));
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", inWords(read));
    span.tabIndex = number ? -1 : 0;
    span.dataset.index = number;
    this.#spans.push(span);
    this.#text.append(span);
    this.#count();
  }

  /** Nothing follows. */
  finish() {
    this.#summary.replaceChildren(positions(this.tally));
  }

  get words() {
    const { tokens, verifies, tau } = this.tally;
    return `${plural(tokens, "token")} from ${plural(verifies, "verify read")}, tau ${tau.toFixed(2)}`;
  }

  #count() {
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
    this.#legend.replaceChildren(...legend([...tally.by], tally.tokens));
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

/** Every guesser's style in words, for a page without an answer. */
export function wholeLegend() {
  const list = element("ul", "legend", ...legend([...Object.keys(NAMES), null].map((by) => [by])));
  list.setAttribute("aria-label", "Legend");
  return list;
}

/** Legend entries of [guesser, tokens], with shares where there are counts. */
function legend(counts, all) {
  return counts.map(([guesser, count]) => {
    const share = all ? `: ${count} (${((100 * count) / all).toFixed(0)} %)` : "";
    const swatch = element("span", `swatch lead ${styleOf(guesser)}`);
    swatch.setAttribute("aria-hidden", "true");
    return element("li", "", swatch, nameOf(guesser) + share);
  });
}

/** The tokens of a read. The first of each guesser's in a row, and in a line, shows its shape. */
function tokenSpans(tokens) {
  return tokens.map((token, i) => {
    const { guessed_by: before, text } = tokens[i - 1] ?? { text: "" };
    const lead = token.guessed_by !== before || text.endsWith("\n") ? " lead" : "";
    const marker = MARKER.test(token.text) ? " marker" : "";
    const parts = token.text.split(/(?=\n)/).flatMap((part) => {
      return part.startsWith("\n") ? [element("span", "newline"), part] : [part];
    });
    return element("span", `token ${styleOf(token.guessed_by)}${lead}${marker}`, ...parts);
  });
}

function inWords(read) {
  const kept = read.tokens.filter((token) => token.guessed_by !== null).length;
  const text = read.tokens.map((token) => token.text).join("");
  return `${text}: ${plural(kept, "token")} guessed, ${read.rejected.length} rejected`;
}

function details(read, index) {
  const kept = read.tokens.filter((token) => token.guessed_by !== null);
  const guessers = [...new Set([...kept, ...read.rejected].map((token) => token.guessed_by))];
  const time = read.seconds === null ? "" : `, ${(1000 * read.seconds).toFixed(2)} ms`;
  const of = read.read === "prompt" ? "The prompt's read" : `Read ${index}`;
  const words = [`${of}: ${plural(read.tokens.length, "token")}${time}. `];
  if (guessers.length) words.push(`${kept.length} guessed right by ${guessers.map(nameOf).join(", ")}. `);
  if (read.rejected.length) {
    const wrong = read.rejected.map((token) => {
      return element("del", `rejected lead ${styleOf(token.guessed_by)}`, shown(token.text));
    });
    words.push("Rejected: ", ...wrong);
  } else if (read.read === "verify") {
    words.push("Nothing rejected.");
  }
  return words;
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
