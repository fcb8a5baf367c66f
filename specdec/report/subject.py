"""What a receipt is about: a loaded model with its drafters, and the prompts that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seqs
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from drafters.registry import PLAIN, find
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, Status
from specdec.core.config import Loop, SamplingConfig, SpeculationConfig
from specdec.core.engine import Engine
from specdec.evaluation.prompts import Prompt, thinking_prompts
from specdec.evaluation.results import PromptOutcome
from specdec.evaluation.run import Question, Racer, Settings, questions_of
from specdec.report.profile import TEMPERATURES, K, Profile


class Counter(Protocol):
    """Progress of work that can be counted."""

    def update(self, done: int, /) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How progress is shown."""

    status: Status
    """For work that can't be counted."""
    counting: Callable[[str, int], AbstractContextManager[Counter]]
    """(title, total) -> a counter."""


@dataclass(frozen=True)
class Condition:
    """How prompts are answered."""

    temperature: float
    thinking: bool

    def to_json(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "thinking": self.thinking}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Condition:
        """That of a receipt's row."""
        return cls(row["temperature"], row["thinking"])

    def __str__(self) -> str:
        return f"T = {self.temperature:g}, thinking {'on' if self.thinking else 'off'}"


@dataclass(frozen=True)
class Subject:
    model: Model
    speculation: SpeculationConfig
    """Resolved, of the drafter that combines the others."""
    profile: Profile
    prompts: list[Prompt]
    output_len: int
    """Tokens of each timed answer."""
    progress: Progress
    text: str | None = None
    """What perplexity is measured on."""
    random: bool = False
    """Whether the weights are random: then no guess is right, and that says nothing."""
    plain: dict[Condition, list[PromptOutcome]] = field(default_factory=dict)
    """Answers that this process has decoded a token per step, by condition."""

    @cached_property
    def weighted(self) -> str | None:
        """The drafter with weights, if there is one."""
        return find(self.speculation.drafter).weighted_name(self.speculation)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The drafters that need the text alone."""
        others = (PLAIN, self.speculation.drafter, self.weighted)
        return tuple(name for name in self.model.drafters if name not in others)

    @property
    def single(self) -> str:
        """The drafter that guesses alone where one is compared with plain decoding: the one with
        weights, else the first that reads the text."""
        return self.weighted or self.texts[0]

    def engine(self, drafter: str, loop: Loop | None = None) -> Engine:
        """An engine with this drafter and K guesses a cycle. Raises UserError."""
        speculation = replace(self.speculation, drafter=drafter)
        return make_engine(self.model, replace(speculation, loop=loop) if loop else speculation)

    @cached_property
    def conditions(self) -> list[Condition]:
        """Greedy and sampled; with thinking too where the chat template has it."""
        ways = (False, True) if self.thinks else (False,)
        return [Condition(t, thinking) for thinking in ways for t in TEMPERATURES]

    @cached_property
    def thinks(self) -> bool:
        """Whether thinking changes what the model reads."""
        chats = [prompt for prompt in self.prompts if prompt.kind == "chat"]
        if not chats:
            return False
        (other,) = thinking_prompts(chats[:1])
        return self._encoded(chats[0]) != self._encoded(other)

    def questions(self, condition: Condition) -> tuple[list[Question], int]:
        """The prompts with their ids and seeds, and how many do not fit the context. Raises
        UserError where none does."""
        prompts = self.prompts
        if condition.thinking:
            prompts = thinking_prompts([prompt for prompt in prompts if prompt.kind == "chat"])
        fitting = self.model.target.max_len
        found, skipped = questions_of(prompts, self._encoded, self.settings(condition), fitting)
        return found, len(skipped)

    def settings(self, condition: Condition) -> Settings:
        tokenizer = self.model.tokenizer
        return Settings(
            drafter=self.single,
            k=K,
            max_tokens=self.profile.max_tokens,
            sampling=SamplingConfig(condition.temperature).sampling(tokenizer.defaults),
            stop_ids=frozenset(tokenizer.stop_ids),
        )

    def plain_answers(self, condition: Condition) -> list[PromptOutcome]:
        """All prompts, answered without speculation."""
        if condition not in self.plain:
            self.plain[condition] = self.answered(self.engine(PLAIN), condition, "plain")
        return self.plain[condition]

    def answered(self, engine: Engine, condition: Condition, title: str) -> list[PromptOutcome]:
        """All prompts, answered by an idle engine."""
        questions, _ = self.questions(condition)
        racer, settings, size = Racer(engine), self.settings(condition), 2 * engine.target.slots
        with self.progress.counting(f"{title}, {condition}", len(questions)) as counter:
            for group in _groups(questions, size):
                racer.run(group, settings)
                counter.update(len(racer.outcomes))
        return racer.outcomes

    def _encoded(self, prompt: Prompt) -> list[int]:
        return prompt.encode(self.model.tokenizer.encode, self.model.tokenizer.encode_chat)


def _groups(questions: Seqs[Question], size: int) -> Iterator[Seqs[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]
