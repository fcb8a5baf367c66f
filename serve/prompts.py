"""Encodes a request's prompts as token ids, and refuses too long ones as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.pictures import Fetch, PictureRoom, files_of, refuse_newest
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from specdec.core.prediction import PredictedText
from targets.chat_template import RenderedTooLong, TooManySteps
from targets.tokenizer import bare_ids
from targets.vision.prompt import PicturePrompt, with_pictures
from targets.vision.spec import VisionSpec

SLACK = 2
"""Rendering stops at this multiple of the characters that a context can hold: the rendered text
also contains marks that protect control tokens."""


@dataclass(frozen=True)
class Sight:
    """How a server's model sees, and where its pictures come from."""

    vision: VisionSpec
    fetch: Fetch | None = None
    """Gets pictures that are sent as URLs; None: they are refused."""
    room: PictureRoom = field(default_factory=PictureRoom)


def encode(
    request: ChatRequest | CompletionRequest,
    tokenizer: ServedTokenizer,
    max_len: int,
    sight: Sight | None = None,
) -> list[PicturePrompt]:
    """Each prompt. sight: None for a model that takes no pictures. Raises ApiError 400 if one can't
    be served."""
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    check_sizes(request, tokenizer, max_len)
    if isinstance(request, ChatRequest):
        prompts = [chat_prompt(request, tokenizer, max_len, sight)]
    else:
        encoded = (p if isinstance(p, list) else tokenizer.encode(p) for p in request.prompt)
        prompts = list(map(PicturePrompt, encoded))
    prompts = [replace(prompt, ids=_cut(prompt.ids, request, max_len)) for prompt in prompts]
    for prompt in prompts:
        check_ids(prompt.ids, tokenizer, param)
        if len(prompt.ids) >= max_len + (request.limit == 0):
            raise _too_long(f"the prompt has {len(prompt.ids)} tokens", max_len, param)
    return prompts


def chat_prompt(
    request: ChatRequest, tokenizer: ServedTokenizer, max_len: int, sight: Sight | None = None
) -> PicturePrompt:
    """The chat, rendered by the checkpoint's template and encoded, with places for its pictures,
    which are not decoded. The size of the rendered text (with tools, calls and the template's own
    text) is checked before encoding."""
    files = [] if sight is None else files_of(request, sight.vision, sight.fetch)
    if sight is None or not files:
        return PicturePrompt(chat_ids(request, tokenizer, max_len))
    picture = tokenizer.token_text(sight.vision.ids.image)
    assert picture is not None, "the vocabulary has the ids that config.json names"

    def rendered(messages: list[Any], goes_on: bool, **values: Any) -> tuple[list[str], list[int]]:
        return tokenizer.picture_pieces(messages, picture, goes_on, **values)

    pieces, order = _rendered(request, tokenizer, max_len, rendered, sees=True)
    ids = tokenizer.encode_pieces(pieces)
    return with_pictures(ids, [files[number] for number in order], sight.vision)


def chat_ids(request: ChatRequest, tokenizer: ServedTokenizer, max_len: int) -> list[int]:
    """`chat_prompt` for a model that takes no pictures: there are lines of text for them, but in
    the user's new messages they are refused."""
    refuse_newest(request.messages[:-1] if request.continue_final_message else request.messages)

    def rendered(messages: list[Any], goes_on: bool, **values: Any) -> tuple[list[str], list[int]]:
        return tokenizer.chat_pieces(messages, goes_on, **values), []

    return tokenizer.encode_pieces(_rendered(request, tokenizer, max_len, rendered)[0])


