"""The part of a reply about its prompt: the echoed text, and log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import Any

from serve.chat_schema import ChatRequest
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.stream import TokenText, finite, token_text
from specdec.core.types import TokenLogprob


@dataclass(frozen=True)
class PromptReport:
    """Echo and log-probabilities of a prompt; empty if the request sets neither."""

    echo: str = ""
    """Text before the answer's own text."""
    tokens: tuple[TokenText, ...] = ()
    """The prompt's tokens, if /v1/completions echoes them with log-probabilities."""
    logprobs: list[Any] | None = None
    """vLLM's `prompt_logprobs`, if requested."""

    def logprobs_json(self) -> dict[str, Any]:
        return {} if self.logprobs is None else {"prompt_logprobs": self.logprobs}


def report(
    request: ChatRequest | CompletionRequest,
    prompt: Seqs[int],
    text: str | None,
    recited: Seqs[TokenLogprob],
    tokenizer: ServedTokenizer,
) -> PromptReport:
    """text: the prompt as it was sent, None where it was sent as ids or messages."""
    echo = ""
    if request.echo and isinstance(request, ChatRequest):
        echo = request.messages[-1].text  # vLLM repeats the last message
    elif request.echo:
        echo = tokenizer.decode(prompt) if text is None else text
    tokens: tuple[TokenText, ...] = ()
    if request.echo and isinstance(request, CompletionRequest) and request.logprobs is not None:
        tokens = _as_texts(prompt, recited, tokenizer)
    wanted = request.prompt_logprobs is not None
    return PromptReport(echo, tokens, _as_vllm(prompt, recited, tokenizer) if wanted else None)


def _as_texts(
    prompt: Seqs[int], recited: Seqs[TokenLogprob], tokenizer: ServedTokenizer
) -> tuple[TokenText, ...]:
    texts, at = [], 0
    for token, chosen in zip(prompt, [None, *recited], strict=True):
        texts.append(token_text(tokenizer, token, chosen, at))
        at += len(texts[-1].text)
    return tuple(texts)


def _as_vllm(
    prompt: Seqs[int], recited: Seqs[TokenLogprob], tokenizer: ServedTokenizer
) -> list[dict[str, Any] | None]:
    entries: list[dict[str, Any] | None] = [None]
    for token, chosen in zip(prompt[1:], recited, strict=True):
        values: dict[int, tuple[float, int | None]]
        values = {i: (value, rank) for rank, (i, value) in enumerate(chosen.top, 1)}
        values.setdefault(token, (chosen.logprob, None))
        entries.append(
            {
                str(i): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.decode([i]),
                }
                for i, (value, rank) in values.items()
            }
        )
    return entries
