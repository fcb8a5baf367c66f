"""From a validated wire request to the engine's sequences."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass, replace

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.prompts import Sight, check_ids, encode, predicted_text
from serve.reuse import reuse_of
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.speculation import speculative_of
from serve.structure import Thinking, thinking_at, with_free_arguments
from specdec.constraints.constraint import TextRules, constraint_of
from specdec.constraints.recite import Recite
from specdec.constraints.trial import Untried, remembered_only
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.engine import DraftSetup
from specdec.core.errors import UserError
from specdec.core.pictures import PlacedPicture
from specdec.core.prediction import Prediction
from specdec.core.types import Constraint, Sampling, Sequence
from targets.vision.prompt import PicturePrompt

SEED_BITS = 53
"""Of a seed that is drawn here: readers of JSON lose larger integers, and a client may send it
again."""
VLLM_DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
class EngineRequest:
    """A request in the engine's terms."""

    prompts: list[list[int]]
    """As they are counted and shown: with the image's own id at the places of pictures."""
    choices: list[Sequence]
    """`n` per prompt, in the order of OpenAI's choices; empty if max_tokens is 0."""
    recitals: list[Sequence | None]
    """One scoring sequence per prompt; None unless log-probabilities of the prompt were
    requested."""
    thinking: Thinking
    """The state of thoughts at the prompt's end."""
    constrain: Callable[[], None] | None = None
    """Sets the choices' constraints; None: they are set already. It first tries a grammar that has
    no verdict yet, which takes seconds. Raises ApiError 400."""

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.choices, *(seq for seq in self.recitals if seq is not None)]


def plan(
    request: ChatRequest | CompletionRequest,
    tokenizer: ServedTokenizer,
    vocabulary: Vocabulary,
    max_len: int,
    request_id: str,
    caller: str = "",
    drafting: DraftSetup = DraftSetup(),  # noqa: B008
    sight: Sight | None = None,
) -> EngineRequest:
    """Translate a request to sequences for the engine. Takes long if its prompt or its schema is
    long, or if it has pictures, which are decoded here.
    caller: see `reuse_of`. drafting: the engine's. sight: None for a model that takes no pictures.
    Raises ApiError 400 or UserError, and ApiError 429 for pictures without room."""
    speculative = speculative_of(request, drafting)
    encoded = encode(request, tokenizer, max_len, sight)
    prompts = [prompt.ids for prompt in encoded]
    choices = [] if request.limit == 0 else _choices(request, encoded, tokenizer, max_len, sight)
    thinking = thinking_at(request, tokenizer, prompts[0])

    def constrain() -> None:
        made = _constraints(request, tokenizer, thinking, vocabulary, len(choices))
        for seq, constraint in zip(choices, made, strict=True):
            seq.constraint = constraint

    untried = False
    try:
        with remembered_only():
            constrain()
    except Untried:
        untried = True
    predicted = predicted_text(request, tokenizer, max_len)
    for number, seq in enumerate(choices):
        seq.request_id = f"{request_id}-{number}"
        seq.prediction = predicted and Prediction(predicted, seq.prompt_len)
        seq.reuse = reuse_of(request, prompts[number // (request.n or 1)], tokenizer, caller)
        seq.speculative = speculative
        seq.reported = bool(request.include_speculation)
    recitals = [_recital(request, prompt, tokenizer) for prompt in prompts]
    return EngineRequest(prompts, choices, recitals, thinking, constrain if untried else None)


def _choices(
    request: ChatRequest | CompletionRequest,
    prompts: Seqs[PicturePrompt],
    tokenizer: ServedTokenizer,
    max_len: int,
    sight: Sight | None,
) -> list[Sequence]:
    """Choice j of a prompt equals the answer to a single request with seed + j. A `max_tokens`
    beyond the context is no error: the answer ends with finish_reason "length"."""
    sampling = _sampling(request, tokenizer)
    stop_ids = frozenset(request.stop_token_ids or ())
    check_ids(stop_ids, tokenizer, "stop_token_ids")
    if not request.ignore_eos:
        stop_ids |= frozenset(tokenizer.stop_ids)
    return [
        Sequence(
            list(tokens),
            replace(sampling, seed=(sampling.seed + choice) % 2**64),
            max_tokens=min(request.limit or max_len, max_len - len(tokens)),
            stop_ids=stop_ids,
            pictures=pictures,
        )
        for tokens, pictures in [_read(prompt, sight) for prompt in prompts]
        for choice in range(request.n or 1)
    ]


def _read(
    prompt: PicturePrompt, sight: Sight | None
) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """A prompt's ids for the engine, and its pictures, decoded."""
    if sight is None or not prompt.files:
        return prompt.ids, ()
    return prompt.tokens, sight.room.decoded(prompt, sight.vision)


def _constraints(
    request: ChatRequest | CompletionRequest,
    tokenizer: ServedTokenizer,
    thinking: Thinking,
    vocabulary: Vocabulary,
    count: int,
) -> list[Constraint | None]:
    """One constraint per choice."""

    def made(rules: TextRules) -> list[Constraint | None]:
        return [constraint_of(rules, vocabulary) for _ in range(count)]

    try:
        return with_free_arguments(made, request, tokenizer, thinking)
    except UserError as problem:
        raise ApiError(400, str(problem)) from None


def recited(request: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives each token of the prompt comes with; None: the prompt's
    log-probabilities were not requested."""
    if request.prompt_logprobs is None and request.echo:
        return request.logprob_count
    return request.prompt_logprobs


def _recital(
    request: ChatRequest | CompletionRequest, prompt: list[int], tokenizer: ServedTokenizer
) -> Sequence | None:
    """A sequence that generates the prompt token by token from its first one, to get the prompt's
    log-probabilities as decoding computes them. The choices themselves are not affected."""
    wish = recited(request)
    if wish is None or len(prompt) == 1:
        return None
    if silent := set(prompt) & set(tokenizer.suppress_ids):
        message = f"the prompt holds token id {min(silent)}, which this model never generates"
        raise ApiError(400, f"{message}: it has no log-probability", param="prompt_logprobs")
    return Sequence(
        prompt[:1],
        Sampling(logprobs=wish),
        max_tokens=len(prompt) - 1,
        constraint=Recite(prompt),
        reuse=None,
    )


def _sampling(request: ChatRequest | CompletionRequest, tokenizer: ServedTokenizer) -> Sampling:
    """The request's sampling parameters, by default the checkpoint's, then vLLM's. Raises ApiError
    or UserError for invalid ones."""
    values = dict(VLLM_DEFAULTS)
    for name in values:
        wish = getattr(request, name)
        values[name] = tokenizer.defaults.get(name, values[name]) if wish is None else wish
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    check_ids(bias, tokenizer, "logit_bias")
    check_ids(request.allowed_token_ids or (), tokenizer, "allowed_token_ids")
    top_k = int(values.pop("top_k"))
    try:
        return Sampling(
            **values,
            top_k=0 if top_k == -1 else top_k,  # vLLM writes "off" as -1 too
            logit_bias=tuple(bias.items()),
            seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed % 2**64,
            logprobs=request.logprob_count,
        )
    except UserError as problem:  # its sentence begins with the parameter's name
        name = str(problem).split()[0]
        param = name if name in type(request).model_fields else None
        raise ApiError(400, str(problem), param=param) from None
