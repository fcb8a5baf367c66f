"""The assistant's forward in the words of `ops.py`: our kernels on a Hopper GPU, plain torch
elsewhere. The mathematics, and the JAX twin: `../jax/model.py`.

Its layers are the target's own `decode_layer`, with the target's cache. Linear layers and a dense
head are fp8 where the target's linears are 8 bits wide, quantised on load. Shape legend: M rows, H
the target's width, d the assistant's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafters.assistant.cuda.kernels import AssistantKernels, AssistantRankKernels
from drafters.assistant.cuda.ops import AssistantOps, AssistantReference, States
from drafters.assistant.cuda.ordered import OrderedHead
from drafters.assistant.spec import Assistant, AssistantSpec, tensors
from specdec.core.errors import UserError
from targets.arch import Arch
from targets.cuda.cards import CardsTarget
from targets.cuda.exchange import ExchangeMemory
from targets.cuda.footprint import TargetShape, tensor_bytes
from targets.cuda.graphs import bucket_of
from targets.cuda.guessing import DraftVocabulary, vocabulary_of
from targets.cuda.model import decode_layer
from targets.cuda.ops import AttentionLayer, Linear, Opening, Rows, X
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.params import LayerWeights, layer_weights
from targets.cuda.plan import KV_DTYPES
from targets.cuda.ranks import RankKernels, refuse_layers
from targets.cuda.reader import Cut, Raw, Reader, whole
from targets.cuda.reference import Reference
from targets.cuda.staging import Staging
from targets.cuda.target import CudaTarget
from targets.cuda.upload import as_tensor, upload

DTYPES = {"bfloat16": "bfloat16", "float32": "float32"}
"""dtype of an assistant's weights by the target's dtype; fp8 beside narrower ones."""
KINDS = {"bfloat16": "bf16", "float32": "float32", "fp8": "fp8"}


@dataclass(frozen=True)
class AssistantWeights:
    """head: dense, of the words that are scored. norm [d]: float32."""

    pre: Linear
    post: Linear
    head: Linear | OrderedHead
    norm: Tensor
    layers: tuple[LayerWeights, ...]


class AssistantModel:
    """One assistant beside its target: all of its drafters share it."""

    def __init__(
        self,
        assistant: Assistant,
        target: CudaTarget,
        ahead: int,
        exchange: ExchangeMemory | None = None,
    ) -> None:
        """ahead: how far behind the last key the queries are turned: 1 as transformers does, 0 as
        vLLM; sliding layers then see as many more keys. exchange: for sums, where the target is one
        of several cards that share the model."""
        spec, self.target, self.ahead = assistant.spec, target, ahead
        self.arch = widened(spec.arch, ahead)
        last = len(target.arch.layers) - 1
        assert target.plan.features == (last,), (target.plan.features, last)
        self.spec = spec
        dtype, cut = DTYPES.get(target.dtype, "fp8"), whole
        if exchange is not None:
            assert isinstance(target.ops, RankKernels)
            rank = replace(target.ops.rank, arch=self.arch)
            self.arch, cut, inboxes = rank.own, rank.cut, exchange.of(rank.number)
            self.ops = AssistantRankKernels(rank, inboxes, *_sizes(target), KINDS[dtype])
        else:
            self.ops = _ops(self.arch, target, KINDS[dtype])
        self.weights = place(assistant, dtype, self.ops, target, cut)
        self.known = _known(assistant, target)
        self._layers = tuple(self._layer(i) for i in range(len(self.arch.layers)))

    def _layer(self, i: int) -> AttentionLayer:
        stored = self.target.cache.of(self.target.arch.layers, self.spec.sources[i])
        norm = self.weights.layers[i].q_norm
        return AttentionLayer(self.arch.layers[i], stored, norm, ahead=self.ahead)

    def step(self, tokens: Tensor, states: States, seen: Rows) -> tuple[Tensor, X]:
        """One draft step of tokens [M] int32 -> logits [M, words], and what `handed` takes. seen:
        the rows' slots, and as `start` the last position that each sees."""
        w, ops, layers = self.weights, self.ops, self.weights.layers
        x = ops.beside(self.target.weights.embedding, tokens, states, w.pre.kind)
        h = ops.linear(x, w.pre)
        x = ops.norm(h, Opening(layers[0].input_norm, layers[0].qkv.kind))
        for i, own in enumerate(layers):
            following = Opening(w.norm, w.post.kind)
            if i + 1 < len(layers):
                following = Opening(layers[i + 1].input_norm, layers[i + 1].qkv.kind)
            x = decode_layer(h, x, own, self._layers[i], seen, ops, following)
        if isinstance(w.head, OrderedHead):
            return ops.ordered(h, w.norm, w.head), x
        return ops.head(x, w.head, self.spec.arch.softcap), x

    def handed(self, x: X) -> Tensor:
        """The states [M, H] that the next step is fed. Launched after the guess: few CTAs choose
        it, and these weights are loaded meanwhile."""
        return self.ops.linear(x, self.weights.post)


