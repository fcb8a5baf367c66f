"""A subject of receipts that costs nothing: a target that can be calculated, with a drafter that
calculates it too."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
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
from specdec.report import acceptance, equality, identity, speed
from specdec.report.parts import TEACHER
from specdec.report.profile import K, Profile
from specdec.report.subject import Progress, Subject
from tests.support.fakes import FakeTarget

SHORT = Profile("quick", 6, (K,), (10,), 2, 1, False)
PROFILE = Profile("quick", 24, (1, K), (10,), 2, 1, False)
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


def fake_subject(prompts: int = 6, profile: Profile = PROFILE, **options: Any) -> FakeSubject:
    """prompts: so many chats, in turn of CATEGORIES; the fifth is longer than 512 tokens."""
    texts = [
        Prompt(
            str(i),
            CATEGORIES[i % 2],
            "chat",
            messages=({"role": "user", "content": f"{WORD} {i}" + "long " * 120 * (i == 4)},),
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
    return FakeSubject(model, speculation, profile, texts, 8, progress, **options)


@cache
def fake_receipt_steps() -> dict[str, Any]:
    """Sections by name, in the order in which they are measured: real ones of a fake subject where
    that is cheap."""
    subject = fake_subject()
    found = acceptance.measure(subject)
    gaps = {
        f"{kind}_{name}_ms": 2.0 for name in speed.FIGURES for kind in ("mean", "median", "p99")
    }
    timed = gaps | {"requests": 2, "output_throughput": 100.0, "per_user": 50.0, "input_len": 9.0}
    timed |= {
        "output_len": 8.0,
        "speedup": 1.5,
        "spread": 0.1,
        "answers_sha256": "0",
        "equal": True,
    }
    facts = {"schema_version": identity.SCHEMA_VERSION, "specdec": "0", "git": None, "gpus": []}
    facts |= {"device": "cpu", "versions": {"python": "3"}, "arch": "tiny", "dtype": "float32"}
    facts |= {
        "files": [],
        "slots": 8,
        "max_len": 800,
        "k": K,
        "drafter": "auto",
        "profile": "quick",
    }
    scores = {"text": 1.0, "shuffled": 2.0, "first": 2.0, "second": 1.0, "uniform": 4.0}
    return {
        "identity": facts | {"assistant": "assistant"},
        "doctor": {
            "checks": [{"question": "place", "differing": 0, "total": 9}],
            "wiring": scores | {"verdict": "sound"},
            "healthy": True,
            "policy": None,
        },
        "acceptance": found,
        "equality": equality.measure(subject, found),
        "speed": {
            "rows": [
                timed | {"drafter": name, "users": users}
                for name in ("none", "assistant")
                for users in (1, 4)
            ]
        },
        "memory": dict.fromkeys(("weights", "cache", "peak_device"))
        | {"peak_rss": 1, "why_not": "unknown"},
        TEACHER: {"why_not": "random weights"},
    }
