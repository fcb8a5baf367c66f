"""What the tests of constrained text share: a schema, requests of each kind, and their texts."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seqs
from functools import cache

import numpy as np

from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.rules import ThinkingLimit
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.constraint import Unrestricted
from specdec.core.engine import Engine
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.tokenizer import Tokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
AMBIGUOUS = 'start: s\ns: s s | s s s | "a"\n'
"""A grammar that has more readings with each token, until a limit ends its text."""
PROMPTS = ("def quicksort(items):", "class Stack:\n    def", "import os\n\n# the names\nnames =")


@cache
def mini_tokenizer() -> Tokenizer:
    return load_tokenizer(mini.path("mini"))


@cache
def mini_vocabulary() -> Vocabulary:
    return Vocabulary(mini_tokenizer())


def rules() -> list[TextRules | None]:
    """One of each kind, and none."""
    tokenizer = mini_tokenizer()
    word = tuple(tokenizer.encode(" return")[1:])
    thought = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
    grammar = json_grammar(SCHEMA)
    return [
        TextRules(grammar=grammar),
        None,
        TextRules(bad_words=(word,), min_tokens=20, stop_ids=tokenizer.stop_ids),
        TextRules(allowed=tuple(range(17, 600))),
        TextRules(budget=ThinkingLimit(*thought, tokens=5, inside=True)),  # pyright: ignore
        TextRules(grammar=grammar, bad_words=(word,)),
    ]


class EveryThird(Unrestricted):
    """Allows a third of the words, another one after each token."""

    def masks(self, seq: Sequence, draft: Seqs[int], out: np.ndarray) -> None:
        text = [*seq.tokens, *draft]
        for row in range(len(draft) + 1):
            word = len(seq.tokens) + row
            bits = np.zeros(out.shape[1] * 32, bool)
            bits[(word + text[word - 1]) % 3 :: 3] = True
            out[row] &= np.packbits(bits, bitorder="little").view(np.uint32)


def requests(temperature: float, tokens: int = 24, constrain: bool = True) -> list[Sequence]:
    """Six requests, two of them under a schema."""
    tokenizer = mini_tokenizer()
    found = []
    for i, rule in enumerate(rules()):
        wanted = constrain and rule is not None
        found.append(
            Sequence(
                tokenizer.encode(PROMPTS[i % len(PROMPTS)]),
                Sampling(temperature=temperature, seed=50 + i, logprobs=2 if i == 2 else None),
                max_tokens=tokens,
                stop_ids=frozenset(tokenizer.stop_ids),
                request_id=str(i),
                constraint=TextConstraint(rule, mini_vocabulary()) if wanted else None,
            )
        )
    return found


def predicted(requests: Seqs[Sequence], answers: Seqs[Seqs[int]]) -> Seqs[Sequence]:
    """The same, all but one with an answer that is expected of it."""
    for seq, answer in zip(requests, answers, strict=True):
        if seq.request_id != "4":
            seq.prediction = Prediction(PredictedText(answer), seq.prompt_len)
    return requests


def edited(answer: Seqs[int]) -> list[int]:
    """With a token changed, one left out, and one put in."""
    return [*answer[:6], 5, *answer[7:15], *answer[16:22], 6, *answer[22:]]


def texts(engine: Engine, temperatures: Seqs[float] = (0.0, 1.0)) -> list[list[int]]:
    """The answers of all requests, at each temperature."""
    answers = []
    for temperature in temperatures:
        seqs = requests(temperature)
        engine.run_to_end(seqs)
        answers += [seq.tokens[seq.prompt_len :] for seq in seqs]
    return answers


def check_predictions(engine: Engine, plain: Seqs[list[int]]) -> None:
    """No prediction changes a token of `texts` (K = 4), right, partly right or wrong, and a good
    one saves all cycles that it can."""
    for temperature, expected in ((0.0, plain[:6]), (1.0, plain[6:])):
        other = [edited(a) if temperature else a[::-1] for a in expected]
        for guesses in (expected, other):
            seqs = predicted(requests(temperature), guesses)
            engine.run_to_end(list(seqs))
            assert [seq.tokens[seq.prompt_len :] for seq in seqs] == expected
            if guesses is expected:
                cycles = [seq.acceptance.cycles for seq in seqs if seq.prediction]
                assert cycles == [-(-(len(a) - 1) // 5) for a in [*expected[:4], *expected[5:]]]


def random_ids(seed: int, count: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)
