"""From a prompt and its parameters to a sequence for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from typing import Any

from drafters.registry import PLAIN
from specdec.assembly.model import Model
from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.grammar import composed
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.engine import DraftSetup
from specdec.core.errors import UserError
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Reuse, Sequence, Speculative
from specdec.llm_pictures import chat_prompt
from specdec.llm_types import SamplingParams
from targets.tokenizer import bad_word_ids, bare_ids
from targets.vision.prompt import PicturePrompt

Prompt = str | Seqs[int] | Seqs[Mapping[str, Any]]
"""A text to continue, its token ids, or chat messages ({"role": ..., "content": ...}). A content is
a text, or a list of {"text": ...} and {"image": ...}, where an image is a file's path or bytes."""


class Requests:
    """Makes sequences for one model. Any thread may use it."""

    def __init__(self, model: Model, drafting: DraftSetup) -> None:
        """drafting: the engine's."""
        self._model, self._drafting = model, drafting
        self._vocabulary = Vocabulary(model.tokenizer)

    def sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Raises UserError for prompts and parameters that this model can't take."""
        tokenizer, target = self._model.tokenizer, self._model.target
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(tokenizer.stop_ids)
        read = self._read(prompt)
        room = max(1, target.max_len - len(read.ids))
        pictures = ()
        if read.files and target.vision is not None:
            pictures = read.pictures(target.vision.patches)
        seq = Sequence(
            read.tokens,
            params.for_target(tokenizer.defaults),
            min(params.max_tokens, room),
            stop_ids,
            constraint=self._constraint(params),
            speculative=self._speculative(params),
            reuse=Reuse(params.cache_salt or ""),
            pictures=pictures,
            reported=True,
        )
        seq.check_ids(target.vocab)
        seq.prediction = self._prediction(params, seq.prompt_len)
        return seq

    def _read(self, prompt: Prompt) -> PicturePrompt:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            return PicturePrompt(tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            vision = self._model.target.vision
            return chat_prompt(prompt, tokenizer, vision)  # pyright: ignore
        if not all(isinstance(token, int) for token in prompt):
            raise UserError("a prompt is a text, a list of token ids or a list of chat messages")
        return PicturePrompt(list(prompt))  # pyright: ignore

    def _constraint(self, params: SamplingParams) -> TextConstraint | None:
        """Its first use reads the vocabulary, which takes a second or more."""
        structure = params.structure
        named = structure.set_fields
        if len(named) > 1:
            raise UserError(f"an answer has one structure: give one of {', '.join(named)}")
        grammar = None
        if named:
            grammar = composed("start: body\nbody: @text\n", {"text": structure.part()})
        allowed = params.allowed_token_ids
        rules = TextRules(
            grammar=grammar,
            allowed=None if allowed is None else self._known(allowed),
            bad_words=bad_word_ids(params.bad_words, self._model.tokenizer),
            min_tokens=params.min_tokens,
            stop_ids=(*self._model.tokenizer.stop_ids, *params.stop_token_ids),
        )
        return None if rules.empty else TextConstraint(rules, self._vocabulary)

    def _known(self, allowed: Seqs[int]) -> tuple[int, ...]:
        vocab = self._model.target.vocab
        if not allowed or min(allowed) < 0 or max(allowed) >= vocab:
            raise UserError(f"allowed_token_ids are one or more ids from 0 to {vocab - 1}")
        return tuple(allowed)

    def _speculative(self, params: SamplingParams) -> Speculative | None:
        if params.drafter is None and params.k is None:
            return None
        drafting, name, k = self._drafting, params.drafter, params.k
        loaded = (drafting.drafter, *drafting.parts)
        if name is not None and name not in (*loaded, PLAIN):
            raise UserError(f"the drafter {name!r} is not loaded: there are {', '.join(loaded)}")
        if k is not None and not 0 <= k <= drafting.k:
            raise UserError(f"k is 0 to {drafting.k}, as loaded, not {k}")
        return Speculative(name, 0 if name == PLAIN else k)

    def _prediction(self, params: SamplingParams, start: int) -> Prediction | None:
        text = params.prediction
        if text is None:
            return None
        ids = bare_ids(text, self._model.tokenizer) if isinstance(text, str) else list(text)
        return Prediction(PredictedText(ids[: self._model.target.max_len]), start)
