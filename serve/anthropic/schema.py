"""The wire: what /v1/messages and /v1/messages/count_tokens accept.

Clients send many fields that only Anthropic's own service can honour (`cache_control`, betas). So
an unknown top-level field is logged and ignored; a field that would change the answer and is not
supported here is refused.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

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

from serve.chat_schema import MAX_TOOLS, ChatRequest
from serve.errors import ApiError
from serve.fields import ANY
from serve.foreign import check_newest, kind_of
from serve.options import Options
from serve.overrides import SamplingOverrides
from serve.schema import STRICT

log = logging.getLogger("specdec.serve")

UNUSED = {
    "metadata",
    "service_tier",
    "cache_control",
    "context_management",
    "betas",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
    "anthropic_beta",
}
"""Fields that are ignored: none of them changes an answer."""
REFUSED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no tools itself: send them as tools",
    "thread": "this server keeps no threads: send the whole conversation as messages",
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
    "reasoning_effort": "use thinking",
    "response_format": "use output_config: {format}",
    "n": "a message has one answer",
}
CODES = {"thread": "thread_unsupported_request"}
"""Error codes of refused fields, after which Anthropic's SDK sends the request in another form."""
WITHOUT_EFFECT = {
    "n": 1,
    "parallel_tool_calls": True,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
}
"""Values of /v1/chat/completions' own fields that change nothing, beside those that are false."""


class TextBlock(BaseModel):
    model_config = STRICT

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    model_config = STRICT

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(BaseModel):
    """A thought encrypted by another server; it can't be read here."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    model_config = STRICT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str
    """A string if the client could not parse the arguments, because the call was cut."""
    partial_json: str | None = None
    """An extension of this server: the arguments of a call that was cut."""


class ForeignBlock(BaseModel):
    """Any other block (image, document, result of a tool that Anthropic runs). The model gets it as
    a line of text."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


def _as_blocks(value: Any) -> Any:
    """A string stands for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


KNOWN = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind(block: Any) -> str | None:
    return kind_of(block, KNOWN)


BY_KIND = Discriminator(
    _kind,
    custom_error_type="block",
    custom_error_message="must be an object with a type, such as text",
)
Readable = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ForeignBlock, Tag("foreign")], BY_KIND
]


class ToolResultBlock(BaseModel):
    model_config = STRICT

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Readable], BeforeValidator(_as_blocks)] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ForeignBlock, Tag("foreign")],
    BY_KIND,
]
KINDS = {
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "user": ("text", "tool_result"),
    "system": ("text",),
}
"""Block types that a message of each role may contain."""


class AnthropicMessage(BaseModel):
    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> AnthropicMessage:
        for block in self.content:
            if block.type in KNOWN and block.type not in KINDS[self.role]:
                raise ValueError(f"of role {self.role} can't hold a block of type {block.type!r}")
        return self


class AnthropicTool(BaseModel):
    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("type")
    @classmethod
    def _of_the_client(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError(f"is {value!r}, but this server runs no tools: send custom ones")
        return value


class AnthropicToolChoice(Options):
    place = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("of type tool needs a name, and no other type has one")
        return self


class ThinkingConfig(Options):
    """`display` and `block_binding` are accepted and ignored: thoughts are sent unabridged."""

    place = "thinking"
    hints = {"display": ANY, "block_binding": ANY}  # noqa: RUF012

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


class JsonFormat(Options):
    place = "output_format"
    hints = {"name": ANY, "description": ANY, "strict": ANY}  # noqa: RUF012

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """`effort` is accepted and ignored: this server's models have one level."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: JsonFormat | None = None

    @model_validator(mode="after")
    def _names(self) -> OutputConfig:
        for name in self.model_extra or ():
            if name not in ("effort", "task_budget"):
                log.info(
                    "/v1/messages: left out output_config.%.80s, which has no meaning here", name
                )
        return self


class PromptRequest(SamplingOverrides):
    """The fields that determine the prompt; /v1/messages/count_tokens accepts these."""

    model: str
    """Any name is accepted; the served model answers."""
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Annotated[list[Readable], BeforeValidator(_as_blocks)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _newest_is_text(cls, value: Any) -> Any:
        check_newest(value, "messages")
        return value

    @model_validator(mode="after")
    def _names(self) -> PromptRequest:
        for name, value in (self.model_extra or {}).items():
            refused = name in REFUSED or name in OPENAIS
            if refused and value and value != WITHOUT_EFFECT.get(name):
                why = REFUSED.get(name, "it is a field of /v1/chat/completions")
                message = f"{name} is not supported: {why}"
                raise ApiError(400, message, param=name, code=CODES.get(name))
            if name not in UNUSED and not refused:
                log.info("/v1/messages: ignored the unknown field %.80r", name)
        return self


class MessagesRequest(PromptRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None


OPENAIS = ChatRequest.model_fields.keys() - MessagesRequest.model_fields.keys() - {"stream_options"}
"""Fields that change an answer there; proxies write `stream_options` into any request."""
