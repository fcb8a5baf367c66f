"""The interface of heads that a trainer can train: their initial weights, the draft steps from all
positions at once, and the drafter made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from drafters.assistant.jax import model as assistant
from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
from drafters.assistant.spec import Assistant, AssistantSpec, tensors as assistant_tensors
from drafters.dflash.jax import body as dflash
from drafters.dflash.jax.drafter import BlockDraftHead, PlacedBlock
from drafters.dflash.jax.unroll import unroll as unroll_blocks
from drafters.dflash.spec import BlockHead, BlockSpec, PreviousToken, tensors as block_tensors
from drafters.eagle3.jax import head as eagle3
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.spec import Head, HeadSpec, tensors as eagle3_tensors
from specdec.core.protocols import Drafter
from targets.arch import LayerSpec
from targets.jax.host_drafter import HostHead
from targets.jax.kv_exchange import attend_visible
from targets.jax.params import Params
from targets.jax.target import JaxTarget
from training.packing import PackedRows
from training.teacher import PackedExchange, TeacherOutput

AnySpec = HeadSpec | AssistantSpec | BlockSpec
Weights = dict[str, Any]
"""Float32 arrays by the names of the kind's `tensors`."""
AHEAD = 1
"""Where an assistant's queries stand in training: at the token that is fed, as in transformers."""

EMBEDDING_WEIGHT = 0.3
"""Initial weight of the token's embedding in the input of an assistant's first layer."""
STATE_WEIGHT = 3.0
"""Initial weight of the state before the token in the same input: with the embedding some four
times as large as what a layer adds to it."""
SURENESS = 0.4
"""Initial scale of an assistant's or a block drafter's logits, relative to its target's: untrained,
it is less certain than those."""
SHARPNESS = 3.0
"""Initial query norms of a block drafter. A score is at most the norms' product times the root of
head_dim: with 1 no position stands out among hundreds."""


class OriginLayer(NamedTuple):
    """A layer of a target: the stacked tensors of several layers by name, [layers, ...], and its
    index. A target may be large: tensors are cut out of the stacks only when used."""

    stacked: Weights
    at: int


class Origin(NamedTuple):
    """The parts of a target that a draft head may start from. table [V, H]: the target's head;
    norm [H]: the final norm."""

    table: Any
    norm: Any
    layers: tuple[OriginLayer, ...] = ()


def origin_of(params: Params) -> Origin:
    """A target's own."""
    head = params.top.get("lm_head", params.top["embed_tokens"])
    return Origin(head, params.top["norm"], tuple(_layers_of(params)))


def _layers_of(params: Params) -> Iterator[OriginLayer]:
    for pattern in params.segments:
        for repeat in range(len(pattern[0]["input_layernorm"])):
            for layer in pattern:
                yield OriginLayer(layer, repeat)


class TrainableHead(Protocol):
    """One kind of head, of one spec."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers with outputs that are its features; none if it is fed the state after
        the final norm."""
        ...

    @property
    def lenders(self) -> tuple[int, ...]:
        """The target's layers from which it reads keys and values."""
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

    def start(self, origin: Origin, ids: np.ndarray) -> Weights:
        """Initial weights, except those that start as noise or ones. ids [D]: the draft
        vocabulary."""
        ...

    def begin(self, weights: Weights, lesson: TeacherOutput) -> Any:
        """The input of the first step from every position."""
        ...

    def step(
        self, weights: Weights, before: Any, table: Any, tokens: Any, rows: PackedRows, lent: Any
    ) -> tuple[Any, Any]:
        """One draft step from every position at once, fed tokens [B, T] -> (the next step's
        `before`, logits [B, T, D] over the draft vocabulary). table: the target's embeddings; lent:
        the teacher's keys and values."""
        ...

    def drafter(
        self, target: JaxTarget, ids: np.ndarray, k: int
    ) -> tuple[Drafter, Callable[[Weights], None]]:
        """A drafter of the engine, and a function that replaces its weights."""
        ...


def head_of(spec: AnySpec) -> TrainableHead:
    if isinstance(spec, BlockSpec):
        return BlockTrainee(spec)
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

    def start(self, origin: Origin, ids: np.ndarray) -> Weights:
        """The last norm and the head's rows start as the target's own."""
        return {"lm_head": origin.table[ids], "norm": origin.norm}

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
    ) -> tuple[HostHead[Any], Callable[[Weights], None]]:
        head = EagleDraftHead(Head(self.spec, _blank(self.shapes), ids), target, k)

        def draft_by(weights: Weights) -> None:
            head.placed = {n: jnp.asarray(value, target.dtype) for n, value in weights.items()}

        return HostHead(head), draft_by


class Fused(NamedTuple):
    """What a block's layers make their keys and values of [B, T, H], before the first step."""

    context: Any


class Slots(NamedTuple):
    """States [B, T, n, H] of each position's slots that are still to predict."""

    hidden: Any


