"""How a request uses the prefix cache: whether it does, with whom it shares, and where later
prompts may part from its own."""

from __future__ import annotations

import json

from serve.chat_schema import ChatRequest
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.structure import TURN
from specdec.core.types import Reuse

USER = "user"


def reuse_of(
    request: ChatRequest | CompletionRequest,
    prompt: list[int],
    tokenizer: ServedTokenizer,
    caller: str,
) -> Reuse | None:
    """None where nothing is to be read or kept: on request, and where the prompt itself is told of.

    caller: whose requests share what is kept; a hit's time tells that somebody wrote this before.
    """
    if request.cache_prompt is False or request.echo or request.prompt_logprobs is not None:
        return None
    scope = json.dumps([caller, request.cache_salt])
    return Reuse(scope, _partings(prompt, tokenizer) if isinstance(request, ChatRequest) else ())


def _partings(prompt: list[int], tokenizer: ServedTokenizer) -> tuple[int, ...]:
    """Where the latest user message begins (it may be sent again, edited) and where it ends (from
    there on, templates cut thoughts once the next one comes)."""
    turn = tokenizer.token_id(TURN)
    end = len(prompt)
    for at in range(len(prompt) - 2, -1, -1):
        if prompt[at] != turn:
            continue
        if tokenizer.decode(prompt[at + 1 : at + 2 + len(USER)]).startswith(USER):
            return at, end
        end = at
    return ()
