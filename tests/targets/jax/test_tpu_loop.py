"""The device loop compiled for TPUs that are not there, with each drafter at its true size: it
fits, and no cache is copied. Run with: pytest -m tpu (libtpu)."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from drafters.eagle3.jax import draft as eagle3
from drafters.eagle3.jax.head import DraftCache, sharding_of
from drafters.eagle3.spec import sized, tensors
from drafters.lookup.jax import TracedLookup
from drafters.model.host import CATCH_UP
from drafters.model.jax import ModelInputs, ModelProgram
from targets.arch import released
from targets.jax.aot import shapes, topology_mesh
from targets.jax.device_drafter import SlotState, TextDrafter
from targets.jax.device_loop import (
    CYCLES,
    STOPS,
    Limits,
    LoopInputs,
    LoopPlan,
    LoopState,
    run_cycles,
)
from targets.jax.estimate import chip_of
from targets.jax.load import JaxOptions, make_plan
from targets.jax.placing import by_vocabulary, replicated
from targets.sampling_params import SamplingTable, blank_table

pytestmark = pytest.mark.tpu
TOPOLOGY = "v6e:2x2x1"
ROWS = 8
CONTEXT = 2048
K = 7
READABLE = {
    "xla_tpu_enable_offloading_sort_to_sparsecore": False,
    "xla_tpu_enable_offloading_scatter_to_sparsecore": False,
    "xla_tpu_offload_gather_to_sparsecore": False,
}
"""jaxlib 0.10.2 cannot print programs of which parts run on the SparseCore."""


class Abstract:
    """Shapes in place of arrays, on the mesh."""

    def __init__(self, drafter: str) -> None:
        self.mesh, self.arch = topology_mesh(TOPOLOGY, 4), released("gemma-4-31b")
        head = sized(self.arch)
        features = head.layers if drafter == "eagle3" else ()
        options = JaxOptions(slots=ROWS, max_len=CONTEXT, k=K, mapped=False, features=features)
        self.plan = make_plan(self.arch, options)
        self.params, self.cache, _ = shapes(self.plan, jnp.bfloat16, jnp.bfloat16, True, self.mesh)
        split = by_vocabulary(self.mesh, 2, self.arch.vocab)
        self.bias = self.of((ROWS, self.arch.vocab), jnp.float32, split)
        self.sampling_params = SamplingTable(
            *(self.of(x.shape, x.dtype) for x in blank_table(ROWS))
        )
        make = {"ngram": self._ngram, "eagle3": partial(self._eagle3, head), "model": self._model}
        self.traced, self.weights, self.memory = make[drafter]()

    def of(self, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or replicated(self.mesh))

    def _ngram(self) -> tuple[Any, Any, Any]:
        return TextDrafter(TracedLookup(2, 5)).program(True), (), ()

    def _eagle3(self, spec) -> tuple[Any, Any, Any]:
        weights = {
            name: self.of(shape, jnp.bfloat16, sharding_of(name, spec, self.mesh))
            for name, shape in tensors(spec).items()
        }
        ids = self.of((spec.draft_vocab,), jnp.int32)
        table = self.params.top["embed_tokens"]
        given = eagle3.DraftInputs(weights, ids, table, self.bias, self.sampling_params)
        entries = self.of((ROWS, CONTEXT, spec.kv_heads * spec.head_dim), jnp.bfloat16)
        pending = eagle3.Pending(
            self.of((ROWS, K + 1, spec.features), jnp.bfloat16),
            self.of((ROWS, K + 1), jnp.int32),
            self.of((ROWS,), jnp.int32),
        )
        memory = eagle3.DraftState(DraftCache(entries, entries), pending)
        return eagle3.HeadProgram(spec, CONTEXT, True), given, memory

    def _model(self) -> tuple[Any, Any, Any]:
        options = JaxOptions(slots=ROWS, max_len=CONTEXT, width=CATCH_UP, mapped=False)
        plan = make_plan(released("gemma-4-e4b"), options)
        params, cache, _ = shapes(plan, jnp.bfloat16, jnp.bfloat16, True, self.mesh)
        return ModelProgram(plan, True), ModelInputs(params, self.bias, self.sampling_params), cache

    def compiled(self) -> Any:
        """The sampling loop as `device_loop` makes it."""
        whole = replicated(self.mesh)
        plan = LoopPlan(self.plan, self.traced, K, CYCLES, True, False)
        one = self.of((ROWS,), jnp.int32)
        stops = self.of((ROWS, STOPS), jnp.int32)
        limits = Limits(stops, one, self.of((), jnp.int32), one)
        given = LoopInputs(self.params, self.bias, self.sampling_params, self.weights, limits)
        state = SlotState(self.cache, one, self.of((ROWS,), jnp.bool_))
        loop = LoopState(state, self.memory, self.of((ROWS, K), jnp.int32))
        outs = (None, whole, whole)
        run = jax.jit(partial(run_cycles, plan), donate_argnums=1, out_shardings=outs)
        return run.lower(given, loop).compile(compiler_options=READABLE)

    def donated(self) -> list[Any]:
        """What the loop must update in place."""
        return jax.tree.leaves((self.cache, self.memory))


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "model"])
def test_the_loop_fits_and_copies_no_cache(drafter):
    pytest.importorskip("libtpu")
    given = Abstract(drafter)
    program = given.compiled()
    stats, parts = program.memory_analysis(), [_on_one_chip(leaf) for leaf in given.donated()]
    for name in ("argument", "alias", "temp"):
        print(f"{drafter}: {name} {getattr(stats, f'{name}_size_in_bytes') / 1e9:.3f} GB")
    assert stats.alias_size_in_bytes >= sum(size for _, size in parts)
    assert stats.argument_size_in_bytes + stats.temp_size_in_bytes < chip_of(TOPOLOGY).memory
    caches = {shape for shape, size in parts if size > 10e6}
    copies = [
        line.strip()[:160]
        for line in program.as_text().splitlines()
        if re.search(r"= \S+ copy(-start)?\(", line) and any(shape in line for shape in caches)
    ]
    assert caches and not copies, copies


def _on_one_chip(leaf: jax.ShapeDtypeStruct) -> tuple[str, int]:
    """An array's shape as HLO writes it, and its bytes."""
    assert leaf.sharding is not None
    shape = leaf.sharding.shard_shape(leaf.shape)
    kind = {"bfloat16": "bf16", "int32": "s32"}[leaf.dtype.name]
    return f"{kind}[{','.join(map(str, shape))}]", math.prod(shape) * leaf.dtype.itemsize
