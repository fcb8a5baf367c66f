"""The wire: what /v1/responses accepts."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from serve.chat_schema import Effort
from serve.content import Content
from serve.errors import ApiError
from serve.fields import ANY, check_names
from serve.foreign import check_newest, kind_of
from serve.options import Options
from serve.overrides import SamplingOverrides
from serve.responses.namespaces import (
    FunctionTool,
    Names,
    NamespaceTool,
    functions_and_namespaces,
)
from serve.schema import STRICT, StreamOptions

THOUGHTS = "reasoning.encrypted_content"
HINTS: dict[str, tuple[Any, ...]] = {
    "store": ANY,
    "user": ANY,
    "metadata": ANY,
    "client_metadata": ANY,
    "service_tier": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
    "max_tool_calls": ANY,
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
}
"""Accepted names -> the values without effect; any other value is refused."""
REFUSED = {
    "previous_response_id": "this server keeps no responses: send the whole conversation as input",
    "conversation": "this server keeps no conversations: send the whole one as input",
    "prompt": "this server keeps no prompts: send instructions and input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "response_format": "use text: {format}",
    "reasoning_effort": "use reasoning: {effort}",
    "stop": "this API has none: use /v1/chat/completions",
    "n": "this API has one answer: use /v1/chat/completions",
}
"""Names that are refused -> what to use here instead."""


Role = Literal["user", "assistant", "system", "developer"]
ROLES: tuple[Role, ...] = get_args(Role)


class MessageItem(BaseModel):
    model_config = STRICT

    type: Literal["message"]
    role: Role
    content: Content


class FunctionCallItem(BaseModel):
    model_config = STRICT

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionOutputItem(BaseModel):
    model_config = STRICT

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]
Tools = Annotated[list[AnyTool], BeforeValidator(functions_and_namespaces)]


class ToolsItem(BaseModel):
    """Tools that came later in a conversation; the model gets them with the request's own."""

    model_config = STRICT

    type: Literal["additional_tools"]
    tools: Tools


class ThoughtPart(BaseModel):
    model_config = STRICT

    text: str


class ReasoningItem(BaseModel):
    model_config = STRICT

    type: Literal["reasoning"]
    summary: list[ThoughtPart] | None = None
    content: list[ThoughtPart] | None = None
    encrypted_content: str | None = None


class ForeignItem(BaseModel):
    """Any other item: another provider's tool calls and results, or newer types. The model gets it
    as a line of text."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


def _typed(item: Any) -> Any:
    """Add the type of a message, which clients may leave out."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


KNOWN = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
KNOWN += ("additional_tools",)


def _kind(item: Any) -> str | None:
    kind = kind_of(item, KNOWN)
    if kind == "item_reference":
        message = "input: item_reference: this server keeps no items: send the item itself"
        raise ApiError(400, message, param="input")
    return kind


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")]
        | Annotated[ToolsItem, Tag("additional_tools")]
        | Annotated[ForeignItem, Tag("foreign")],
        Discriminator(
            _kind,
            custom_error_type="item",
            custom_error_message="must be an object with a type, such as message",
        ),
    ],
    BeforeValidator(_typed),
]


def _as_items(value: Any) -> Any:
    """A string stands for one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    check_newest(value, "input")
    return value


class ReasoningOptions(Options):
    """`summary` is accepted and ignored: thoughts are sent unabridged."""

    place = "reasoning"
    hints = {"generate_summary": ANY, "context": ANY, "mode": ("standard",)}  # noqa: RUF012

    effort: Effort | None = None
    summary: str | None = None


class Format(Options):
    place = "text.format"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Options):
    """`verbosity` is accepted and ignored: this server's models have one level."""

    place = "text"

    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingOverrides):
    model: str | None = None
    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None

    @field_validator("include")
    @classmethod
    def _nothing_that_would_be_missing(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError("can't hold log-probabilities: use /v1/chat/completions")
        return value

    @model_validator(mode="after")
    def _every_name_is_known(self) -> ResponsesRequest:
        check_names(self.model_extra or {}, type(self).model_fields, HINTS, REFUSED)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            name = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{name}: a response has its usage at its end", param=name)
        return self

    @cached_property
    def names(self) -> Names:
        later = [tool for item in self.input if isinstance(item, ToolsItem) for tool in item.tools]
        return Names([*(self.tools or ()), *later])

    @property
    def shows_thoughts(self) -> bool:
        """Whether reasoning items also get `encrypted_content`, which clients send back."""
        return THOUGHTS in (self.include or ())
