"""The wire: what /v1/chat/completions accepts beyond `serve.schema`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from serve.errors import ApiError
from serve.foreign import check_newest
from serve.messages import Message, Tool
from serve.options import Options
from serve.schema import STRICT, GenerationRequest

MAX_TOOLS = 512
MAX_TEMPLATE_BYTES = 64 * 2**10


class NamedFunction(Options):
    place = "tool_choice.function"

    name: str


class NamedTool(Options):
    place = "tool_choice"

    type: Literal["function"]
    function: NamedFunction


class AllowedFunction(BaseModel):
    model_config = STRICT

    name: str


class AllowedTool(BaseModel):
    """Other fields are ignored: some clients repeat the whole tool here."""

    model_config = STRICT

    type: Literal["function"]
    function: AllowedFunction


class Allowed(Options):
    place = "tool_choice.allowed_tools"

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


class AllowedTools(Options):
    place = "tool_choice"

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def _tool_choice(value: Any) -> Any:
    """Parse a tool_choice by its type, so that error messages are about that form alone."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError("must be none, auto, required, or name a function")
        return value
    kinds = {"function": NamedTool, "allowed_tools": AllowedTools}
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("must be none, auto, required, or name a function")
    try:
        return kinds[kind].model_validate(value)
    except ValidationError:
        form = (
            '{"type": "function", "function": {"name": ...}}'
            if kind == "function"
            else '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
        )
        raise ValueError(f"must be {form}") from None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _newest_is_text(cls, value: Any) -> Any:
        check_newest(value, "messages")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _own_template_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = ("self", "messages", "tools", "chat_template", "tokenize")
        for name in (*taken, "add_generation_prompt", "continue_final_message"):
            if name in (value or {}):
                raise ValueError(f"may not set {name}")
        if len(json.dumps(value)) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"must be at most {MAX_TEMPLATE_BYTES} bytes")
        return value

    @model_validator(mode="after")
    def _wishes_that_need_others(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        self._check_tool_choice()
        self._check_final_message()
        return self

    def _check_tool_choice(self) -> None:
        names = {tool.function.name for tool in self.tools or ()}
        if self.tools and len(names) < len(self.tools):
            raise ApiError(400, "tools holds two functions of one name", param="tools")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        for name in self.chosen_tools or ():
            if name not in names:
                message = f"tool_choice names {name!r}, which is not among the tools"
                raise ApiError(400, message, param="tool_choice")

    def _check_final_message(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise ApiError(400, message, param="continue_final_message")
        if self.messages[-1].role != "assistant" or not self.messages[-1].text:
            message = "continue_final_message needs a last message of the assistant, with text"
            raise ApiError(400, message, param="continue_final_message")

    @property
    def chosen_tools(self) -> list[str] | None:
        """Names of the tools that may be called, None for all of them."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name]
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def calls(self) -> Literal["none", "auto", "required"]:
        """Whether tools may or must be called."""
        if not self.tools:
            return "none"
        if isinstance(self.tool_choice, NamedTool):
            return "required"
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @property
    def thinks(self) -> bool | None:
        """Whether the request enables thinking; None: the chat template's default."""
        asked = (self.chat_template_kwargs or {}).get("enable_thinking")
        if self.reasoning_effort is None:
            return None if asked is None else bool(asked)
        effort = self.reasoning_effort != "none"
        if asked is not None and bool(asked) != effort:
            message = "reasoning_effort and chat_template_kwargs.enable_thinking contradict"
            raise ApiError(400, message, param="reasoning_effort")
        return effort

    @property
    def template_values(self) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        values = dict(self.chat_template_kwargs or {})
        if self.thinks is not None:
            values["enable_thinking"] = self.thinks
        if self.calls != "none":
            values["tools"] = [tool.for_template() for tool in self.tools or ()]
        return values

    @property
    def limit(self) -> int | None:
        """Most tokens to emit, None: as many as fit in the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives per token, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
