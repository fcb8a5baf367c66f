"""Types of the Python API: sampling parameters, answers and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seqs
from dataclasses import dataclass, field
from json import loads
from typing import Any

from pydantic import BaseModel

from specdec.audit.receipt import Receipt
from specdec.constraints.structure import Structure
from specdec.core.errors import UserError
from specdec.core.stats import Acceptance
from specdec.core.types import Sampling, TokenLogprob
from specdec.llm_html import provenance_html


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request, by vLLM's names. None: the value of the checkpoint's
    generation_config.json; without one, greedy and unfiltered."""

    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int = 0
    """Same seed, same output, whatever the drafter."""
    max_tokens: int = 128
    stop: str | Seqs[str] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: Seqs[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives with log-probabilities per token, beside its own; None: none at
    all."""
    json: str | Mapping[str, Any] | type | bool | None = None
    """The answer is JSON: of this schema (a dict, its text, or a pydantic model), or True for any
    object."""
    regex: str | None = None
    """The whole answer matches this regular expression."""
    choice: Seqs[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """The answer follows this grammar, Lark or GBNF."""
    allowed_token_ids: Seqs[int] | None = None
    """The only ids that may come."""
    bad_words: Seqs[str] = ()
    """Words that must not come."""
    min_tokens: int = 0
    """Tokens before an end token may come."""
    prediction: str | Seqs[int] | None = None
    """A text that the answer is expected to repeat for the most part, such as a file that is to be
    edited: it is guessed from, and never changes the answer."""
    drafter: str | None = None
    """One of those loaded, or none; by default the one that was loaded."""
    k: int | None = None
    """Most draft tokens per cycle, up to the number that was loaded."""
    cache_salt: str | None = None
    """Prompts of different salts share nothing in the prefix cache."""

    @property
    def structure(self) -> Structure:
        """Raises UserError for a schema of no known form, and for two structures."""
        schema = self.json
        if isinstance(schema, type):
            if not issubclass(schema, BaseModel):
                raise UserError(f"json: {schema.__name__} is no pydantic model")
            schema = schema.model_json_schema()
        anything = schema is True
        structure = Structure(
            json=None if anything or schema is False else _plain(schema),
            json_object=anything,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )
        if len(named := structure.set_fields) > 1:
            raise UserError(f"an answer has one structure: give one of {', '.join(named)}")
        return structure

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_target(self, defaults: Mapping[str, float]) -> Sampling:
        """The target's `Sampling`, with `defaults` for unset values. Raises UserError for invalid
        ones."""

        def pick(wish: float | None, name: str, off: float) -> float:
            return defaults.get(name, off) if wish is None else wish

        top_k = int(pick(self.top_k, "top_k", 0))
        return Sampling(
            temperature=pick(self.temperature, "temperature", 0.0),
            top_p=pick(self.top_p, "top_p", 1.0),
            top_k=0 if top_k == -1 else top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=self.seed,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class Conversation:
    """A chat as `LLM.chat` takes it."""

    messages: Seqs[Mapping[str, Any]]
    tools: Seqs[Mapping[str, Any]] | None = None
    """In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: str | Mapping[str, Any] | None = None
    """auto (the default), none, required, or a function to call:
    {"type": "function", "function": {"name": ...}}."""
    thinking: bool | None = None
    """Whether the model thinks first; None: as its chat template has it."""
    thinking_token_budget: int | None = None
    """Most tokens of a thought."""


def conversation_of(prompt: Any, wishes: tuple[Any, ...]) -> Any:
    """A stream's prompt: a `Conversation` if one of its wishes is set, else as it was given. Raises
    UserError for wishes about a prompt without messages."""
    if all(wish is None for wish in wishes):
        return prompt
    if isinstance(prompt, str) or not all(isinstance(message, Mapping) for message in prompt):
        raise UserError("tools and thinking are of a chat: give messages in place of a text or ids")
    return Conversation(prompt, *wishes)


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the request's tools."""

    id: str
    """Of this call alone; the tool's result is sent back with it as `tool_call_id`."""
    name: str
    arguments_text: str
    """A JSON object; only its beginning if the answer was cut within the call."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Raises UserError if the answer was cut within the call."""
        try:
            return loads(self.arguments_text)
        except ValueError:
            raise UserError(
                f"the answer was cut within the call of {self.name}: allow more max_tokens"
            ) from None


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt."""

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    """stop, length or tool_calls."""
    acceptance: Acceptance
    """What was drafted and accepted, and tau: tokens per verify."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if requested."""
    cached_tokens: int = 0
    """Tokens of the prompt that were reused from the prefix cache."""
    guessed_by: list[str | None] = field(default_factory=list)
    """The source of each token's guess (a drafter's name, prediction, grammar); None for tokens
    that the model itself chose."""
    token_texts: list[str] = field(default_factory=list, repr=False, compare=False)
    """The text of each token; an incomplete character comes with the token that completes it."""
    reasoning: str = ""
    """The thought before the text; of `chat` alone."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of the tools that were given to `chat`."""
    _receipt: Callable[[], Receipt] | None = field(default=None, repr=False, compare=False)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the chat to go on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_sent(call) for call in self.tool_calls]
        return message

    def _repr_html_(self) -> str:
        """In a notebook: each token with its source, by colour and by an underline."""
        return provenance_html(self.token_texts, self.guessed_by, self.acceptance.tau)

    def receipt(self) -> Receipt:
        """The request and this answer as a file that `specdec verify` proves by replay, with
        log-probabilities if they were requested. The first receipt of a model reads its weights'
        files. Raises UserError for an empty answer."""
        assert self._receipt is not None, "only answers of an LLM have one"
        return self._receipt()


@dataclass(frozen=True)
class CallPiece:
    """A part of a call in a stream: its beginning, or a part of its arguments."""

    index: int
    """Counts the answer's calls, from 0."""
    id: str | None = None
    name: str | None = None
    """Both are of a call's beginning alone."""
    arguments_text: str = ""
    """A call's parts together are one JSON object."""


@dataclass(frozen=True)
class Chunk:
    """What one cycle added to a streamed answer."""

    text: str
    token_ids: tuple[int, ...]
    guessed_by: tuple[str | None, ...]
    """The source of each token's guess; None for the token that the model itself chose."""
    drafted: int
    """Draft tokens of this answer so far."""
    accepted: int
    finish_reason: str | None
    reasoning: str = ""
    """Of the thought; of messages with one of the options of `chat` alone."""
    tool_calls: tuple[CallPiece, ...] = ()
    """Of the same, with `tools`."""


def _sent(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_text}
    return {"id": call.id, "type": "function", "function": function}


def _plain(schema: Any) -> str | dict[str, Any] | None:
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise UserError("json is a schema (a dict, its text or a pydantic model), or True")
    return dict(schema)


def chosen_params(params: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
    """The parameters, given as one object or by name. Raises UserError for unknown names."""
    if strange := overrides.keys() - SamplingParams.__dataclass_fields__.keys():
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise UserError(f"unknown sampling parameter {', '.join(strange)}: known are {known}")
    if params is None:
        return SamplingParams(**overrides)
    if overrides:
        raise UserError("give SamplingParams or single parameters, not both")
    return params
