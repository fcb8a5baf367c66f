// One request with and without speculation, one after the other; then both again on one clock.
import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { element } from "./dom.js";
import { sha256 } from "./sha256.js";

const $ = (id) => document.getElementById(id);
const reads = (count) => `${count} read${count === 1 ? "" : "s"}`;
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

/** Run both and show them. Neither may reuse the other's prompt, and both have one seed. */
export async function race(path, ask, signal) {
  const fair = { seed: Math.floor(Math.random() * 2 ** 31), ...ask, cache_prompt: false };
  const lanes = [...$("race").querySelectorAll(".lanes > section")].map((box) => new Lane(box));
  $("race").hidden = false;
  $("race-state").textContent = "";
  $("race").scrollIntoView();
  try {
    await run(lanes, path, fair, signal);
    $("race-state").textContent = "Both again, from one start:";
    await replay(lanes, signal);
    verdict(lanes);
  } catch (problem) {
    $("race-state").textContent = problem.name === "AbortError" ? "Stopped." : "Broken off.";
    throw problem;
  } finally {
    $("skip").hidden = true;
  }
}

async function run(lanes, path, fair, signal) {
  for (const [i, enabled] of [true, false].entries()) {
    const how = enabled ? "with" : "without";
    await lanes[i].record(path, { ...fair, speculative: { enabled } }, signal, (count) => {
      $("race-state").textContent = `Running ${how} speculation: ${count} tokens`;
    });
  }
}

class Lane {
  frames = []; // {at, read}, in ms from the request's start
  #shown = 0;

  constructor(box) {
    [this.clock, this.place] = [box.querySelector(".clock"), box.querySelector(".lane")];
    this.clock.textContent = "";
    this.answer = new Answer();
    this.place.replaceChildren(this.answer.root);
  }

  async record(path, ask, signal, progress) {
    const start = performance.now();
    let count = 0;
    for await (const { at, choice } of stream(path, ask, signal)) {
      for (const read of choice?.speculation ?? []) {
        this.frames.push({ at: at - start, read });
        count += read.tokens.length;
      }
      progress(count);
    }
  }

  get end() {
    return this.frames.at(-1)?.at ?? 0;
  }

  /** Reads of the target's weights behind the prompt's: one a verify. */
  get reads() {
    return this.answer.tally.verifies;
  }

  get digest() {
    return sha256(this.frames.flatMap((frame) => frame.read.tokens.map((t) => t.id)).join(","));
  }

  /** Show what had come by then. Returns whether that is all. */
  show(time) {
    while (this.#shown < this.frames.length && this.frames[this.#shown].at <= time) {
      const { at, read } = this.frames[this.#shown++];
      this.answer.add(read, at);
    }
    this.clock.textContent = `${reads(this.reads)} · ${seconds(Math.min(time, this.end))}`;
    return this.#shown === this.frames.length;
  }

  finish() {
    this.answer.finish();
    this.place.append(element("p", "digest", `SHA-256 of the token ids: ${this.digest}`));
  }
}

async function replay(lanes, signal) {
  const hurry = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let start = hurry ? -Infinity : performance.now();
  $("skip").hidden = false;
  $("skip").onclick = () => (start = -Infinity);
  const frame = () => new Promise((next) => requestAnimationFrame(next));
  while (!lanes.map((lane) => lane.show(performance.now() - start)).every(Boolean)) {
    signal.throwIfAborted();
    await frame();
  }
  for (const lane of lanes) lane.finish();
  $("race").scrollIntoView();
}

/** The headline is the reads: they are the same on any machine. The time is this machine's. */
function verdict([on, off]) {
  const equal = on.digest === off.digest;
  const words = equal
    ? "The digests are equal: the same tokens, one by one."
    : "The digests DIFFER. This should be impossible: please report it.";
  const fewer = on.reads ? `${(off.reads / on.reads).toFixed(2)} times fewer` : "No";
  const counts = `${on.reads} against ${off.reads}`;
  const faster = `${(off.end / on.end).toFixed(2)} times the speed`;
  $("race-state").replaceChildren(
    element("strong", "headline", `${fewer} reads of the target's weights: ${counts}`),
    element("span", "beside", `Time: ${faster} (${seconds(on.end)} against ${seconds(off.end)})`),
    element("span", equal ? "equal" : "differ", words),
  );
}
