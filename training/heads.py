"""What a trainer asks of the heads that it can train: where they start, how they draft on from all
positions at once, and the drafter that they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from drafters.assistant.jax import model as assistant
from drafters.assistant.jax.drafter import AssistantDrafter, PlacedAssistant
from drafters.assistant.spec import Assistant, AssistantSpec, tensors as assistant_tensors
from drafters.eagle3.jax import head as eagle3
from drafters.eagle3.jax.drafter import EagleDrafter
from drafters.eagle3.spec import Head, HeadSpec, tensors as eagle3_tensors
from specdec.core.protocols import Drafter
from targets.arch import LayerSpec
from targets.jax.kv_exchange import attend_visible
from targets.jax.target import JaxTarget
from training.packing import PackedRows
from training.teacher import PackedExchange, TeacherOutput

AnySpec = HeadSpec | AssistantSpec
Weights = dict[str, Any]
"""Float32 arrays by the names of the kind's `tensors`."""
AHEAD = 1
"""Where an assistant's queries stand in training: at the token that is fed, as in transformers."""


class TrainableHead(Protocol):
    """One kind of head, of one spec."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs are its features; none where it is fed the state after
        the final norm."""
        ...

    @property
    def lenders(self) -> tuple[int, ...]:
        """The target's layers whose keys and values it reads."""
        ...

    @property
    def draft_vocab(self) -> int:
        """Words that it scores."""
        ...

    @property
    def table(self) -> tuple[int, int]:
        """Words and width of the target's embeddings."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def start(self, table: np.ndarray, norm: np.ndarray, ids: np.ndarray) -> Weights:
        """Weights that do not start as noise, or ones. table [V, H]: the target's embeddings; norm
        [H]: its final norm; ids [D]: the draft vocabulary."""
        ...

    def begin(self, weights: Weights, lesson: TeacherOutput) -> Any:
        """What the first step from every position is given."""
        ...

    def step(
        self, weights: Weights, before: Any, table: Any, tokens: Any, rows: PackedRows, lent: Any
    ) -> tuple[Any, Any]:
        """One draft step from every position at once, fed tokens [B, T] -> (what the next is given,
        logits [B, T, D] over the draft vocabulary). table: the target's embeddings; lent: what the
        lesson lends."""
        ...

    def drafter(
        self, target: JaxTarget, ids: np.ndarray, k: int
    ) -> tuple[Drafter, Callable[[Weights], None]]:
        """A drafter of the engine, and what gives it other weights."""
        ...


def head_of(spec: AnySpec) -> TrainableHead:
    return AssistantHead(spec) if isinstance(spec, AssistantSpec) else EagleHead(spec)


@dataclass(frozen=True)
class EagleHead:
    """`TrainableHead`."""

    spec: HeadSpec
    lenders: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return self.spec.layers

    @property
    def draft_vocab(self) -> int:
        return self.spec.draft_vocab

    @property
    def table(self) -> tuple[int, int]:
        return self.spec.vocab, self.spec.hidden

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return eagle3_tensors(self.spec)

    def start(self, table: np.ndarray, norm: np.ndarray, ids: np.ndarray) -> Weights:
        """The last norm and the head's rows start as the target's own."""
        return {"lm_head": table[ids], "norm": norm}

    def begin(self, weights: Weights, lesson: TeacherOutput) -> Any:
        return eagle3.Unrolled((), ()), eagle3.fuse(weights, self.spec, lesson.features)

    def step(
        self, weights: Weights, before: Any, table: Any, tokens: Any, rows: PackedRows, lent: Any
    ) -> tuple[Any, Any]:
        (kept, hidden), documents = before, jnp.asarray(rows.documents)
        fed = eagle3.embed(table, tokens)
        kept, out = eagle3.unroll(weights, self.spec, kept, fed, hidden, documents)
        guessed = eagle3.logits(weights, self.spec, out)
        return (kept, eagle3.feedback(weights, self.spec, out)), guessed

    def drafter(
        self, target: JaxTarget, ids: np.ndarray, k: int
    ) -> tuple[EagleDrafter, Callable[[Weights], None]]:
        drafter = EagleDrafter(Head(self.spec, _blank(self.shapes), ids), target, k)

        def draft_by(weights: Weights) -> None:
            drafter.head = {n: jnp.asarray(value, target.dtype) for n, value in weights.items()}

        return drafter, draft_by


class LentExchange(NamedTuple):
    """A `KVExchange` of an assistant's layers in training: the query of each position sees the
    target's keys of its document up to there. documents [B, T]."""

    documents: Any

    def positions(self, tokens: int) -> Any:
        return PackedExchange(self.documents).positions(tokens) + AHEAD

    def exchange(self, stored: Any, repeat: Any, layer: LayerSpec, k: Any, v: Any) -> Any:
        raise AssertionError("an assistant's layer has no keys of its own")

    def recall(self, stored: Any, repeat: int) -> Any:
        return stored

    attend = attend_visible

    def visible(self, layer: LayerSpec, tokens: int, size: int) -> Any:
        return PackedExchange(self.documents).visible(layer, tokens, size)


@dataclass(frozen=True)
class AssistantHead:
    """`TrainableHead` of an assistant that scores every word. It is fed the state after the final
    norm, and the same keys at every step, so its steps are told apart by states alone."""

    spec: AssistantSpec
    layers: tuple[int, ...] = ()

    @property
    def draft_vocab(self) -> int:
        return self.spec.arch.vocab

    @property
    def table(self) -> tuple[int, int]:
        return self.spec.arch.vocab, self.spec.backbone

    @property
    def lenders(self) -> tuple[int, ...]:
        return self.spec.sources

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in assistant_tensors(self.spec).items()}

    def start(self, table: np.ndarray, norm: np.ndarray, ids: np.ndarray) -> Weights:
        """Where it is as wide as the target, head and last norm start as the target's own."""
        return {"head": table[ids], "norm": norm} if table.shape[1] == self.spec.arch.hidden else {}

    def begin(self, weights: Weights, lesson: TeacherOutput) -> Any:
        return lesson.features

    def step(
        self, weights: Weights, before: Any, table: Any, tokens: Any, rows: PackedRows, lent: Any
    ) -> tuple[Any, Any]:
        fed = eagle3.embed(table, tokens)  # ids outside the vocabulary are 0
        fed = fed * jnp.asarray(table.shape[1] ** 0.5, table.dtype)
        exchange = LentExchange(jnp.asarray(rows.documents))
        nested = assistant.nested(weights, len(self.spec.arch.layers))
        y, handed = assistant.step(nested, self.spec, exchange, lent, AHEAD, fed, before)
        return handed, assistant.score(nested, self.spec, None, y).logits

    def drafter(
        self, target: JaxTarget, ids: np.ndarray, k: int
    ) -> tuple[AssistantDrafter, Callable[[Weights], None]]:
        blank = Assistant(self.spec, _blank(self.shapes))
        placed = PlacedAssistant(blank, target, AHEAD, greedy=False, int8=False)

        def draft_by(weights: Weights) -> None:
            placed.read(Assistant(self.spec, {n: np.asarray(v) for n, v in weights.items()}))

        return AssistantDrafter(placed, k), draft_by


def _blank(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
