"""A chat of the Python door as the server has it: tools and thoughts in the prompt, what binds the
answer, and how it is taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import ValidationError

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.outputs import output_part
from serve.structure import Thinking, thinking_at, with_free_arguments
from specdec.audit.receipt import OutputPart, sentence_of
from specdec.constraints.constraint import TextConstraint, constraint_of
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.errors import UserError
from specdec.llm_types import Conversation, SamplingParams
from targets.tokenizer import Tokenizer


class Chat:
    """One chat, checked by the server's schema."""

    def __init__(self, conversation: Conversation, params: SamplingParams) -> None:
        """Raises UserError for messages, tools and parameters of no known form."""
        messages, thinking = conversation.messages, conversation.thinking
        if isinstance(messages, str) or not isinstance(messages, Seqs):
            raise UserError('messages is a list of {"role": ..., "content": ...}')
        if thinking is not None and not isinstance(thinking, bool):
            raise UserError(f"thinking is True, False or None, not {thinking!r}")
        self._request = _request(conversation, params)
        self._conversation = conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages as templates read them; contents of several parts are as they were given."""
        pairs = zip(self._request.messages, self._conversation.messages, strict=True)
        return [_with_parts(read.for_template(), given) for read, given in pairs]

    @property
    def template_values(self) -> dict[str, Any]:
        return self._request.template_values

    def output_part(self, tokenizer: Tokenizer, prompt: list[int]) -> OutputPart:
        """How the answer to a prompt with these ids is taken apart."""
        return output_part(self._request, self._thinking(tokenizer, prompt))

    def constraint(
        self, tokenizer: Tokenizer, prompt: list[int], vocabulary: Vocabulary
    ) -> TextConstraint | None:
        """What binds the answer: its structure, its calls and words. As on the server, arguments
        stay free where a call need not be strict and its schema can't be enforced. Raises
        UserError."""
        make = partial(constraint_of, vocabulary=vocabulary)
        thinking = self._thinking(tokenizer, prompt)
        try:
            return with_free_arguments(make, self._request, tokenizer, thinking)
        except ApiError as problem:
            raise UserError(problem.message) from None

    def _thinking(self, tokenizer: Tokenizer, prompt: list[int]) -> Thinking:
        return thinking_at(self._request, tokenizer, prompt)


def _request(conversation: Conversation, params: SamplingParams) -> ChatRequest:
    """Raises UserError."""
    structure, allowed = params.structure, params.allowed_token_ids
    fields = {
        "messages": [_in_one_part(message) for message in conversation.messages],
        "tools": _listed(conversation.tools),
        "tool_choice": conversation.tool_choice,
        "thinking_token_budget": conversation.thinking_token_budget,
        "structured_outputs": asdict(structure) if structure.set_fields else None,
        "stop_token_ids": list(params.stop_token_ids),
        "allowed_token_ids": None if allowed is None else list(allowed),
        "bad_words": list(params.bad_words),
        "min_tokens": params.min_tokens,
    }
    if conversation.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": conversation.thinking}
    try:
        return ChatRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as failure:
        raise UserError(sentence_of(failure)) from None
    except ApiError as problem:
        raise UserError(problem.message) from None


def _in_one_part(message: Any) -> Any:
    """Without the parts of its content, which the door reads itself."""
    if not isinstance(message, Mapping):
        return message
    return dict(message) | ({"content": ""} if _has_parts(message) else {})


def _with_parts(read: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """With the parts that were given, before what the schema made a text of, as of a refusal."""
    if not _has_parts(given):
        return read
    beside = [{"text": read["content"]}] if read["content"] else []
    return read | {"content": [*given["content"], *beside]}


def _has_parts(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), list)


def _listed(tools: Any) -> Any:
    return list(tools) if isinstance(tools, tuple) else tools
