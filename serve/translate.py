"""From a validated wire request to the engine's sequences."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence as Seqs
from dataclasses import replace

from serve.errors import ApiError
from serve.schema import ChatRequest, CompletionRequest
from serve.stream import Tokenizer
from specdec.core.types import Sampling, Sequence

VLLM_DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def encode(
    request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, max_len: int
) -> list[list[int]]:
    """The request's prompts as token ids; ApiError 400 if one can't be served."""
    if isinstance(request, ChatRequest):
        kwargs = request.chat_template_kwargs or {}
        prompts = [tokenizer.encode_chat(request.template_messages(), **kwargs)]
    else:
        prompts = [p if isinstance(p, list) else tokenizer.encode(p) for p in request.prompt]
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    for prompt in prompts:
        _check_ids(prompt, tokenizer, param)
        if len(prompt) >= max_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens but the context is {max_len}: shorten it",
                param=param,
                code="context_length_exceeded",
            )
    return prompts


def to_sequences(
    request: ChatRequest | CompletionRequest,
    prompts: Seqs[list[int]],
    tokenizer: Tokenizer,
    max_len: int,
    request_id: str,
) -> list[Sequence]:
    """`n` sequences per prompt, in the order of OpenAI's choices.

    Choice j of a prompt is what a lone request with seed + j gives. More `max_tokens` than the
    context has room for is no error: the engine ends with finish_reason "length".
    """
    sampling = _sampling(request, tokenizer)
    stop_ids = frozenset(request.stop_token_ids or ())
    _check_ids(stop_ids, tokenizer, "stop_token_ids")
    if not request.ignore_eos:
        stop_ids |= frozenset(tokenizer.stop_ids)
    sequences = []
    for prompt in prompts:
        for choice in range(request.n or 1):
            sequences.append(
                Sequence(
                    list(prompt),
                    replace(sampling, seed=(sampling.seed + choice) % 2**64),
                    max_tokens=min(request.limit or max_len, max_len - len(prompt)),
                    stop_ids=stop_ids,
                    request_id=f"{request_id}-{len(sequences)}",
                )
            )
    return sequences


def _sampling(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> Sampling:
    """The request's wishes, else the checkpoint's defaults, else vLLM's; UserError if bad."""
    values = dict(VLLM_DEFAULTS)
    for name in values:
        wish = getattr(request, name)
        values[name] = tokenizer.defaults.get(name, values[name]) if wish is None else wish
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    _check_ids(bias, tokenizer, "logit_bias")
    top_k = int(values.pop("top_k"))
    return Sampling(
        **values,
        top_k=0 if top_k == -1 else top_k,  # vLLM writes "off" as -1 too
        logit_bias=tuple(bias.items()),
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        logprobs=request.logprob_count,
    )


def _check_ids(ids: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    bad = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if bad is not None:
        known = f"ids go from 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, f"{param} holds token id {bad}, but {known}", param=param)
