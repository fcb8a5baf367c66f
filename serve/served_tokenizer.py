"""The server's view of `targets.tokenizer.Tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any, Protocol


class Decoder(Protocol):
    """Incremental detokeniser of one sequence."""

    def step(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ServedTokenizer(Protocol):
    """The members of `targets.tokenizer.Tokenizer` that the server uses."""

    stop_ids: tuple[int, ...]
    suppress_ids: tuple[int, ...]
    defaults: dict[str, float | int]
    vocab_size: int
    model_vocab_size: int
    bos_id: int | None

    @property
    def longest_token(self) -> int: ...

    @property
    def info(self) -> dict[str, str | None]: ...

    def encode(self, text: str) -> list[int]: ...

    def chat_pieces(
        self,
        messages: list[dict[str, Any]],
        continue_final: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> list[str]: ...

    def picture_pieces(
        self,
        messages: list[dict[str, Any]],
        picture: str,
        continue_final: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> tuple[list[str], list[int]]: ...

    def token_text(self, token_id: int) -> str | None: ...

    def encode_pieces(self, pieces: list[str]) -> list[int]: ...

    def decode(self, ids: Seqs[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def stream(self, skip_special: bool = True) -> Decoder: ...

    def token_id(self, token: str) -> int | None: ...

    def to_json(self) -> str: ...
