"""The embedded model's tokenizer, and the same as llguidance takes it."""

from __future__ import annotations

from llguidance import LLTokenizer

from targets.mini import path
from targets.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(path("mini"))
STOPS = list(TOKENIZER.stop_ids)
GRAMMAR_TOKENIZER = LLTokenizer(
    (path("mini") / "tokenizer.json").read_text(), n_vocab=TOKENIZER.vocab_size, eos_token=STOPS
)
