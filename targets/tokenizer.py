"""Text to token ids and back, with the checkpoint's own files and nothing guessed.

Everything a request needs before its first matmul: encoding, the chat template, the stop ids and
the sampling defaults come from the checkpoint's `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja`, `generation_config.json` and `config.json`.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from specdec.core.errors import UserError
from targets.arch import fits_vocabulary
from targets.chat_prompt import ChatPrompt
from targets.chat_template import ChatTemplate, read_template
from targets.chat_text import ControlTokens
from targets.generation import as_ids, check_generation, sampling_defaults
from targets.json_files import read_object

REPLACEMENT = "\ufffd"
BYTE_WORD = re.compile(r"<0x([0-9A-F]{2})>")  # where a vocabulary falls back to bytes
MOST_OPEN = 3  # tokens of an open character: in UTF-8 it has at most 4 bytes
LONGEST_HELD = 8  # tokens; a longer tail holds what is no character


class TextStream:
    """Incremental decoder of one sequence: never emits half of a multi-byte character."""

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []  # only those that still matter for the next piece of text
        self._emitted = 0  # how many of _ids are already out; kept as left context
        self._context = ""  # their text

    def step(self, token_id: int) -> str:
        """Add one token; return the text that became certain ("" while a character is open)."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""  # invisible: it neither ends an open character nor counts as a part of one
        self._ids.append(token_id)
        pending = len(self._ids) - self._emitted
        text = self._pending_text()
        if not text:
            self._ids.pop()  # nor does a token without text count as a held byte
            return ""
        if not text.endswith(REPLACEMENT):
            return self._emit(len(self._ids), text)
        if pending < LONGEST_HELD:
            return ""
        end = self._settled()
        return self._emit(end, self._pending_text(end))

    def finish(self) -> str:
        """Return what is still held: an incomplete character comes out as U+FFFD."""
        text = self._pending_text()
        self._emitted, self._context = len(self._ids), self._context + text
        return text

    def _emit(self, end: int, text: str) -> str:
        """text: of the tokens before `end` that are not out yet."""
        self._ids = self._ids[self._emitted :]
        self._emitted = end - self._emitted
        self._context = self._tokenizer.decode(self._ids[: self._emitted], self._skip_special)
        return text

    def _settled(self) -> int:
        """How many tokens no later one can change the text of. The last three may belong to an
        open character, and what is cut before them must not be a part of a whole one."""
        whole = self._tokenizer.decode(self._ids, self._skip_special)
        for end in range(len(self._ids) - MOST_OPEN, self._emitted, -1):
            if whole.startswith(self._tokenizer.decode(self._ids[:end], self._skip_special)):
                return end
        return self._emitted

    def _pending_text(self, end: int | None = None) -> str:
        """Text of the tokens after `_emitted`, decoded with their left context."""
        ids = self._ids if end is None else self._ids[:end]
        return self._tokenizer.decode(ids, self._skip_special)[len(self._context) :]


