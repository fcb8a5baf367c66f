"""How a request uses the prefix cache: whether it does, which requests share entries with it, and
where later prompts are likely to diverge from its own."""

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
    """The request's use of the prefix cache. None, which neither reads nor stores: on request
    (`cache_prompt: false`), and if the reply contains the prompt's text or log-probabilities.

    caller: entries are shared only among requests of one caller, because the time of a hit reveals
    that the same prompt was sent before.
    """
    if request.cache_prompt is False or request.echo or request.prompt_logprobs is not None:
        return None
    scope = json.dumps([caller, request.cache_salt])
    return Reuse(scope, _partings(prompt, tokenizer) if isinstance(request, ChatRequest) else ())


def _partings(prompt: list[int], tokenizer: ServedTokenizer) -> tuple[int, ...]:
    """Positions where later prompts may diverge: the start of the latest user message (it may be
    edited and sent again) and its end (templates drop the thoughts after it once a newer user
    message follows)."""
    turn = tokenizer.token_id(TURN)
    end = len(prompt)
    for at in range(len(prompt) - 2, -1, -1):
        if prompt[at] != turn:
            continue
        if tokenizer.decode(prompt[at + 1 : at + 2 + len(USER)]).startswith(USER):
            return at, end
        end = at
    return ()
