"""OpenAI's reply objects of chats and completions: choices, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Seqs
from dataclasses import replace
from typing import Any, Protocol

from serve.prompt_report import PromptReport
from serve.stream import (
    Alternative,
    Call,
    CallArguments,
    CallBegan,
    ChoiceFinish,
    Content,
    Piece,
    Reasoning,
    ThoughtEnded,
    TokenText,
    call_id,
    calls_of,
    thought_of,
)

Json = dict[str, Any]


class Reply(Protocol):
    """Builds the reply objects of one endpoint."""

    request_id: str

    def envelope(self, choices: list[Json], streaming: bool) -> Json: ...

    def whole(self, index: int, choice: Piece, prompt: PromptReport) -> Json:
        """A choice of a reply that isn't streamed. choice: all of its pieces as one."""
        ...

    def opening(self, index: int, prompt: PromptReport) -> list[Json]:
        """Choices of the chunks sent before a choice's first piece, if any."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """The choices of a piece's chunks, one per chunk."""
        ...


class ChatReply:
    def __init__(self, model_name: str, logprobs: bool, fingerprint: str) -> None:
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.logprobs = logprobs
        self._head = _head(self.request_id, model_name, fingerprint)

    def envelope(self, choices: list[Json], streaming: bool) -> Json:
        kind = "chat.completion.chunk" if streaming else "chat.completion"
        return {**self._head, "object": kind, "choices": choices}

    def whole(self, index: int, choice: Piece, prompt: PromptReport) -> Json:
        calls = [_call(call) for call in calls_of(choice.parts)]
        content = prompt.echo + choice.text
        message: Json = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        thought = thought_of(choice.parts)
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = calls
        document = self._choice(index, "message", message, choice.tokens, choice.finish)
        return document | prompt.logprobs_json()

    def opening(self, index: int, prompt: PromptReport) -> list[Json]:
        delta = {"role": "assistant", "content": prompt.echo}
        return [self._choice(index, "delta", delta, (), None)]

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        deltas = [_delta(part) for part in piece.parts if not isinstance(part, ThoughtEnded)]
        if not deltas and _says_something(piece):
            deltas = [{}]
        last = len(deltas) - 1
        return [
            self._choice(
                index,
                "delta",
                delta,
                piece.tokens if i == 0 else (),
                piece.finish if i == last else None,
            )
            for i, delta in enumerate(deltas)
        ]

    def _choice(
        self,
        index: int,
        key: str,
        message: Json,
        tokens: Seqs[TokenText],
        finish: ChoiceFinish | None,
    ) -> Json:
        content = {"content": [_chat_token(t) for t in tokens], "refusal": None}
        # A chunk without tokens has null; a whole reply always has the object if requested.
        logprobs = content if self.logprobs and (tokens or key == "message") else None
        return {"index": index, key: message, "logprobs": logprobs, "finish_reason": finish}


def _says_something(piece: Piece) -> bool:
    """Whether a piece must be sent even without text."""
    return bool(piece.tokens or piece.cycle_reports) or piece.finish is not None


def _delta(part: Content | Reasoning | CallBegan | CallArguments) -> Json:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegan(index, name):
            call = {"index": index, "id": call_id(), "type": "function"}
            return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class CompletionReply:
    def __init__(self, model_name: str, logprobs: bool, fingerprint: str) -> None:
        self.request_id = f"cmpl-{uuid.uuid4().hex}"
        self.logprobs = logprobs
        self._head = _head(self.request_id, model_name, fingerprint)

    def envelope(self, choices: list[Json], streaming: bool) -> Json:
        return {**self._head, "object": "text_completion", "choices": choices}

    def whole(self, index: int, choice: Piece, prompt: PromptReport) -> Json:
        after = len(prompt.echo)
        tokens = [*prompt.tokens, *(_moved(token, after) for token in choice.tokens)]
        document = self._choice(index, prompt.echo + choice.text, tokens, choice.finish)
        return document | prompt.logprobs_json()

    def opening(self, index: int, prompt: PromptReport) -> list[Json]:
        return [self._choice(index, prompt.echo, (), None)] if prompt.echo else []

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        if not (piece.text or _says_something(piece)):
            return []
        return [self._choice(index, piece.text, piece.tokens, piece.finish)]

    def _choice(
        self, index: int, text: str, tokens: Seqs[TokenText], finish: ChoiceFinish | None
    ) -> Json:
        logprobs = _completion_logprobs(tokens) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _moved(token: TokenText, by: int) -> TokenText:
    return replace(token, offset=token.offset + by)


def _head(request_id: str, model_name: str, fingerprint: str) -> Json:
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": model_name,
        "system_fingerprint": fingerprint,
    }


def _chat_token(token: TokenText) -> Json:
    return {**_alternative(token), "top_logprobs": [_alternative(one) for one in token.top]}


def _alternative(one: Alternative) -> Json:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.data)}


def _completion_logprobs(tokens: Seqs[TokenText]) -> Json:
    """The older form: parallel lists, and per token a map that holds the chosen one as well."""
    return {
        "text_offset": [t.offset for t in tokens],
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [
            None
            if t.logprob is None
            # Several ids may have one text: keep the best one's value, but the chosen token's own.
            else {one.text: one.logprob for one in (*reversed(t.top), t)}
            for t in tokens
        ],
    }
