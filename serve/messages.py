"""Chat messages as clients send them, converted to the form that chat templates read."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from serve.content import PARTS, Content, Mixed, SentPicture
from serve.foreign import is_foreign_call, line_of
from targets.chat_history import read_arguments

log = logging.getLogger("specdec.serve")

REFUSAL = {"type": "refusal"}
MOST_CALLS = 512
"""Tool calls that one message may have. Templates look for each result among all of them."""


class Called(BaseModel):
    """The function of a tool call."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as a string in OpenAI's API; some clients send the object itself."""

    @field_validator("arguments")
    @classmethod
    def _read(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any]:
        """Parse the arguments to an object. If they are none (the call was cut), the string is
        kept, and the model gets it as text."""
        return {} if value is None else read_arguments(value)


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: Called


def _of_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Rename OpenAI's older form of calls and results (`function_call`, role `function`)."""
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    called = message.get("function_call")
    if isinstance(called, dict) and not message.get("tool_calls"):
        message = {**message, "tool_calls": [{"function": called}]}
    return message


def _of_other_kinds(message: dict[str, Any]) -> dict[str, Any]:
    """Replace calls of other types than function by lines of text."""
    calls = message.get("tool_calls")
    others = [call for call in calls if is_foreign_call(call)] if isinstance(calls, list) else []
    if not others:
        return message
    content = message.get("content") or []
    parts = content if isinstance(content, list) else [content]
    functions = [call for call in calls or () if not is_foreign_call(call)]
    return {**message, "content": [*parts, *map(line_of, others)], "tool_calls": functions or None}


def _with_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Put the words of a refusal behind the text: the content may be empty beside them."""
    said, content = message.get("refusal"), message.get("content") or []
    if message.get("role") != "assistant" or not isinstance(said, str) or not said:
        return message
    parts, own = content if isinstance(content, list) else [content], REFUSAL | {"refusal": said}
    return message if own in parts else {**message, "content": [*parts, own]}


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Put parts with thoughts, as blocks of Anthropic's API are sent back, where thoughts are."""
    parts = message.get("content")
    if message.get("role") != "assistant" or not isinstance(parts, list):
        return message
    found = {
        at: thought for at, part in enumerate(parts) if (thought := _thought(part)) is not None
    }
    if not found:
        return message
    beside = message.get("reasoning_content") or message.get("reasoning")
    thoughts = list(filter(None, found.values()))
    if isinstance(beside, str) and beside != "\n".join(thoughts):
        thoughts = [beside, *thoughts]
    rest = [part for at, part in enumerate(parts) if at not in found]
    return {**message, "content": rest, "reasoning_content": "\n".join(thoughts) or None}


def _thought(part: Any) -> str | None:
    """A part's thought, "" where another server sealed it; None for other parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "redacted_thinking":
        log.info("left out a thought that another server sealed")
        return ""
    thought = part.get("thinking") if kind == "thinking" else None
    return thought if isinstance(thought, str) else None


class Message(BaseModel):
    """Unknown names are ignored: SDKs send back whatever the last answer held."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_and_other_forms(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return _of_other_kinds(_of_functions(_with_thoughts(_with_refusal(value))))

    @field_validator("reasoning", mode="before")
    @classmethod
    def _reasoning_is_text(cls, value: Any) -> Any:
        return value if isinstance(value, str) else None  # other APIs mean an object by this name

    @field_validator("content")
    @classmethod
    def _only_some_are_silent(
        cls, value: str | Mixed | None, info: ValidationInfo
    ) -> str | Mixed | None:
        if value is None and info.data.get("role", "assistant") not in ("assistant", "tool"):
            raise ValueError(PARTS)
        return value

    @field_validator("tool_calls")
    @classmethod
    def _only_assistants_call(
        cls, value: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        if value and info.data.get("role") != "assistant":
            raise ValueError("belong to assistant messages")
        return value

    @property
    def text(self) -> str:
        """Its content without pictures."""
        return self.content.text if isinstance(self.content, Mixed) else self.content or ""

    @property
    def pictures(self) -> list[SentPicture]:
        return self.content.pictures if isinstance(self.content, Mixed) else []

    def for_template(self, sees: bool = False) -> dict[str, Any]:
        """The message as a dict for chat templates. Role `developer` becomes `system`, which
        templates have; calls' arguments are an object. sees: pictures are parts, else lines of
        text."""
        role = "system" if self.role == "developer" else self.role
        content: Any = self.content or ""
        if isinstance(content, Mixed):
            content = content.for_template() if sees else content.in_words
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = message["reasoning"] = thought
        return message


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        own = self.function
        function = {"name": own.name, "description": own.description or ""}
        if own.parameters is not None:
            function["parameters"] = own.parameters  # pyright: ignore[reportArgumentType]
        return {"type": "function", "function": function}
