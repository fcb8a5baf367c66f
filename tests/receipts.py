"""A subject of receipts that costs nothing: a target that can be calculated, with a drafter that
calculates it too."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.registry import config_type
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Proposal
from specdec.evaluation.prompts import Prompt
from specdec.report.profile import K, Profile
from specdec.report.subject import Progress, Subject
from tests.fakes import FakeTarget

PROFILE = Profile("quick", 24, (1, K), (10,), 2, False)
CATEGORIES = ("coding", "math")
VOCAB = 53
WORD = "a prompt that nobody may read"
"""Of every prompt."""


class Clairvoyant(NoDrafter):
    """Guesses what `FakeTarget` chooses, but for every fifth token, or for all of them."""

    def __init__(self, wired: bool) -> None:
        self.wired = wired

    def propose(self, seqs, k):
        return Proposal(np.array([self._guesses(seq, k) for seq in seqs], np.int32))

    def _guesses(self, seq, k) -> list[int]:
        text, guesses = list(seq.tokens), []
        for _ in range(k):
            places = np.arange(1, len(text) + 1)
            token = int((np.array(text) * places).sum() + seq.sampling.seed) % VOCAB
            text.append(token)
            wrong = not self.wired or len(text) % 5 == 0
            guesses.append((token + wrong) % VOCAB)
        return guesses


class FakeTokenizer:
    """A character is a token, and so is the wish to think."""

    stop_ids = ()
    defaults: dict[str, float] = {}

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def encode_chat(self, messages: list[dict[str, Any]], enable_thinking: bool = False):
        return [7] * enable_thinking + self.encode(messages[-1]["content"])


@dataclass(frozen=True)
class FakeSubject(Subject):
    wired: bool = True
    """Whether the drafter with weights is ever right."""

    def engine(self, drafter, loop=None):
        target = self.model.target
        made = NoDrafter() if drafter == "none" else Clairvoyant(self.wired)
        return Engine(target, made, host_cycle(target, made, 0 if drafter == "none" else K))


@contextmanager
def counting(title: str, total: int):
    yield SimpleNamespace(update=lambda done: None)


def fake_subject(prompts: int = 6, **options: Any) -> FakeSubject:
    """prompts: so many chats, in turn of CATEGORIES; each fifth is longer than 512 tokens."""
    texts = [
        Prompt(
            str(i),
            CATEGORIES[i % 2],
            "chat",
            messages=({"role": "user", "content": f"{WORD} {i}" + "long " * 120 * (i % 5 == 4)},),
        )
        for i in range(prompts)
    ]
    placed = {"ngram": SimpleNamespace(make=lambda k: NgramDrafter(1, 3))}
    model = SimpleNamespace(
        target=FakeTarget(slots=3, vocab=VOCAB, max_len=800, chunk=256),
        tokenizer=FakeTokenizer(),
        drafters=placed | {"assistant": None, "none": None, "auto": None},
    )
    speculation = config_type()(drafter="auto", k=K, auto_with="assistant")  # pyright: ignore
    progress = Progress(lambda doing: nullcontext(), counting)
    return FakeSubject(model, speculation, PROFILE, texts, 8, progress, **options)
