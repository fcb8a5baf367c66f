"""Targets on a GPU that feed a head, the head that they feed, and what a slot holds."""

from __future__ import annotations

from functools import cache

import torch

from drafters.eagle3.spec import HeadSpec
from targets import mini
from targets.cuda.cache import read
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget

SPEC = HeadSpec(
    hidden=256,
    ffw=320,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=4096,
    draft_vocab=1000,
    layers=(1, 5, 8),
    max_position=4096,
)
MAX_LEN = 512


@cache
def target_of(kind, slots, graphs=True, features=SPEC.layers, max_len=MAX_LEN, name="mini"):
    dtype, kv_dtype = kind
    options = CudaOptions(
        slots=slots,
        max_len=max_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        graphs=graphs,
        features=features,
    )
    return load_target(mini.path(name), options)


def table_of(target: CudaTarget) -> torch.Tensor:
    """The embedding [vocab, hidden] bfloat16 as its kernels read it, before they scale it."""
    arch = target.arch
    tokens = torch.arange(arch.vocab, device="cuda").int()[:, None]
    nowhere = torch.zeros(arch.vocab, device="cuda").int()
    h = target.ops.embed(target.weights.embedding, Rows(tokens, nowhere, nowhere))
    return (h / torch.tensor(arch.hidden**0.5).bfloat16().item()).bfloat16()


def stored(target: CudaTarget, slot: int, stop: int, start: int = 0) -> list[torch.Tensor]:
    """Keys and values of all layers that tokens behind `stop` see, from position `start` on."""
    kept = []
    for spec, layer in zip(target.arch.layers, target.cache.layers, strict=True):
        if layer is not None:
            kept += read(layer, slot, max(start, stop - (spec.window or stop)), stop)
    return [part.float() for part in kept]