@dataclass(frozen=True)
class BlockTrainee:
    """`TrainableHead` of a block drafter with a previous-token bias. The whole block is made in the
    first step, which is fed the anchors; each step then scores the next slot, and the bias reads
    the token that the step is fed."""

    spec: BlockSpec
    lenders: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return self.spec.taps

    @property
    def draft_vocab(self) -> int:
        return self.spec.draft_vocab

    @property
    def table(self) -> tuple[int, int]:
        return self.spec.vocab, self.spec.body.hidden

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return block_tensors(self.spec)

    def start(self, origin: Origin, ids: np.ndarray) -> Weights:
        """The last norm starts as a part of the target's, the rows of a head of its own as those;
        the bias as none."""
        weights: Weights = {"norm": SURENESS * origin.norm}
        if self.spec.own_head:
            weights["lm_head"] = origin.table[ids]
        for name, shape in self.shapes.items():
            if name.endswith("q_norm"):
                weights[name] = jnp.full(shape, SHARPNESS, jnp.float32)
        name = "markov_head.markov_w2"
        return weights | {name: jnp.zeros(self.shapes[name], jnp.float32)}

    def begin(self, weights: Weights, lesson: TeacherOutput) -> Any:
        return Fused(dflash.context(weights, self.spec, lesson.features))

    def step(
        self, weights: Weights, before: Any, table: Any, tokens: Any, rows: PackedRows, lent: Any
    ) -> tuple[Any, Any]:
        spec = self.spec
        assert isinstance(spec.chooser, PreviousToken)
        if isinstance(before, Fused):
            embedded = dflash.embed(spec, table, tokens.reshape(-1))
            embedded = embedded.reshape(*tokens.shape, spec.slots, -1)
            documents = jnp.asarray(rows.documents)
            made = unroll_blocks(weights, spec, before.context, embedded, documents)
            before = Slots(made[:, :, spec.first :])
        hidden, known = before.hidden, jnp.clip(tokens, 0, spec.vocab - 1)
        words = weights["lm_head"] if spec.own_head else table
        bias = weights["markov_head.markov_w1"][known]
        scored = dflash.logits(spec, words, hidden[:, :, 0])
        scored += dflash.logits(spec, weights["markov_head.markov_w2"], bias)
        return Slots(hidden[:, :, 1:]), scored

    def drafter(
        self, target: JaxTarget, ids: np.ndarray, k: int
    ) -> tuple[HostHead[Any], Callable[[Weights], None]]:
        own = ids if self.spec.draft_vocab < self.spec.vocab else None
        placed = PlacedBlock(BlockHead(self.spec, _blank(self.shapes), own), target)

        def draft_by(weights: Weights) -> None:
            placed.read({name: np.asarray(value) for name, value in weights.items()})

        return HostHead(BlockDraftHead(placed)), draft_by


class LentExchange(NamedTuple):
    """A `KVExchange` of an assistant's layers in training: the query of each position sees the
    target's keys of its document up to there. documents [B, T]."""

    documents: Any

    def scope(self) -> Any:
        return self

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
    norm, and the same keys at every step, so only the states differ between steps."""

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

    def start(self, origin: Origin, ids: np.ndarray) -> Weights:
        """Where it is as wide as the target, it starts as the target's end: head, last norm, and
        the last layers of the same shapes, which have the queries for the keys that it reads."""
        width = self.spec.arch.hidden
        if origin.table.shape[1] != width:
            return {}
        through = np.eye(width, dtype=np.float32)
        weights = {"head": origin.table[ids], "norm": SURENESS * origin.norm}
        weights["pre_projection"] = np.concatenate(
            [EMBEDDING_WEIGHT * through, STATE_WEIGHT * through], 1
        )
        return weights | {"post_projection": through} | _last_layers(self.shapes, origin.layers)

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
    ) -> tuple[HostHead[Any], Callable[[Weights], None]]:
        blank = Assistant(self.spec, _blank(self.shapes))
        placed = PlacedAssistant(blank, target, AHEAD, greedy=False, int8=False)

        def draft_by(weights: Weights) -> None:
            placed.read(Assistant(self.spec, {n: np.asarray(v) for n, v in weights.items()}))

        return HostHead(AssistantDraftHead(placed)), draft_by


def _last_layers(shapes: dict[str, tuple[int, ...]], layers: tuple[OriginLayer, ...]) -> Weights:
    """From the last one back, each of a head's layers as the next of the target's that fits."""
    found: Weights = {}
    left, number = list(layers), 1 + max(int(n.split(".")[1]) for n in shapes if n[:6] == "layers")
    while number and left:
        prefix, (stacked, at) = f"layers.{number - 1}.", left.pop()
        own = {n: n.removeprefix(prefix) for n in shapes if n.startswith(prefix)}
        if all(n in stacked and stacked[n].shape[1:] == shapes[name] for name, n in own.items()):
            found |= {name: stacked[n][at] for name, n in own.items()}
            number -= 1
    return found


def _blank(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
