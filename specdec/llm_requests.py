"""From a prompt and its parameters to a sequence for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

from drafters.registry import PLAIN
from serve.stream import Output
from specdec.assembly.model import Model
from specdec.audit.making import PLAIN as ALL_TEXT
from specdec.audit.receipt import OutputPart
from specdec.constraints.constraint import TextConstraint, TextRules, constraint_of
from specdec.constraints.grammar import composed
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.engine import DraftSetup
from specdec.core.errors import UserError
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Reuse, Sequence, Speculative
from specdec.llm_pictures import chat_prompt
from specdec.llm_types import Conversation, SamplingParams
from targets.tokenizer import bad_word_ids, bare_ids
from targets.vision.prompt import PicturePrompt
from targets.vision.spec import VisionSpec

Prompt = str | Seqs[int] | Seqs[Mapping[str, Any]]
"""A text to continue, its token ids, or chat messages ({"role": ..., "content": ...}). A content is
a text, or a list of {"text": ...} and {"image": ...}, where an image is a file's path or bytes."""


@dataclass(frozen=True)
class Planned:
    """A request in the engine's terms."""

    seq: Sequence
    part: OutputPart = ALL_TEXT
    """How the answer is taken apart, as its receipt has it."""
    output: Output | None = None
    """Takes the answer apart; None: all of it is text."""


class Requests:
    """Makes sequences for one model. Any thread may use it."""

    def __init__(self, model: Model, drafting: DraftSetup) -> None:
        """drafting: the engine's."""
        self._model, self._drafting = model, drafting
        self._vocabulary = Vocabulary(model.tokenizer)

    def plan(self, prompt: Prompt | Conversation, params: SamplingParams) -> Planned:
        """Raises UserError for prompts and parameters that this model can't take."""
        if not isinstance(prompt, Conversation):
            read = self._read(prompt)
            return Planned(self._sequence(read, params, self._constraint(params)))
        from serve.outputs import output_of  # the server's schemas take a while
        from specdec.llm_chat import Chat

        self._known(params.allowed_token_ids)
        chat, tokenizer = Chat(prompt, params), self._model.tokenizer
        read = chat_prompt(chat.messages, tokenizer, self._vision, **chat.template_values)
        constraint = chat.constraint(tokenizer, read.ids, self._vocabulary)
        seq = self._sequence(read, params, constraint)
        part = chat.output_part(tokenizer, read.ids)
        return Planned(seq, part, output_of(part, tokenizer))

    def _sequence(
        self, read: PicturePrompt, params: SamplingParams, constraint: TextConstraint | None
    ) -> Sequence:
        tokenizer, target = self._model.tokenizer, self._model.target
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(tokenizer.stop_ids)
        room = max(1, target.max_len - len(read.ids))
        pictures = ()
        if read.files and self._vision is not None:
            pictures = read.pictures(self._vision.patches)
        seq = Sequence(
            read.tokens,
            params.for_target(tokenizer.defaults),
            min(params.max_tokens, room),
            stop_ids,
            constraint=constraint,
            speculative=self._speculative(params),
            reuse=Reuse(params.cache_salt or ""),
            pictures=pictures,
            reported=True,
        )
        seq.check_ids(target.vocab)
        seq.prediction = self._prediction(params, seq.prompt_len)
        return seq

    @property
    def _vision(self) -> VisionSpec | None:
        return self._model.target.vision

    def _read(self, prompt: Prompt) -> PicturePrompt:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            return PicturePrompt(tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            return chat_prompt(prompt, tokenizer, self._vision)  # pyright: ignore
        if not all(isinstance(token, int) for token in prompt):
            raise UserError("a prompt is a text, a list of token ids or a list of chat messages")
        return PicturePrompt(list(prompt))  # pyright: ignore

    def _constraint(self, params: SamplingParams) -> TextConstraint | None:
        """Its first use reads the vocabulary, which takes a second or more."""
        structure = params.structure
        grammar = None
        if structure.set_fields:
            grammar = composed("start: body\nbody: @text\n", {"text": structure.part()})
        rules = TextRules(
            grammar=grammar,
            allowed=self._known(params.allowed_token_ids),
            bad_words=bad_word_ids(params.bad_words, self._model.tokenizer),
            min_tokens=params.min_tokens,
            stop_ids=(*self._model.tokenizer.stop_ids, *params.stop_token_ids),
        )
        return constraint_of(rules, self._vocabulary)

    def _known(self, allowed: Seqs[int] | None) -> tuple[int, ...] | None:
        if allowed is None:
            return None
        vocab = self._model.target.vocab
        if not allowed or min(allowed) < 0 or max(allowed) >= vocab:
            raise UserError(f"allowed_token_ids are one or more ids from 0 to {vocab - 1}")
        return tuple(allowed)

    def _speculative(self, params: SamplingParams) -> Speculative | None:
        if params.drafter is None and params.k is None:
            return None
        drafting, name, k = self._drafting, params.drafter, params.k
        if name is not None and name not in (*drafting.names, PLAIN):
            loaded = ", ".join(drafting.names)
            raise UserError(f"the drafter {name!r} is not loaded: there are {loaded}")
        if k is not None and not 0 <= k <= drafting.k:
            raise UserError(f"k is 0 to {drafting.k}, as loaded, not {k}")
        return Speculative(name, 0 if name == PLAIN else k)

    def _prediction(self, params: SamplingParams, start: int) -> Prediction | None:
        text = params.prediction
        if text is None:
            return None
        ids = bare_ids(text, self._model.tokenizer) if isinstance(text, str) else list(text)
        return Prediction(PredictedText(ids[: self._model.target.max_len]), start)
