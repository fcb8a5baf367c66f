"""The EAGLE-3 head's forward in the words of `ops.py`: our kernels on a Hopper GPU, plain torch
elsewhere. The mathematics, and the JAX twin: `../jax/head.py`.

A head is a Llama layer to the operations: nothing normed within attention, gates of SiLU. Linear
layers are fp8 where the target's are, quantised on load; K/V are bf16 (float32 for references).
Shape legend: M rows, H hidden, F features of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from drafters.eagle3.cuda.kernels import DraftKernels
from drafters.eagle3.cuda.ops import DraftOps, DraftReference, PairNorms
from drafters.eagle3.spec import Head, HeadSpec, check_pair, tensors
from specdec.core.errors import UserError
from targets.arch import Arch, LayerSpec, Rope
from targets.cuda.attention import HEADS
from targets.cuda.cache import entries, make_cache, padded_head, slack_of
from targets.cuda.footprint import LINEAR, TargetShape, graphs_rows
from targets.cuda.graphs import bucket_of
from targets.cuda.guessing import vocabulary_of
from targets.cuda.load import WIDEST
from targets.cuda.ops import AttentionLayer, Closing, Linear, Opening, Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.reader import quantise_fp8
from targets.cuda.reference import Reference
from targets.cuda.staging import Staging
from targets.cuda.target import CudaTarget

KINDS = {"bfloat16": "bf16", "float32": "float32"}
"""Kind of the head's linear layers by the target's dtype; fp8 beside narrower ones."""
PIECE = 128
"""Rows of a prompt that the head reads at once: what its sums take stays small."""


@dataclass(frozen=True)
class HeadWeights:
    """features_norm [F]: `fc_norm`s side by side, or `input_norm`, in `norm_parts` parts; None
    where the head has neither. Norms are float32."""

    fc: Linear
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    lm_head: Linear
    features_norm: Tensor | None
    norm_parts: int
    embedding_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    norm: Tensor


def arch_of(spec: HeadSpec) -> Arch:
    """The head as the operations see it: one layer."""
    layer = LayerSpec(
        window=spec.window,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rope=Rope(spec.theta, spec.head_dim // 2),
        k_eq_v=False,
        kv_from=None,
        ffw=spec.ffw,
        moe=None,
        normed=False,
    )
    return Arch(
        spec.draft_vocab, spec.hidden, (layer,), spec.eps, None, 0, 0, spec.max_position, spec.silu
    )


class HeadModel:
    """One head beside its target, with a K/V cache of the target's slots."""

    def __init__(self, head: Head, target: CudaTarget) -> None:
        """Raises UserError for a head of another target, or one that the kernels don't take."""
        spec, device = head.spec, target.device
        check_pair(spec, target.arch)
        assert target.plan.features == spec.layers, (target.plan.features, spec.layers)
        self.spec, self.target, self.arch = spec, target, arch_of(spec)
        self.longest = min(target.max_len, spec.max_position)
        """No token from this position on is guessed: the target's context or the head's ends."""
        kind, slack = KINDS.get(target.dtype, "fp8"), slack_of(PIECE, PIECE)
        self.ops = _ops(self.arch, target, self.longest + slack, kind)
        self.weights = place(head, kind, self.ops, device)
        kv = torch.float32 if kind == "float32" else torch.bfloat16
        sizes = target.slots, self.longest, slack
        layers, cache = self.arch.layers, make_cache(self.arch, *sizes, kv, str(device))
        self.layer = AttentionLayer(layers[0], cache.of(layers, 0))
        self.known = vocabulary_of(torch.from_numpy(head.target_ids), target.arch.vocab, device)

    def fuse(self, features: Tensor, slot: Tensor) -> Tensor:
        """The target's features [S, W, F] of slots [B] -> states [B W, H] float32."""
        w = self.weights
        x = self.ops.features(features, slot, w.features_norm, w.norm_parts, w.fc.kind)
        return self.ops.linear(x, w.fc)

    def mix(self, rows: Rows, h: Tensor, own: bool) -> Tensor:
        """Write the rows' entries and attend: -> [M, H] float32, to be added to h, which becomes
        the residual. own: h is the head's own output."""
        o, qkv = self.weights.o, self._project(rows, h, own)
        return self.ops.linear(self.ops.attention(qkv, self.layer, rows, o.kind), o)

    def store(self, rows: Rows, h: Tensor, table: Linear | None = None) -> None:
        """Write the rows' entries from the target's states, without predictions from them. table:
        the embeddings of their tokens, None for the target's."""
        self.ops.store(self._project(rows, h, False, table), self.layer, rows)

    def table_of(self, rows: Tensor) -> Linear:
        """Rows [n, H] as embeddings of tokens 0 .. n - 1, as the target has them: a norm follows,
        which undoes any scale."""
        kind = self.target.weights.embedding.kind
        values = rows.float() if kind == "float32" else rows.bfloat16()
        return self.ops.pack(values, None, kind, "plain")

    def _project(self, rows: Rows, h: Tensor, own: bool, table: Linear | None = None) -> Tensor:
        w = self.weights
        feedback = w.norm if own and self.spec.norm_output else None
        residual = self.spec.norm_before_residual
        norms = PairNorms(w.embedding_norm, w.hidden_norm, feedback, residual)
        tokens = rows.tokens.flatten() if rows.tokens.shape[1] > 1 else rows.tokens[:, 0]
        table = self.target.weights.embedding if table is None else table
        x = self.ops.pair(table, tokens, h, norms, w.qkv.kind)
        return self.ops.linear(x, w.qkv)

    def logits(self, h: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer -> [M, draft vocabulary] float32; h becomes the head's output."""
        w, ops = self.weights, self.ops
        x = ops.norm(h, Opening(w.post_norm, w.gate_up.kind), Closing(mixed))
        branch = ops.linear(ops.gated(x, w.gate_up, w.down.kind), w.down)
        x = ops.norm(h, Opening(w.norm, w.lm_head.kind), Closing(branch))
        return ops.head(x, w.lm_head, None)


def placed(head: Head, target: CudaTarget) -> HeadModel:
    """The head beside its target. Raises UserError, too where it has no room."""
    try:
        with catching_oom("the EAGLE-3 head beside the model"):
            return HeadModel(head, target)
    except MemoryError as problem:
        raise UserError(str(problem)) from problem


def need_bytes(spec: HeadSpec, shape: TargetShape) -> int:
    """What a head adds to a target's need: weights, K/V, what is pending of each slot, and the
    states that a verify, a prefill chunk and graphs of prompts bring along."""
    longest, slots = min(shape.max_len, spec.max_position), shape.slots
    own = shape.dtype if shape.dtype in KINDS else "fp8"  # as it is packed
    values = sum(prod(dims) for dims in tensors(spec).values())
    (layer,) = arch_of(spec).layers
    held = entries(layer, longest, slack_of(PIECE, PIECE)) * padded_head(spec.head_dim)
    states = (slots + 1 + bucket_of(slots)) * shape.width + shape.chunk + graphs_rows(shape)
    return LINEAR[own] * values + 2 * 2 * slots * spec.kv_heads * held + 4 * spec.features * states


def _ops(arch: Arch, target: CudaTarget, positions: int, kind: str) -> DraftOps:
    if isinstance(target.ops, Reference):
        return DraftReference(arch)
    dim = arch.layers[0].head_dim
    if padded_head(dim) not in HEADS or dim % 8 or arch.hidden > WIDEST:
        raise UserError(
            f"the kernels take EAGLE-3 heads of width up to {WIDEST} with attention heads padded "
            f"to 64, 128, 256 or 512, not {arch.hidden} with {dim}: use --backend jax"
        )
    return DraftKernels(arch, positions, {kind, "bf16"})


def place(head: Head, kind: str, ops: DraftOps, device: torch.device) -> HeadWeights:
    """A head's weights on the device, fused as they are read."""

    def vector(name: str) -> Tensor:
        return torch.from_numpy(head.weights[name]).float().to(device)

    def linear(*names: str, layout: str = "plain") -> Linear:
        with staging.aside():
            packed = pack(names, layout)
        return staging.settled(packed)

    def pack(names: tuple[str, ...], layout: str) -> Linear:
        values = torch.cat([torch.from_numpy(head.weights[name]).to(device) for name in names])
        if kind == "fp8":
            return ops.pack(*quantise_fp8(values), kind, layout)
        return ops.pack(values.bfloat16() if kind == "bf16" else values.float(), None, kind, layout)

    staging = Staging(str(device))
    spec, parts = head.spec, [f"fc_norm.{i}" for i in range(len(head.spec.layers))]
    norms = parts if spec.fc_norm else ["input_norm"] if spec.norm_before_fc else []
    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return HeadWeights(
        fc=linear("fc"),
        qkv=linear(*attention),
        o=linear("self_attn.o_proj", layout="row_parallel"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", layout="gated"),
        down=linear("mlp.down_proj", layout="row_parallel"),
        lm_head=linear("lm_head"),
        features_norm=torch.cat([vector(name) for name in norms]) if norms else None,
        norm_parts=max(1, len(norms)),
        embedding_norm=vector("input_layernorm"),
        hidden_norm=vector("hidden_norm"),
        post_norm=vector("post_attention_layernorm"),
        norm=vector("norm"),
    )
