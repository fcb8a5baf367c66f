"""Request schemas of /v1/completions, and the base of /v1/chat/completions (`serve.chat_schema`).

Every top-level name of a request is honoured, accepted as a hint, or refused (`serve.fields`); none
is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from serve.content import Text
from serve.errors import ApiError
from serve.fields import ANY, check_names
from serve.options import Options
from serve.overrides import Ids, SamplingOverrides
from specdec.core.types import MAX_DRAFT

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_CHOICES = 128

Wire = TypeVar("Wire", bound=BaseModel)
STRICT = ConfigDict(strict=True)


class StreamOptions(Options):
    place = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Options):
    """A named schema; it is enforced whether or not `strict` is set."""

    place = "response_format.json_schema"

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Options):
    """The schema is in `json_schema`, as in OpenAI's API, or beside the type, as in those of
    llama.cpp, Together and Fireworks."""

    place = "response_format"
    hints = {"name": ANY, "description": ANY, "strict": ANY}  # noqa: RUF012

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _a_schema_where_one_belongs(self) -> ResponseFormat:
        inner = None if self.json_schema is None else self.json_schema.schema_
        if inner is not None and self.schema_ is not None:
            raise ValueError("takes one schema: in json_schema or beside the type")
        if self.type == "json_schema" and self.wanted is None:
            raise ValueError("of type json_schema needs json_schema: {name, schema}")
        if self.type == "text" and self.wanted is not None:
            raise ValueError("of type text has no schema: use json_schema")
        return self

    @property
    def wanted(self) -> dict[str, Any] | bool | None:
        """The requested schema, from either place; None if there is none."""
        inner = None if self.json_schema is None else self.json_schema.schema_
        schema = self.schema_ if inner is None else inner
        if self.type == "json_object" and isinstance(schema, dict):
            return {"type": "object", **schema}
        return schema


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of its fields must be set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        wishes = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(wish is not None for wish in wishes) != 1:
            raise ValueError("needs exactly one of json, json_object, regex, choice and grammar")
        return self


class PredictionContent(Options):
    """The expected text of the whole answer. It speeds the answer up but can't change it."""

    place = "prediction"

    type: Literal["content"]
    content: Text


class SpeculativeWish(BaseModel):
    """Drafter and depth for this request. They can't change the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    drafter: str | None = None
    k: Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None = None
    enabled: bool | None = None


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"takes at most {MAX_STOPS} strings, got {len(stops)}")
    if any(not 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise ValueError(f"strings must have 1 to {MAX_STOP_LENGTH} characters")
    return stops


STOP_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
}


class GenerationRequest(SamplingOverrides):
    """Fields of both /v1/completions and /v1/chat/completions."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops), WithJsonSchema(STOP_SCHEMA)] = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    guided_grammar: str | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    prediction: PredictionContent | None = None
    speculative: SpeculativeWish | None = None
    include_speculation: bool | None = None

    @model_validator(mode="after")
    def _every_name_is_known(self) -> GenerationRequest:
        check_names(self.model_extra or {}, type(self).model_fields)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise ApiError(
                400,
                "max_tokens: 0 is allowed only with echo or prompt_logprobs: send 1 or more",
                param="max_tokens",
            )
        self._one_structure()
        return self

    def _one_structure(self) -> None:
        text = self.response_format is None or self.response_format.type == "text"
        wishes = [
            name
            for name in ("structured_outputs", *(f"guided_{w}" for w in GUIDED))
            if getattr(self, name) is not None
        ] + ([] if text else ["response_format"])
        if len(wishes) > 1:
            raise ApiError(400, f"choose one of {' and '.join(wishes)}", param=wishes[0])
        if wishes and self.ignore_eos:
            raise ApiError(
                400, f"ignore_eos can't go with {wishes[0]}, which has an end", param="ignore_eos"
            )

    @property
    def structure(self) -> StructuredOutputs | None:
        """The requested structure, from whichever parameter sets it; None: any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs
        for name in GUIDED:
            if (wish := getattr(self, f"guided_{name}")) is not None:
                return StructuredOutputs.model_validate({name: wish})
        form = self.response_format
        if form is None or form.type == "text":
            return None
        schema = form.wanted
        if form.type == "json_object" and schema in (None, True):
            return StructuredOutputs.model_validate({"json_object": True})
        return StructuredOutputs.model_validate({"json": {} if schema is True else schema})

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far; as in vLLM it goes with `include_usage`."""
        return bool(
            self.include_usage
            and self.stream_options
            and self.stream_options.continuous_usage_stats
        )


GUIDED = ("json", "regex", "choice", "grammar")
"""Suffixes of vLLM's older parameters guided_*."""


def _prompts(value: Any) -> Any:
    """A list of prompts from one text, several, one list of ids, or several."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    texts = isinstance(value, list) and all(isinstance(p, str) for p in value)
    if not texts and not (isinstance(value, list) and all(_is_ids(p) for p in value)):
        raise ValueError("must be a string, a list of strings, or token ids")
    if not value or any(len(p) == 0 for p in value):
        raise ValueError("must not be empty: send at least one token")
    return value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        list[str] | list[list[int]], BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens to emit; OpenAI's and vLLM's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives per token, None for no logprobs at all."""
        return self.logprobs


def parse(model: type[Wire], body: bytes) -> Wire:
    """Validate a JSON body; raises ApiError 400 with one sentence about the first error."""
    return _one_sentence(lambda: model.model_validate_json(body))


def translated(model: type[Wire], values: dict[str, Any]) -> Wire:
    """Validate values translated from another API's request; None counts as absent."""
    fields = {name: value for name, value in values.items() if value is not None}
    return _one_sentence(lambda: model.model_validate(fields))


def _one_sentence(validate: Callable[[], Wire]) -> Wire:
    try:
        return validate()
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not valid JSON: {cause}")
    if first["type"] == "value_error":
        raise ApiError(400, f"{where} {cause}", param=str(first["loc"][0]))
    if not where:
        raise ApiError(400, "the body must be one JSON object")
    message = first["msg"][0].lower() + first["msg"][1:]
    raise ApiError(400, f"{where}: {message}", param=str(first["loc"][0]))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
