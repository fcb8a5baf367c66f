"""Warm equals cold: random chats of several turns, each turn beside a start without a prefix cache.

python -m tests.warm_chats --chats 200 --backend cuda --model 31b --drafter eagle3 --temperature 1
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from specdec.core.engine import Engine
from specdec.core.provenance import gpus, run_record
from specdec.core.types import Reuse, Sampling, Sequence
from tests.campaign import Outcome
from tests.lossless.warm_parts import WarmBench

CALLS = 30
"""Of a tool loop."""
STRANGERS = 20
STRANGERS_ANSWER = 24
"""Tokens; what a stranger leaves in its slot is its prompt's in any case."""
LONG_ANSWER = 500
PARTS = 1
"""Prompts and what is added to them are this part of what is drawn; chunks may be as well."""


@dataclass
class Turn:
    """One request of a chat."""

    prompt: list[int]
    partings: tuple[int, ...] = ()
    max_tokens: int = 12
    strangers: int = 1
    """Others' requests before it."""
    beside: bool = False
    """Whether another request decodes meanwhile, so that it gets another slot."""
    evicted: bool = False
    """Whether all that is on the device goes to the host before it."""
    left: int = 0
    """After so many of its chunks the client leaves, and sends it anew."""


class Chats:
    """Each yields turns, and is sent what was answered."""

    def __init__(self, random: Random, vocab: int, long: bool) -> None:
        self.random, self.vocab = random, vocab
        self.kinds = [self.talk, self.tools, self.edited, self.moved, self.evicted, self.crowded]
        self.kinds += [self.left, self.wordy] if long else [self.left]

    def words(self, low: int, high: int) -> list[int]:
        """With a period, so that prompt lookup finds something."""
        count, period = self.random.randint(low, high) // PARTS, self.random.randint(3, 40)
        some = [self.random.randrange(3, self.vocab) for _ in range(period)]
        return [some[i % period] for i in range(count)]

    def talk(self, **change) -> Iterator[Turn]:
        prompt, start = self.words(20, 150), 0
        for _ in range(self.random.randint(2, 4)):
            answer = yield Turn(prompt, (start, len(prompt)), **change)
            start = len(prompt) + len(answer)
            prompt = prompt + answer + self.words(5, 60)

    def tools(self) -> Iterator[Turn]:
        """A loop of calls, each written anew a little; then the thoughts are cut."""
        asked = self.words(60, 200)
        prompt, parting = asked, (len(asked) // 2, len(asked))
        for _ in range(CALLS):
            answer = yield Turn(prompt, parting, max_tokens=6, strangers=0)
            prompt = prompt + answer[:-1] + self.words(2, 12)
        yield Turn(asked + prompt[-20:] + self.words(5, 40), (len(asked) + 20,))

    def edited(self) -> Iterator[Turn]:
        prompt = self.words(100, 300)
        answer = yield Turn(prompt)
        longer = prompt + answer + self.words(20, 60)
        yield Turn(longer)
        for _ in range(2):
            at = self.random.randrange(10, len(prompt))
            yield Turn(longer[:at] + self.words(1, 30) + longer[at:])
        yield Turn(longer)

    def moved(self) -> Iterator[Turn]:
        return self.talk(beside=True)

    def evicted(self) -> Iterator[Turn]:
        return self.talk(evicted=True, strangers=3)

    def crowded(self) -> Iterator[Turn]:
        return self.talk(strangers=STRANGERS)

    def wordy(self) -> Iterator[Turn]:
        return self.talk(max_tokens=LONG_ANSWER)

    def left(self) -> Iterator[Turn]:
        return self.talk(left=self.random.randint(1, 3), beside=True)


@dataclass
class Counts:
    chats: int = 0
    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    allowed: int = 0
    """Prompt tokens that the kept boundaries allow to resume from."""
    drafted: int = 0
    accepted: int = 0
    cold_accepted: int = 0


class Expected:
    """The contents of an unbounded cache, as sets of prefixes."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.chunks: set[tuple[int, ...]] = set()
        self.boundaries: set[tuple[int, ...]] = set()

    def cached(self, prompt: list[int], partings: tuple[int, ...]) -> int:
        """Tokens that need no prefill; the prompt is then known."""
        unit = self.unit
        ends = [tuple(prompt[:stop]) for stop in range(unit, len(prompt) + 1, unit)]
        known = [end for end in ends if end in self.chunks]
        found = [len(end) for end in known if end in self.boundaries and len(end) < len(prompt)]
        cut = {tuple(prompt[: at // unit * unit]) for at in partings}
        self.boundaries |= {*ends[-2:], *known[-1:], *cut} - {()}
        self.chunks |= set(ends)
        return max(found, default=0)

    def left(self, prompt: list[int]) -> None:
        """So much of a prompt was read when its client left."""
        self.chunks |= {
            tuple(prompt[:stop]) for stop in range(self.unit, len(prompt) + 1, self.unit)
        }
        self.boundaries.add(tuple(prompt))


@dataclass
class Meeting:
    """Two engines on one target: with a prefix cache, and without."""

    bench: WarmBench
    warm: Engine
    cold: Engine
    temperature: float
    random: Random
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        assert self.warm.prefix_cache is not None
        self.cache = self.warm.prefix_cache
        self.expected = Expected(self.cache.unit)
        self.strangers = Chats(self.random, self.bench.target.vocab, False)

    def chat(self, turns: Iterator[Turn]) -> None:
        """Raises AssertionError at the first difference."""
        answer = None
        try:
            while True:
                turn = next(turns) if answer is None else turns.send(answer)
                answer = self.turn(turn)
        except StopIteration:
            self.counts.chats += 1

    def turn(self, turn: Turn) -> list[int]:
        limit = self.bench.target.max_len - 60
        turn.prompt = turn.prompt[:limit]
        for _ in range(turn.strangers):
            self.run(self.warm, self.stranger(STRANGERS_ANSWER))
        while turn.evicted and self.cache.pool.give_way():
            pass
        seed = self.random.randrange(2**32)
        neighbours = [self.stranger(400)] if turn.beside else []
        if turn.left:
            self.leave(turn, seed)
        told = self.run(self.warm, self.sequence(turn, seed), *neighbours)
        alone = self.run(self.cold, self.sequence(turn, seed))
        assert told[1] == alone[1], f"warm {told}, cold {alone}, of {turn}"
        self.note(turn, told[0], alone[0])
        return told[1].tokens

    def leave(self, turn: Turn, seed: int) -> None:
        """Send it, and leave while it is read and another request is answered."""
        seq, beside = self.sequence(turn, seed), self.stranger(400)
        self.warm.submit(beside)
        while not beside.emitted:
            self.warm.step()
        self.warm.submit(seq)
        for _ in range(turn.left):
            self.warm.step()
        read = seq.prefilled
        seq.cancelled = beside.cancelled = True
        self.warm.step()
        if read < seq.prompt_len:
            self.expected.left(turn.prompt[:read])
        else:
            self.expected.cached(turn.prompt, turn.partings)

    def note(self, turn: Turn, warm: Sequence, cold: Sequence) -> None:
        assert warm.acceptance == cold.acceptance, (warm.acceptance, cold.acceptance, turn)
        allowed = self.expected.cached(turn.prompt, turn.partings)
        assert warm.cached == allowed, (warm.cached, allowed, turn)
        counts = self.counts
        counts.turns += 1
        counts.tokens += warm.emitted
        counts.prompt_tokens += warm.prompt_len
        counts.cached += warm.cached
        counts.allowed += allowed
        counts.drafted += warm.acceptance.drafted
        counts.accepted += warm.acceptance.accepted
        counts.cold_accepted += cold.acceptance.accepted

    def sequence(self, turn: Turn, seed: int) -> Sequence:
        sampling = Sampling(temperature=self.temperature, seed=seed, logprobs=2)
        return Sequence(
            list(turn.prompt), sampling, turn.max_tokens, reuse=Reuse(partings=turn.partings)
        )

    def stranger(self, tokens: int) -> Sequence:
        words = self.strangers.words(30, 160)
        self.expected.cached(words, ())
        sampling = Sampling(temperature=1.0, seed=self.random.randrange(2**32))
        return Sequence(words, sampling, max_tokens=tokens)

    def run(self, engine: Engine, seq: Sequence, *beside: Sequence) -> tuple[Sequence, Outcome]:
        """Run `seq` with neighbours that were seated before it and run meanwhile; returns it and
        its outcome."""
        outcome = Outcome()
        for neighbour in beside:
            engine.submit(neighbour)
            while not neighbour.emitted:
                engine.step()
        engine.submit(seq)
        while not engine.idle:
            for event in engine.step():
                if event.sequence is seq:
                    outcome.tokens += event.tokens
                    outcome.logprobs += event.logprobs or ()
                    outcome.finish, outcome.error = event.finish, event.error
            for neighbour in beside:
                neighbour.cancelled |= seq.finish is not None
        assert outcome.finish == "length", outcome
        return seq, outcome


def campaign(
    bench: WarmBench, loop: str, temperature: float, numbers: Iterable[int], seed: int = 0
) -> Counts:
    """The chats of these numbers. Raises AssertionError at the first turn that differs."""
    random = Random(f"{seed} {temperature}")
    meeting = Meeting(bench, bench.warm(loop), bench.cold(loop), temperature, random)
    drawn = Chats(random, bench.target.vocab, bench.target.max_len >= 2 * LONG_ANSWER)
    for number in numbers:
        meeting.cache.pool.budget.device = 2**40
        meeting.chat(drawn.kinds[number % len(drawn.kinds)]())
        if meeting.counts.chats % 20 == 0:
            print(json.dumps(asdict(meeting.counts)), file=sys.stderr, flush=True)
    return meeting.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("jax", "cuda"), default="jax")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of cuda")
    parser.add_argument("--model", default="31b", help="a tiny variant, mini or mini-e")
    parser.add_argument(
        "--drafter", default="none", help="none, ngram, suffix, model, eagle3, assistant"
    )
    parser.add_argument("--loop", choices=("host", "device"), default="host")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", help="by default the checkpoint's; float32 on a CPU")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--out", type=Path, help="write what is printed to this file, too")
    args = parser.parse_args()
    began = time.monotonic()
    own = {name: getattr(args, name) for name in ("dtype", "kv_dtype") if getattr(args, name)}
    bench = WarmBench(args.backend, args.model, args.drafter, args.device, **own)
    counts = campaign(bench, args.loop, args.temperature, range(args.chats), args.seed)
    took = round(time.monotonic() - began, 1)
    found = {"counts": asdict(counts), "differences": 0, "seconds": took}
    options = {name: value for name, value in vars(args).items() if name != "out"}
    device = bench.backend.device(bench.config)
    text = json.dumps(run_record(device, gpus=gpus(), options=options) | found)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
