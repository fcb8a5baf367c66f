"""What constrained text costs at the 31B's true size: a cycle with masks beside one without, on one
card, by turns, and the masks alone. The vocabulary of 262,144 words is made: mini's, and words of
two of its words.

    PYTHONPATH=. python3 docs/log/masks.py OUT.json          # on a Hopper GPU, with llguidance
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from drafters import registry
from specdec.assembly.engine import make_engine, warm_up
from specdec.assembly.model import random_model
from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.config import ModelConfig
from specdec.core.constraint import mask_rows
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.tokenizer import load_tokenizer

WORDS = 262144
K = 7
STEPS = 60
TURNS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "old": {"type": "string"},
        "new": {"type": "string"},
        "mode": {"enum": ["replace", "insert", "delete"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 99999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}},
    },
    "required": ["path", "old", "new", "mode", "line", "tags"],
    "additionalProperties": False,
}


class ManyWords:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None
    eos_token_id = 1

    def __init__(self) -> None:
        own = load_tokenizer(mini.path("mini"))
        small = LLTokenizer(own.to_json(), eos_token=1)
        words = [small.decode_bytes([i]) for i in range(own.vocab_size)]
        known, letters = set(words), [w for w in words[17:] if w.strip().isalpha()]
        for first in letters:
            for second in letters:
                if len(words) < WORDS and first + second.strip() not in known:
                    words.append(first + second.strip())
                    known.add(words[-1])
        self.tokens, self.special_token_ids = words, list(range(17))
        self._ids = {word: i for i, word in enumerate(words)}

    def __call__(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + 24), at, -1)
            end = next(end for end in ends if text[at:end] in self._ids)
            found.append(self._ids[text[at:end]])
            at = end
        return found


class Words(Vocabulary):
    def __init__(self, tokens: LLTokenizer) -> None:
        super().__init__(load_tokenizer(mini.path("mini")))
        self.size, self.stop_ids, self._tokens = WORDS, (1,), tokens


def cycle_ms(engine, constraint) -> list[float]:
    """Milliseconds between steps of one request."""
    seq = Sequence([5] * 512, Sampling(temperature=1.0, seed=3), 4000, constraint=constraint)
    engine.submit(seq)
    while not seq.emitted:
        engine.step()
    for _ in range(6):
        engine.step()
    marks = []
    for _ in range(STEPS):
        marks.append(time.perf_counter())
        engine.step()
    seq.cancelled = True
    engine.step()
    return list(np.diff(marks) * 1e3)


def main() -> None:
    words = ManyWords()
    started = time.perf_counter()
    vocabulary = Words(LLTokenizer(TokenizerWrapper(words)))
    made = time.perf_counter() - started
    rules = TextRules(grammar=json_grammar(SCHEMA))
    model = ModelConfig(backend="cuda", dtype="fp8", slots=1, max_len=8192)
    asked = registry.resolved(registry.config_type()(drafter="ngram", k=K), model)
    loaded = random_model("gemma-4-31b", model, asked)
    engine = make_engine(loaded, asked)
    started = time.perf_counter()
    warm_up(engine, [Sampling(temperature=1.0)])
    warm = time.perf_counter() - started
    free, held = [], []
    for _ in range(TURNS):
        free.append(statistics.median(cycle_ms(engine, None)))
        held.append(statistics.median(cycle_ms(engine, TextConstraint(rules, vocabulary))))
    document = words(
        b'{"path": "src/main.py", "old": "def f(x): return x", "new": "def f(x): return [x]", '
        b'"mode": "replace", "line": 142, "tags": ["sort", "refactor"]}'
    )
    masks = []
    for at in range(len(document) - K):
        seq = Sequence([5], Sampling(), 100, constraint=TextConstraint(rules, vocabulary))
        seq.tokens += document[:at]
        mask_rows([seq], np.array([document[at : at + K]]), WORDS)
        begun = time.perf_counter()
        mask_rows([seq], np.array([document[at : at + K]]), WORDS)
        masks.append((time.perf_counter() - begun) * 1e3)
    result = {
        "vocabulary made, s": made,
        "warm-up, s": warm,
        "cycle, ms": free,
        "cycle under a schema, ms": held,
        "masks of 8 positions alone, ms: median, p90, max": [
            statistics.median(masks),
            float(np.percentile(masks, 90)),
            max(masks),
        ],
        "extra share": statistics.median(held) / statistics.median(free) - 1,
    }
    print(json.dumps(result, indent=1))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
