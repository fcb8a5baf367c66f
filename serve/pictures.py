"""Pictures of a chat: from the parts of all three APIs to files, with a budget of tokens each.

Nothing is decoded here but base64. Sizes and pixels: `targets.vision`.
"""

from __future__ import annotations

import base64
import binascii
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence as Seqs
from typing import Any

from serve.chat_schema import ChatRequest
from serve.content import SentPicture
from serve.errors import ApiError
from serve.foreign import newest, refuse_part
from serve.messages import Message
from specdec.core.pictures import PlacedPicture
from targets.vision.prompt import PictureFile, PicturePrompt
from targets.vision.spec import VisionSpec

MOST_PICTURES = 32
"""Pictures that one request may have."""
PICTURE_BODY = 24 * 2**20
"""Bytes that a body may have where pictures are taken: one of 12 megapixels as PNG fits."""
MOST_HELD = 160 * 2**20
"""Bytes of pixels, resized, that are held for all requests; one picture has some 2 MB."""
DETAILS = ("auto", "low", "high", "original")
RETRY_SECONDS = 2
PARAM = "messages"

Fetch = Callable[[str], bytes]
"""URL -> the picture's file. Raises ApiError 400."""


def refuse_newest(messages: Seqs[Message]) -> None:
    """Refuse a picture in a new message of the user, for a model that takes none: its text, or the
    next one's, may be about it. messages: without an answer that was begun. Raises ApiError 400.
    See `foreign.check_newest`."""
    for at in newest([message.role for message in messages]):
        for picture in messages[at].pictures:
            refuse_part(f"{PARAM}: a new one", str(picture.part["type"]), PARAM)


def files_of(request: ChatRequest, vision: VisionSpec, fetch: Fetch | None) -> list[PictureFile]:
    """The files of a chat's pictures, in the messages' order. fetch: gets those that come as URLs;
    None: they are refused. Raises ApiError 400."""
    sent = []
    for number, message in enumerate(request.messages):
        if message.pictures and message.role not in ("user", "tool"):
            raise _refusal(
                f"{PARAM}[{number}] of role {message.role} can't hold a picture: only users and "
                "tools show them"
            )
        sent += message.pictures
    if len(sent) > MOST_PICTURES:
        raise _refusal(f"the request has {len(sent)} pictures: at most {MOST_PICTURES} are taken")
    if sent:
        _refuse_beside(request)
    return [file_of(picture, vision, fetch) for picture in sent]


def _refuse_beside(request: ChatRequest) -> None:
    """Refuse options that prompts with pictures can't have. Raises ApiError 400."""
    wishes = {
        "echo": request.echo,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
        "include_receipt": request.include_receipt,
    }
    for name, wish in wishes.items():
        if wish:
            raise ApiError(400, f"{name} can't go with pictures: leave it out", param=name)


def file_of(picture: SentPicture, vision: VisionSpec, fetch: Fetch | None) -> PictureFile:
    """See `files_of`."""
    url, detail = _source(picture.part)
    if detail not in DETAILS:
        raise _refusal(f"a picture's detail must be auto, low or high, got {str(detail)[:40]!r}")
    if url[:5].lower() == "data:":
        data = _data_of(url)
    elif fetch is not None:
        data = fetch(url)
    else:
        raise _refusal(
            "a picture comes as a URL, and this server fetches none: send it as base64 (or start "
            "the server with --image-hosts)"
        )
    return PictureFile(data, vision.budget_for(detail))


def _source(part: Mapping[str, Any]) -> tuple[str, Any]:
    """A picture's URL and detail, from either API's form. Raises ApiError 400."""
    detail, held = part.get("detail"), part.get("image_url")
    if part["type"] == "image":
        held = part.get("source")
        if isinstance(held, dict) and held.get("type") == "base64":
            return f"data:;base64,{held.get('data')}", "auto"
        held = held.get("url") if isinstance(held, dict) else None
    elif isinstance(held, dict):
        detail, held = held.get("detail"), held.get("url")
    if not isinstance(held, str):
        form = {
            "image": '"source": {"type": "base64", "media_type": ..., "data": ...}',
            "input_image": '"image_url": "data:image/png;base64,..."',
        }.get(part["type"], '"image_url": {"url": "data:image/png;base64,..."}')
        raise _refusal(f"a picture of type {part['type']} needs {form}: no file ids")
    return held, detail or "auto"


def _data_of(url: str) -> bytes:
    """The bytes of a data URL. Raises ApiError 400; the data are not repeated."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _refusal("a picture's data URL must be data:image/...;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (ValueError, binascii.Error):
        raise _refusal("a picture's data is not base64") from None


class PictureRoom:
    """Bounds the pixels that are held for requests: until their prompts are read, or, where texts
    may be read again, until they end."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._most, self._held = most, 0
        # taken twice where a collection while it is held frees a picture
        self._lock = threading.RLock()

    def decoded(self, prompt: PicturePrompt, vision: VisionSpec) -> tuple[PlacedPicture, ...]:
        """The prompt's pictures, decoded. Raises ApiError 429 where there is no room for them, and
        UserError for a file that can't be decoded."""
        size = sum(placed.tokens for placed in prompt.files) * 3 * vision.patches.cell**2
        self._take(size)
        try:
            found = prompt.pictures(vision.patches)
        except BaseException:
            self._give(size)
            raise
        for placed in found:
            weakref.finalize(placed.picture, self._give, placed.picture.levels.nbytes)
        return found

    def _take(self, size: int) -> None:
        with self._lock:
            if self._held and self._held + size > self._most:
                raise ApiError(
                    429,
                    "too many pictures are held already: retry in a moment",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )
            self._held += size

    def _give(self, size: int) -> None:
        with self._lock:
            self._held -= size


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param=PARAM)
