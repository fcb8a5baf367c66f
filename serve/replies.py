"""OpenAI's reply objects: what a choice looks like, whole and in chunks, chat and completion."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Seqs
from typing import Any, Protocol

from serve.stream import ChoiceFinish, TokenText
from specdec.core.version import VERSION

Json = dict[str, Any]


class Reply(Protocol):
    """How one endpoint words its answers."""

    request_id: str
    logprobs: bool

    def envelope(self, choices: list[Json], streaming: bool) -> Json: ...

    def whole(self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish) -> Json:
        """A choice of a reply that isn't streamed."""
        ...

    def part(
        self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish | None
    ) -> Json:
        """A choice of one chunk."""
        ...

    def opening(self, index: int) -> Json | None:
        """What is sent before a choice's first chunk, if anything."""
        ...


class ChatReply:
    def __init__(self, model_name: str, logprobs: bool) -> None:
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.logprobs = logprobs
        self._head = _head(self.request_id, model_name)

    def envelope(self, choices: list[Json], streaming: bool) -> Json:
        kind = "chat.completion.chunk" if streaming else "chat.completion"
        return {**self._head, "object": kind, "choices": choices}

    def whole(self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, "message", message, tokens, finish)

    def part(
        self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish | None
    ) -> Json:
        return self._choice(index, "delta", {"content": text} if text else {}, tokens, finish)

    def opening(self, index: int) -> Json | None:
        return self._choice(index, "delta", {"role": "assistant", "content": ""}, (), None)

    def _choice(
        self,
        index: int,
        key: str,
        message: Json,
        tokens: Seqs[TokenText],
        finish: ChoiceFinish | None,
    ) -> Json:
        content = {"content": [_chat_token(t) for t in tokens], "refusal": None}
        # An empty list says "asked for, none in this chunk"; whole replies always carry the object.
        logprobs = content if self.logprobs and (tokens or key == "message") else None
        return {"index": index, key: message, "logprobs": logprobs, "finish_reason": finish}


class CompletionReply:
    def __init__(self, model_name: str, logprobs: bool) -> None:
        self.request_id = f"cmpl-{uuid.uuid4().hex}"
        self.logprobs = logprobs
        self._head = _head(self.request_id, model_name)

    def envelope(self, choices: list[Json], streaming: bool) -> Json:
        return {**self._head, "object": "text_completion", "choices": choices}

    def whole(self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish) -> Json:
        return self.part(index, text, tokens, finish)

    def part(
        self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish | None
    ) -> Json:
        logprobs = _completion_logprobs(tokens) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, index: int) -> Json | None:
        return None


def _head(request_id: str, model_name: str) -> Json:
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": model_name,
        "system_fingerprint": f"specdec-{VERSION}",
    }


def _chat_token(token: TokenText) -> Json:
    top = [_token(text, logprob) for text, logprob in token.top]
    return {**_token(token.text, token.logprob), "top_logprobs": top}


def _token(text: str, logprob: float) -> Json:
    # Half a character has bytes that its text doesn't tell.
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}


def _completion_logprobs(tokens: Seqs[TokenText]) -> Json:
    """The older form: parallel lists, and per token a map that holds the chosen one as well."""
    return {
        "text_offset": [t.offset for t in tokens],
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{**dict(reversed(t.top)), t.text: t.logprob} for t in tokens],
    }