class Tokenizer:
    """A checkpoint's tokenizer, chat template, stop ids and sampling defaults."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: dict[str, str],
        template: str | None,
        generation: dict[str, Any],
        fingerprint: str,
        padding: int = 0,
    ) -> None:
        """padding: ids that the model has beyond this vocabulary; they are suppressed."""
        self._backend = backend
        self._special = special
        self._template = ChatTemplate(template)
        self.fingerprint = fingerprint
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = backend.token_to_id(special.get("bos_token", "<bos>"))
        self.stop_ids = self._without_newline(as_ids(generation.get("eos_token_id")))
        self.model_vocab_size = self.vocab_size + padding
        """Ids of the model's logits; those from `vocab_size` on stand for nothing."""
        beyond = range(self.vocab_size, self.model_vocab_size)
        self.suppress_ids = (*as_ids(generation.get("suppress_tokens")), *beyond)
        self.defaults = sampling_defaults(generation)

    @cached_property
    def vocabulary(self) -> str:
        """sha256 of the mapping of ids to tokens: equal if the ids of two models mean the same,
        even if their tokenizer files differ otherwise."""
        words = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    @property
    def template_fingerprint(self) -> str:
        """sha256 of the chat template; of nothing where there is none."""
        return hashlib.sha256((self._template.text or "").encode()).hexdigest()

    @property
    def longest_token(self) -> int:
        """Bytes of the longest entry: no token stands for more of a text."""
        return self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(len(word.encode()) for word in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out of a text by default."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._control_texts())

    def _control_texts(self) -> set[str]:
        added = self._backend.get_added_tokens_decoder()
        return {added[token_id].content for token_id in self.special_ids}

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with BOS in front exactly once, whether or not the text brings its own.
        Control tokens are read where their texts stand."""
        return self.encode_pieces([text])

    def encode_pieces(self, pieces: list[str]) -> list[int]:
        """Ids of texts one after the other, each encoded by itself; as `encode` otherwise. Raises
        UserError for a part of a character."""
        try:
            # in a batch: unlike `encode` it lets other threads run meanwhile (tokenizers 0.23)
            encoded = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError:
            check_characters("".join(pieces), "the prompt")
            raise
        ids = [i for piece in encoded for i in piece.ids]
        if self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]

    def render(
        self,
        messages: list[dict[str, Any]],
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat, from the checkpoint's own template.

        Ends with the header of the model's turn unless `add_generation_prompt=False`.
        Raises UserError when there is no template or the template refuses the messages, and
        RenderedTooLong beyond `max_characters`.
        """
        values = {**self._special, **template_kwargs}
        return self._template.render(messages, values, max_characters)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        continue_final: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a rendered chat; the template's own <bos> is not doubled."""
        return self.encode_pieces(self.chat_pieces(messages, continue_final, **template_kwargs))

    def chat_pieces(
        self,
        messages: list[dict[str, Any]],
        continue_final: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> list[str]:
        """A rendered chat, in the pieces that are encoded one by one.

        Control tokens come from the template alone: what looks like one in a message, a tool or
        an argument is encoded as text. Tool results stand behind their calls, wherever they came.
        continue_final: the prompt ends with the last message's text, as it is, so that the model
        goes on with it.
        """
        render = partial(self.render, max_characters=max_characters)
        inputs = render, self._control_tokens, template_kwargs, continue_final
        prompt = ChatPrompt(*inputs, self._template.reads_parts)
        return prompt.pieces(messages)

    def picture_pieces(
        self,
        messages: list[dict[str, Any]],
        picture: str,
        continue_final: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> tuple[list[str], list[int]]:
        """`chat_pieces` with the control token `picture` for each part {"type": "image"} of a
        content, and the order in which the prompt has these: by number, as they were sent."""
        render = partial(self.render, max_characters=max_characters)
        control = ControlTokens(self._control_texts() | {picture})
        inputs = render, control, template_kwargs, continue_final
        prompt = ChatPrompt(*inputs, self._template.reads_parts, picture)
        return prompt.pieces(messages), prompt.order

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; special tokens are left out unless `skip_special` is False."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token's text, also where it is a part of a character."""
        text = self.decode([token_id])
        if REPLACEMENT not in text:
            return text.encode()
        word = self._backend.id_to_token(token_id) or ""
        if byte := BYTE_WORD.fullmatch(word):
            return bytes([int(byte[1], 16)])
        if isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return bytes(map(_letters_of_bytes().__getitem__, word))
        return text.encode()

    def stream(self, skip_special: bool = True) -> TextStream:
        """A fresh incremental decoder for one sequence."""
        return TextStream(self, skip_special)

    @property
    def info(self) -> dict[str, str | None]:
        """Special tokens by their names, and the chat template, as tokenizer_config.json has
        them."""
        return {**self._special, "chat_template": self._template.text}

    def to_json(self) -> str:
        """The tokenizer in the form of `tokenizer.json`."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str | None:
        """One vocabulary entry, such as "<turn|>", or None."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of one vocabulary entry such as "<turn|>", or None."""
        return self._backend.token_to_id(token)

    def _without_newline(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        # A newline among the stop ids is a known copying mistake; it would end each answer early.
        return tuple(i for i in ids if self.decode([i], skip_special=False) != "\n")


@cache
def _letters_of_bytes() -> dict[str, int]:
    """The letter by which byte-level vocabularies spell each byte: itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


def check_characters(text: str, where: str) -> None:
    """Raises UserError for a part of a character, as of a text that was cut within an emoji, or
    that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError(
            f"{where}: character {problem.start + 1} of the text is only a part of one: give whole "
            "characters, in UTF-8"
        ) from None


class Encoder(Protocol):
    """What turns a text into a prompt's ids, BOS in front."""

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


def bare_ids(text: str, tokenizer: Encoder) -> list[int]:
    """Ids of a text that is not the beginning of a prompt: without BOS."""
    ids = tokenizer.encode(text)
    return ids[1:] if ids[:1] == [tokenizer.bos_id] else ids


def bad_word_ids(words: Iterable[str], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """The ids of each word without and with a space before it, as vLLM bars them. Raises
    UserError."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise UserError("bad_words holds an empty word")
        for form in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(bare_ids(form, tokenizer))] = None
    return tuple(found)


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of the checkpoint folder `path`.

    vocab_size: the model's; None: that of `config.json` (not checked if it has none).
    Raises UserError for a missing or unreadable file and for a vocabulary of another size.
    """
    path = Path(path)
    source = path / "tokenizer.json"
    if not source.is_file():
        raise UserError(f"{source} is missing: download the checkpoint's tokenizer files too")
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises the bare class
        raise UserError(f"{source} is not a tokenizer ({error}): download it again") from error
    backend.no_truncation()
    backend.no_padding()
    settings = read_object(path / "tokenizer_config.json")
    config = read_object(path / "config.json")
    text_config = config.get("text_config") or {}
    expected = vocab_size or text_config.get("vocab_size") or config.get("vocab_size")
    found = backend.get_vocab_size(with_added_tokens=True)
    size = expected or found
    if not fits_vocabulary(found, size):
        raise UserError(
            f"{source} has {found} entries but the model's vocab_size is {expected}: "
            "use the tokenizer that belongs to this checkpoint"
        )
    generation = read_object(path / "generation_config.json")
    check_generation(generation, path / "generation_config.json", found)
    if generation.get("eos_token_id") is None:
        eos = config.get("eos_token_id", text_config.get("eos_token_id"))
        check_generation({"eos_token_id": eos}, path / "config.json", found)
        generation["eos_token_id"] = eos
    fingerprint = hashlib.sha256(source.read_bytes()).hexdigest()
    template = read_template(path, settings)
    special = _special_tokens(settings)
    return Tokenizer(backend, special, template, generation, fingerprint, size - found)


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Names that templates use (`bos_token`, ...) and their texts; old files wrap them in dicts."""
    found = {"bos_token": "<bos>"}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