def widened(arch: Arch, ahead: int) -> Arch:
    """The layers as they are run. Kernels are compiled for these: a chunk's keys depend on the
    window."""
    layers = (replace(layer, window=layer.window and layer.window + ahead) for layer in arch.layers)
    return replace(arch, layers=tuple(layers))


def exchange_beside(spec: AssistantSpec, target: CudaTarget | CardsTarget) -> ExchangeMemory | None:
    """Where cards that share the target leave sums of the assistant for each other; None on one
    card. Each card attends to the keys of its own K/V heads. Raises UserError."""
    if isinstance(target, CudaTarget):
        return None
    count = len(target.ranks)
    refuse_layers(spec.arch, count, " of the assistant")
    return ExchangeMemory(range(count), bucket_of(target.slots), spec.arch.hidden)


def placed(
    assistant: Assistant, target: CudaTarget, ahead: int, exchange: ExchangeMemory | None = None
) -> AssistantModel:
    """The assistant beside its target. Raises UserError, also if memory does not suffice."""
    try:
        with catching_oom("the assistant beside the model"):
            return AssistantModel(assistant, target, ahead, exchange)
    except MemoryError as problem:
        raise UserError(str(problem)) from problem


def need_bytes(assistant: Assistant, shape: TargetShape) -> int:
    """What an assistant adds to a target's need: weights, a state per slot, its logits, and the
    states that a verify and a prefill chunk bring along."""
    spec, ids = assistant.spec, assistant.target_ids
    table = tensors(spec)
    words = spec.arch.vocab if ids is None else len(ids)
    table["head"] = replace(table["head"], shape=(words, spec.arch.hidden))
    dtype = DTYPES.get(shape.dtype, "fp8")
    weights = sum(tensor_bytes(name, tensor, dtype) for name, tensor in table.items())
    rows = bucket_of(shape.slots)
    states = shape.slots + 1 + rows * (shape.width + 2) + shape.chunk
    return weights + 4 * spec.backbone * states + 4 * rows * (words + spec.arch.vocab)


def _ops(arch: Arch, target: CudaTarget, kind: str) -> AssistantOps:
    if isinstance(target.ops, Reference):
        return AssistantReference(arch)
    return AssistantKernels(arch, *_sizes(target), kind)


def _sizes(target: CudaTarget) -> tuple[int, torch.dtype]:
    """Positions that its queries may have, and the dtype of the keys."""
    return target.max_len + target.plan.slack + 1, KV_DTYPES[target.kv_dtype]


def _known(assistant: Assistant, target: CudaTarget) -> DraftVocabulary | None:
    if assistant.target_ids is None:
        return None
    ids = torch.from_numpy(assistant.target_ids)
    return vocabulary_of(ids, target.arch.vocab, target.device)


def place(
    assistant: Assistant, dtype: str, ops: AssistantOps, target: CudaTarget, cut: Cut = whole
) -> AssistantWeights:
    """An assistant's weights on the device, fused as they are read. cut: a card's part of them."""
    spec, ids, device = assistant.spec, assistant.target_ids, str(target.device)

    def source(name: str) -> Raw:
        values = assistant.weights[name]
        values = values if name != "head" or ids is None else values[ids]
        return upload(as_tensor(np.ascontiguousarray(values)), device), None

    reader = Reader(source, tensors(spec), dtype, ops, Staging(device), cut=cut)
    # packing needs room: the largest before all else
    vocab = target.arch.vocab
    head = OrderedHead.of(spec, reader, vocab) if spec.clusters else reader.linear(["head"])
    return AssistantWeights(
        pre=reader.linear(["pre_projection"]),
        post=reader.linear(["post_projection"]),
        head=head,
        norm=reader.vector("norm"),
        layers=tuple(
            layer_weights(reader, spec.arch, i, layer) for i, layer in enumerate(spec.arch.layers)
        ),
    )
