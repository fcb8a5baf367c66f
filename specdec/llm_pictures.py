"""Chat messages with contents of several parts, as the Python door takes them: texts and pictures,
in forms of its own and of the server's APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from pathlib import Path
from typing import Any, NoReturn

from specdec.core.errors import UserError
from targets.tokenizer import Tokenizer
from targets.vision.prompt import PictureFile, PicturePrompt, with_pictures
from targets.vision.spec import VisionSpec

ROLES = ("user", "tool")
"""Roles whose messages may hold pictures."""
TEXTS = (None, "text", "input_text", "output_text")
"""Types of parts with a text; the door's own have none."""


def chat_prompt(
    messages: Seqs[Mapping[str, Any]],
    tokenizer: Tokenizer,
    vision: VisionSpec | None,
    **values: Any,
) -> PicturePrompt:
    """Messages by the checkpoint's template. A content's parts are {"text": ...} and
    {"image": path or bytes}, the latter with "detail" if it is not to have the usual size, or as
    the server's APIs have them. values: what the template reads beside the messages. Raises
    UserError."""
    files: list[PictureFile] = []
    read = [_read(message, at, files, vision) for at, message in enumerate(messages)]
    if vision is None or not files:
        return PicturePrompt(tokenizer.encode_chat(read, **values))
    picture = tokenizer.token_text(vision.ids.image)
    assert picture is not None, "the vocabulary has the ids that config.json names"
    pieces, order = tokenizer.picture_pieces(read, picture, **values)
    ids = tokenizer.encode_pieces(pieces)
    return with_pictures(ids, [files[number] for number in order], vision)


def _read(
    message: Mapping[str, Any], at: int, files: list[PictureFile], vision: VisionSpec | None
) -> dict[str, Any]:
    """The message with its pictures' files put into `files`, and its texts joined as on the server.
    at: its place, for errors."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return dict(message)
    from serve.content import Mixed, read_content  # the server's schemas take a while

    sent = [_as_sent(part, f"messages[{at}].content[{place}]") for place, part in enumerate(parts)]
    content = read_content(sent)
    if not isinstance(content, Mixed):
        return {**message, "content": content}
    if vision is None:
        raise UserError("this model takes no pictures: send text alone")
    if message.get("role") not in ROLES:
        raise UserError("only messages of users and tools can hold pictures")
    files += [_file(picture.part, vision) for picture in content.pictures]
    return {**message, "content": content.for_template()}


def _as_sent(part: Any, where: str) -> Any:
    """A part in a form that the server reads. Raises UserError for all but texts and pictures."""
    from serve.foreign import PICTURES

    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        _refuse(where, f"a {type(part).__name__}")
    kind, text = part.get("type"), part.get("text")
    if kind in (None, *PICTURES) and "image" in part:
        return {**part, "type": "image"}
    if kind in PICTURES:
        return dict(part)
    if kind not in TEXTS:
        _refuse(where, f"one of type {str(kind)[:80]!r}")
    if not isinstance(text, str):
        _refuse(where, "one without a text")
    return {"type": "text", "text": text}


def _refuse(where: str, found: str) -> NoReturn:
    raise UserError(
        f'{where}: a part is a text ({{"text": ...}}) or a picture ({{"image": path or bytes}}, or '
        f"an image_url with data), not {found}"
    )


def _file(part: Mapping[str, Any], vision: VisionSpec) -> PictureFile:
    if "image" not in part:
        return _sent_file(part, vision)
    image = part["image"]
    if isinstance(image, str | Path):
        try:
            image = Path(image).read_bytes()
        except OSError as problem:
            raise UserError(f"{image} can't be read ({problem.strerror})") from None
    if not isinstance(image, bytes):
        raise UserError("an image is a file's path or its bytes")
    return PictureFile(image, vision.budget_for(part.get("detail", "auto")))


def _sent_file(part: Mapping[str, Any], vision: VisionSpec) -> PictureFile:
    """Of a picture in a form of the server's APIs."""
    from serve.content import SentPicture
    from serve.errors import ApiError
    from serve.pictures import file_of

    try:
        return file_of(SentPicture(part), vision, _fetch_nothing)
    except ApiError as problem:
        raise UserError(problem.message) from None


def _fetch_nothing(_: str) -> NoReturn:
    raise UserError(
        "a picture comes as a URL, and this door fetches none: give its path or bytes as "
        '{"image": ...}, or a data URL'
    )
