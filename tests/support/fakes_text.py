"""A tokenizer that fits on a page, for the fake target: one printable character per token."""

from __future__ import annotations

import string
from collections.abc import Sequence as Seqs
from typing import Any

from specdec.core.errors import UserError

ALPHABET = "\0\1" + string.ascii_letters + "0123456"
BOS = 0
EOS = 1


class CharTokenizer:
    """61 ids: BOS, EOS, letters, some digits. What it can't write becomes "x"."""

    def __init__(self, defaults: dict[str, float | int] | None = None) -> None:
        self.stop_ids = (EOS,)
        self.defaults = {} if defaults is None else defaults
        self.suppress_ids = ()
        self.vocab_size = self.model_vocab_size = len(ALPHABET)
        self.bos_id, self.longest_token = BOS, 1
        self.info = {"bos_token": "\0"}

    def encode(self, text: str) -> list[int]:
        return [BOS, *(max(ALPHABET.find(c), 2) if c in ALPHABET else 25 for c in text)]

    def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        return self.encode_pieces(self.chat_pieces(messages, **template_kwargs))

    def encode_pieces(self, pieces: list[str]) -> list[int]:
        return self.encode("".join(pieces))

    def chat_pieces(
        self,
        messages: list[dict[str, Any]],
        continue_final: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> list[str]:
        if messages[0]["role"] == "assistant":
            raise UserError("the chat template refuses these messages: start with a user turn")
        turns = [f"{m['role']}0{m['content']}1" for m in messages]
        return [*turns, *(f"{k}{v}" for k, v in template_kwargs.items())]

    def decode(self, ids: Seqs[int], skip_special: bool = True) -> str:
        return "".join(ALPHABET[i] for i in ids if i > EOS)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()

    def token_id(self, token: str) -> int | None:
        return None

    def to_json(self) -> str:
        raise NotImplementedError("no grammars on the fake")

    def stream(self, skip_special: bool = True) -> CharDecoder:
        return CharDecoder(self)


class CharDecoder:
    def __init__(self, tokenizer: CharTokenizer) -> None:
        self._tokenizer = tokenizer

    def step(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def finish(self) -> str:
        return ""


class HalvesTokenizer(CharTokenizer):
    """Two tokens make one character: its decoder holds the first half back."""

    def decode(self, ids: Seqs[int], skip_special: bool = True) -> str:
        text = super().decode(ids)
        return "".join(text[i] if i + 1 < len(text) else "\ufffd" for i in range(0, len(text), 2))

    def stream(self, skip_special: bool = True) -> HalvesDecoder:
        return HalvesDecoder(self)


class HalvesDecoder:
    def __init__(self, tokenizer: HalvesTokenizer) -> None:
        self._tokenizer, self._open = tokenizer, []

    def step(self, token_id: int) -> str:
        self._open.append(token_id)
        return self.finish() if len(self._open) == 2 else ""

    def finish(self) -> str:
        text, self._open = self._tokenizer.decode(self._open), []
        return text
