"""The wire: what /v1/chat/completions and /v1/completions accept.

Unknown fields are ignored, as OpenAI's clients and vLLM expect; fields that would change the answer
but are not built yet are refused, so that nothing is honoured wrongly in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve.errors import ApiError

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_CHOICES = 128

# Field -> values (besides null) that ask for nothing special.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}

Wire = TypeVar("Wire", bound=BaseModel)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints share. None means: the checkpoint's own default, then vLLM's."""

    # Not lax: "0.7" for a number is a client's mistake. NaN and Infinity are none of ours.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = NOT_SUPPORTED

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_a_list(cls, value: Any) -> Any:
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

    @field_validator("logit_bias")
    @classmethod
    def _bias_maps_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(k.isascii() and k.isdigit() and len(k) <= 10 for k in value):
            raise ValueError("keys must be token ids")
        return value

    @model_validator(mode="after")
    def _refuse_what_is_not_built(self) -> GenerationRequest:
        for name, value in (self.model_extra or {}).items():
            if name in self.refused and value is not None and value not in self.refused[name]:
                raise ApiError(400, f"{name} is not supported yet: leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_a_list_of_prompts(cls, value: Any) -> Any:
        """One text, several, one list of ids, or several: always a list of prompts afterwards."""
        if isinstance(value, str):
            value = [value]
        elif _is_ids(value):
            value = [value]
        texts = isinstance(value, list) and all(isinstance(p, str) for p in value)
        if not texts and not (isinstance(value, list) and all(_is_ids(p) for p in value)):
            raise ValueError("must be a string, a list of strings, or token ids")
        if not value or any(len(p) == 0 for p in value):
            raise ValueError("must not be empty: send at least one token")
        return value

    @property
    def limit(self) -> int | None:
        """Most tokens to emit; OpenAI's and vLLM's default is 16."""
        return self.max_tokens or 16

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives per token, None for no logprobs at all."""
        return self.logprobs


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    tool_calls: list[Any] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content_is_text(cls, value: Any) -> Any:
        """A string, or a list of text parts, which are joined by newlines as vLLM does."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(_is_text_part(part) for part in value):
            raise ValueError('must be a string or a list of {"type": "text", "text": ...} parts')
        return "\n".join(part["text"] for part in value)

    @field_validator("tool_calls")
    @classmethod
    def _no_tool_calls(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("are not supported yet")
        return value


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _own_template_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("self", "messages", "chat_template", "tokenize", "add_generation_prompt"):
            if name in (value or {}):
                raise ValueError(f"may not set {name}")
        return value

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to emit, None for whatever the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives per token, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as chat templates know them: they have no role `developer`."""
        roles = {"developer": "system"}
        return [{"role": roles.get(m.role, m.role), "content": m.content} for m in self.messages]


def parse(model: type[Wire], body: bytes) -> Wire:
    """Validate a JSON body; raises ApiError 400 with one sentence about the first fault."""
    try:
        return model.model_validate_json(body)
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


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)
