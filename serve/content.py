"""A message's content as clients send it: a text, or texts with pictures among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, WithJsonSchema

from serve.foreign import PICTURES, is_foreign, line_of
from targets.chat_prompt import PICTURE

PARTS = 'must be a string or a list of {"type": "text", "text": ...} parts'
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
PICTURE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {
                        "url": {"type": "string"},
                        "detail": {"enum": ["auto", "low", "high"]},
                    },
                    "required": ["url"],
                },
            ]
        },
    },
    "required": ["type", "image_url"],
}


def _schema(*parts: dict[str, Any]) -> dict[str, Any]:
    items = parts[0] if len(parts) == 1 else {"anyOf": list(parts)}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": items}, {"type": "null"}]}


@dataclass(frozen=True)
class SentPicture:
    """A part with a picture, not read yet: only servers of models that take pictures do."""

    part: Mapping[str, Any]


@dataclass(frozen=True)
class Mixed:
    """Texts and pictures in their order; no two texts stand side by side."""

    parts: tuple[str | SentPicture, ...]

    @property
    def pictures(self) -> list[SentPicture]:
        return [part for part in self.parts if isinstance(part, SentPicture)]

    @property
    def text(self) -> str:
        """Without its pictures."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def in_words(self) -> str:
        """With a line for each picture, for a model that takes none."""
        texts = (part if isinstance(part, str) else line_of(part.part) for part in self.parts)
        return "\n".join(texts)

    def for_template(self) -> list[dict[str, Any]]:
        """As parts that `Tokenizer.chat_pieces` takes."""
        return [
            {"type": "text", "text": part} if isinstance(part, str) else PICTURE
            for part in self.parts
        ]


def joined_text(value: Any) -> Any:
    """A string, or a list of text parts, which are joined by newlines as vLLM does."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(PARTS)
    texts = [_part_text(part) for part in value]
    return "\n".join(text for text in texts if text is not None)


def read_content(value: Any) -> Any:
    """`joined_text`, or `Mixed` if there are pictures among the parts."""
    if isinstance(value, Mixed):
        return value
    if not isinstance(value, list) or not any(map(_is_picture, value)):
        return joined_text(value)
    parts: list[str | SentPicture] = []
    texts: list[Any] = []
    for part in value:
        if not _is_picture(part):
            texts.append(part)
            continue
        parts += _joined(texts)
        parts.append(SentPicture(part))
        texts = []
    return Mixed((*parts, *_joined(texts)))


def _joined(texts: list[Any]) -> list[str]:
    text = joined_text(texts)
    return [text] if text else []


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURES


def _part_text(part: Any) -> str | None:
    """A part's text; None for a refusal without words."""
    if isinstance(part, str):
        return part
    if is_foreign(part):
        return line_of(part)
    if isinstance(part, dict):
        if part.get("type") == "refusal":
            said = part.get("refusal")
            return said if isinstance(said, str) and said else None
        if "type" in part and isinstance(part.get("text"), str):
            return part["text"]
    raise ValueError(PARTS)


Text = Annotated[str | None, BeforeValidator(joined_text), WithJsonSchema(_schema(TEXT_PART))]
Content = Annotated[
    str | InstanceOf[Mixed] | None,
    BeforeValidator(read_content),
    WithJsonSchema(_schema(TEXT_PART, PICTURE_PART)),
]
