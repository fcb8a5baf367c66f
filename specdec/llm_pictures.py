"""Chat messages with pictures, as the Python door takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from targets.chat_prompt import PICTURE
from targets.tokenizer import Tokenizer
from targets.vision.prompt import PictureFile, PicturePrompt, with_pictures
from targets.vision.spec import VisionSpec

ROLES = ("user", "tool")
"""Who shows pictures."""


def chat_prompt(
    messages: Seqs[Mapping[str, Any]],
    tokenizer: Tokenizer,
    vision: VisionSpec | None,
    **values: Any,
) -> PicturePrompt:
    """Messages by the checkpoint's template. A content's parts are {"text": ...} and
    {"image": path or bytes}, the latter with "detail" if it is not to have the usual size. values:
    what the template reads beside the messages. Raises UserError."""
    files: list[PictureFile] = []
    read = [_read(message, files, vision) for message in messages]
    if vision is None or not files:
        return PicturePrompt(tokenizer.encode_chat(read, **values))
    picture = tokenizer.token_text(vision.ids.image)
    assert picture is not None, "the vocabulary has the ids that config.json names"
    pieces, order = tokenizer.picture_pieces(read, picture, **values)
    ids = tokenizer.encode_pieces(pieces)
    return with_pictures(ids, [files[number] for number in order], vision)


def _read(
    message: Mapping[str, Any], files: list[PictureFile], vision: VisionSpec | None
) -> dict[str, Any]:
    """The message with its pictures' files put into `files`."""
    parts = message.get("content")
    if not isinstance(parts, list) or not any(
        isinstance(p, Mapping) and "image" in p for p in parts
    ):
        return dict(message)
    if vision is None:
        raise UserError("this model takes no pictures: send text alone")
    if message.get("role") not in ROLES:
        raise UserError("only messages of users and tools can hold pictures")
    read = []
    for part in parts:
        if "image" in part:
            files.append(_file(part, vision))
            read.append(PICTURE)
        else:
            read.append({"type": "text", "text": str(part.get("text", ""))})
    return {**message, "content": read}


def _file(part: Mapping[str, Any], vision: VisionSpec) -> PictureFile:
    image = part["image"]
    if isinstance(image, str | Path):
        try:
            image = Path(image).read_bytes()
        except OSError as problem:
            raise UserError(f"{image} can't be read ({problem.strerror})") from None
    if not isinstance(image, bytes):
        raise UserError("an image is a file's path or its bytes")
    return PictureFile(image, vision.budget_for(part.get("detail", "auto")))
