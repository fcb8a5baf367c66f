// The turns on the page, in order.
export class Conversation {
  #turns;
  #place;
  #welcome;

  /** place: where they are shown; welcome: what is shown while there are none. */
  constructor(place, welcome) {
    [this.#turns, this.#place, this.#welcome] = [[], place, welcome];
  }

  get kept() {
    return this.#turns.filter((turn) => !turn.empty).map((turn) => turn.kept);
  }

  get length() {
    return this.#turns.length;
  }

  indexOf(turn) {
    return this.#turns.indexOf(turn);
  }

  /** The messages of the turns before this index. */
  before(index) {
    return this.#turns.slice(0, index).flatMap((turn) => turn.messages);
  }

  /** Put turns in the place of all from this index on, and return those. */
  replace(index, turns) {
    const replaced = this.#turns.splice(index, Infinity, ...turns);
    this.#welcome.hidden = this.#turns.length > 0;
    this.#place.replaceChildren(this.#welcome, ...this.#turns.map((turn) => turn.root));
    return replaced;
  }

  /** Mark the turns from this index on as those that the next one replaces. */
  mark(index) {
    this.#turns.forEach((turn, i) => turn.root.classList.toggle("replaced", i >= index));
  }
}
