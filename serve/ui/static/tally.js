// What an answer's reads add up to.

export const NAMES = {
  ngram: "prompt lookup (ngram)",
  suffix: "suffix lookup",
  assistant: "assistant",
  eagle3: "draft head (eagle3)",
  dflash: "block drafter (dflash)",
  model: "draft model",
  grammar: "grammar",
  prediction: "prediction",
};
export const PAID = "paid: a read each";

/** The style class of a token's guesser; null: no guess. */
export function styleOf(guesser) {
  if (guesser === null) return "by-nobody";
  return guesser in NAMES ? `by-${guesser}` : "by-other";
}

/** A guesser's name in words. */
export function nameOf(guesser) {
  return guesser === null ? PAID : (NAMES[guesser] ?? guesser);
}

export class Tally {
  tokens = 0;
  verifies = 0;
  drafter = "";
  k = 0;
  by = new Map(); // guesser, or null -> tokens
  proposed = []; // by position
  accepted = [];
  first = null; // ms
  last = null;

  add(read, at) {
    this.first ??= at;
    this.last = at;
    this.tokens += read.tokens.length;
    if (read.drafter !== undefined) [this.drafter, this.k] = [read.drafter, read.k];
    for (const { guessed_by: guesser } of read.tokens) {
      this.by.set(guesser, (this.by.get(guesser) ?? 0) + 1);
    }
    if (read.read !== "verify") return;
    this.verifies += 1;
    const kept = read.tokens.filter((token) => token.guessed_by !== null).length;
    for (let i = 0; i < kept + read.rejected.length; i++) {
      this.proposed[i] = (this.proposed[i] ?? 0) + 1;
      this.accepted[i] = (this.accepted[i] ?? 0) + (i < kept ? 1 : 0);
    }
  }

  /** Tokens per verify. */
  get tau() {
    return this.verifies ? (this.tokens - 1) / this.verifies : 1;
  }

  /** Tokens per second after the first; null where there is no second one. */
  get rate() {
    return this.tokens > 1 && this.last > this.first
      ? (1000 * (this.tokens - 1)) / (this.last - this.first)
      : null;
  }
}