def _rendered(
    request: ChatRequest,
    tokenizer: ServedTokenizer,
    max_len: int,
    render: Callable[..., tuple[list[str], list[int]]],
    sees: bool = False,
) -> tuple[list[str], list[int]]:
    """The pieces of the rendered chat, and its pictures by number. Raises ApiError 400."""
    values = request.template_values
    if request.add_generation_prompt is False:
        values["add_generation_prompt"] = False
    messages = [message.for_template(sees) for message in request.messages]
    most = SLACK * max_len * tokenizer.longest_token
    try:
        goes_on = bool(request.continue_final_message)
        pieces, order = render(messages, goes_on, max_characters=most, **values)
    except TooManySteps as problem:
        code = "context_length_exceeded"  # upon which clients shorten the history
        raise ApiError(400, str(problem), param="messages", code=code) from None
    except RenderedTooLong:
        least = f"the prompt has more than {SLACK * max_len} tokens"
        raise _too_long(least, max_len, "messages") from None
    check_size(sum(len(piece.encode()) for piece in pieces), tokenizer, max_len, "messages")
    return pieces, order


def predicted_text(
    request: ChatRequest | CompletionRequest, tokenizer: ServedTokenizer, max_len: int
) -> PredictedText | None:
    """The request's `prediction`, a text that the answer is expected to repeat; None without one.
    Cut to the length of a context, as an answer can't be longer."""
    if request.prediction is None:
        return None
    text = (request.prediction.content or "")[: max_len * tokenizer.longest_token]
    return PredictedText(bare_ids(text, tokenizer)[:max_len])


def _cut(prompt: list[int], request: ChatRequest | CompletionRequest, max_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` of it; -1 means as many as leave room for an answer."""
    wish = request.truncate_prompt_tokens
    if wish is None:
        return prompt
    room = max(1, max_len - 1 if wish == -1 else wish)
    return prompt[-room:]


def check_sizes(
    request: ChatRequest | CompletionRequest, tokenizer: ServedTokenizer, max_len: int
) -> None:
    """Raise ApiError 400 for texts with too many bytes for the context, before encoding them: a
    token has at most `longest_token` bytes."""
    if isinstance(request, CompletionRequest):
        for prompt in request.prompt:
            size = len(prompt.encode()) if isinstance(prompt, str) else 0
            check_size(size, tokenizer, max_len, "prompt")
        return
    if len(request.messages) >= max_len:
        raise _too_long(f"{len(request.messages)} messages are as many tokens", max_len, "messages")
    most = max_len * tokenizer.longest_token
    for param, values in _written(request).items():
        size = 0
        for value in values:
            size += written_bytes(value, most - size)
            check_size(size, tokenizer, max_len, param)


def _written(request: ChatRequest) -> dict[str, Iterator[Any]]:
    """The values of a chat that templates write, by parameter. Thoughts of earlier turns are left
    out: most templates drop them."""
    calls = (call for message in request.messages for call in message.tool_calls or ())
    functions = (tool.function for tool in request.tools or ())
    return {
        "messages": chain(
            (message.text for message in request.messages),
            (call.function.arguments for call in calls),
        ),
        "tools": (part for f in functions for part in (f.name, f.description, f.parameters)),
        "chat_template_kwargs": iter((request.chat_template_kwargs,)),
    }


def written_bytes(value: Any, most: int) -> int:
    """Bytes of all texts and keys in a JSON value, counted until they exceed `most`."""
    size, left = 0, [value]
    while left and size <= most:
        part = left.pop()
        if isinstance(part, str):
            size += len(part.encode(errors="surrogatepass"))
        elif isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part
    return size


def check_size(size: int, tokenizer: ServedTokenizer, max_len: int, param: str) -> None:
    """size: in bytes."""
    least = -(-size // tokenizer.longest_token)
    if least >= max_len:
        raise _too_long(f"the prompt has at least {least} tokens", max_len, param)


def _too_long(what: str, max_len: int, param: str) -> ApiError:
    message = (
        f"{what} but the context is {max_len}: shorten it, or start the server with a larger "
        "--max-len"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def check_ids(ids: Iterable[int], tokenizer: ServedTokenizer, param: str) -> None:
    """Raise ApiError 400 for ids outside the model's vocabulary."""
    bad = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if bad is not None:
        known = f"ids go from 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, f"{param} holds token id {bad}, but {known}", param=param)
