"""The default context and memory plans: what fits is known before anything is loaded. And the host
memory that kept prompts may take."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from specdec.assembly.model import random_model
from specdec.assembly.prefix import host_budget
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets.arch import parse_arch, released
from targets.backend import TargetRequest
from targets.cuda.backend import CudaBackend
from targets.jax import memory
from targets.jax.backend import JaxBackend
from targets.jax.cache import entries, key_dims
from targets.jax.load import JaxOptions, make_plan, random_target
from targets.memory import MOST_CONTEXT, Need, default_context, host_free, host_total
from tests.support.tiny import config_of

GB = 10**9
GIB = 1 << 30


def needs(context: int) -> Need:
    """1 MB per token beside 20 GB."""
    return Need(18 * GB, context * 10**6, 2 * GB)


@pytest.mark.parametrize(
    ("limit", "free", "context"),
    [
        (131_072, 1000 * GB, MOST_CONTEXT),
        (4096, 1000 * GB, 4096),
        (131_072, None, MOST_CONTEXT),
        (131_072, 58 * GB, 27 * 1024),  # three quarters of 40 GB, less 2 GB of workspace
        (131_072, 21 * GB, 1024),  # the check of the plan refuses it
        (512, 21 * GB, 512),
    ],
)
def test_the_default_context_leaves_a_quarter_to_prefixes(limit, free, context):
    assert default_context(limit, free, needs) == context
    if free is not None and context > 1024:
        room = free - needs(context).weights
        assert needs(context).cache + needs(context).workspace <= 3 * room / 4


@pytest.mark.parametrize("backend", [JaxBackend(), CudaBackend()], ids=["jax", "cuda"])
def test_backends_find_a_context_that_fits(monkeypatch, backend):
    device = "cpu" if isinstance(backend, CudaBackend) else None
    config, arch = ModelConfig(device=device), released("gemma-4-e2b")
    for free in (30 * GB, 40 * GB):
        monkeypatch.setattr("targets.memory.host_free", lambda own=free: own)
        monkeypatch.setattr("targets.jax.memory.host_free", lambda own=free: own)
        found = backend.context(arch, None, config, TargetRequest(k=4))
        assert 1024 <= found <= MOST_CONTEXT and found % 1024 == 0
    assert found == MOST_CONTEXT


def test_a_model_that_does_not_fit_is_one_line(monkeypatch):
    monkeypatch.setattr("targets.jax.memory.host_free", lambda: 20 * GB)
    with pytest.raises(UserError) as refusal:
        random_model("gemma-4-e4b", ModelConfig(), SpeculationConfig(drafter="none"))
    message = str(refusal.value)
    assert "\n" not in message
    assert all(part in message for part in ("weights", "are free", "--dtype int4")), message
    monkeypatch.setattr("targets.jax.memory.host_free", lambda: 24 * GB)
    with pytest.raises(UserError, match="smaller model .*gemma-4-e2b"):
        random_model("gemma-4-e4b", ModelConfig(), SpeculationConfig(drafter="none"))


def test_the_plan_counts_what_is_allocated():
    arch = parse_arch(config_of("31b"))
    options = JaxOptions(slots=2, max_len=256)
    target = random_target(arch, options)
    needed = memory.need(arch, options, None)(256)
    assert needed.weights == held(target.params)
    assert needed.cache == held(target.cache.layers)


@pytest.mark.parametrize(
    ("model", "tp", "sliding", "whole"),
    [
        ("gemma-4-31b", 8, 2, 1),  # of 16 and 4 heads: the 4 are stored once a device
        ("gemma-4-26b-a4b", 4, 2, 1),  # of 8 and 2
        ("gemma-4-31b", 4, 4, 1),
        ("gemma-4-31b", 3, 16, 4),  # nothing divides: all on each
    ],
)
def test_a_split_cache_is_counted_as_each_device_holds_it(monkeypatch, model, tp, sliding, whole):
    """sliding, whole: K/V heads of a sliding and of a global layer on one device."""
    arch, mesh = released(model), jax.sharding.AbstractMesh((tp,), ("tp",))
    monkeypatch.setattr("targets.jax.memory.make_mesh", lambda tp: mesh)
    options = JaxOptions(slots=2, max_len=4096, tp=tp, dtype="bfloat16")
    slack = make_plan(arch, options).slack
    heads = (sliding if layer.window else whole for layer in arch.layers)
    expected = sum(
        2 * 2 * entries(layer, 4096, slack) * n * (key_dims(layer) + layer.head_dim)
        for layer, n in zip(arch.layers, heads, strict=True)
    )
    assert memory.need(arch, options, None)(4096).cache == expected


def in_container(monkeypatch, folder, limit, used, files=0):
    """Of so many bytes, of which `used` are taken, `files` of them by files that were read."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    kinds = f"anon {used - files}\nfile {files}\ninactive_file {files - 1}\nactive_file 1\n"
    (folder / "memory.stat").write_text(kinds if files else "anon 0\n")
    monkeypatch.setattr("targets.memory.CGROUP", folder)
    monkeypatch.setattr("targets.memory._available", lambda: 200 * GIB)
    monkeypatch.setattr("os.sysconf", lambda name: 2**19)


@pytest.mark.parametrize(
    ("limit", "used", "files", "budget", "words"),
    [
        (2 * GIB, GIB + 2, 0, GIB // 2 - (64 << 20), "half of what is free"),
        (2 * GIB, GIB, GIB, GIB // 2, "a quarter of all"),  # files give way
        (6 * GIB, 5 * GIB, 0, GIB // 2, "half of what is free"),
        ("max", 100 * GIB, 0, 8 * GIB, "default"),
    ],
)
def test_kept_prompts_stay_within_the_container(
    monkeypatch, tmp_path, limit, used, files, budget, words
):
    in_container(monkeypatch, tmp_path, limit, used, files)
    assert host_budget(PrefixConfig()) == (budget, words)
    assert host_budget(PrefixConfig(cache_ram=3)) == (3 * GIB, "as asked")


def test_a_container_counts_in_the_host_s_memory(monkeypatch, tmp_path):
    in_container(monkeypatch, tmp_path, 6 * GIB, 5 * GIB, 2 * GIB)
    assert (host_free(), host_total()) == (3 * GIB, 6 * GIB)
    monkeypatch.setattr("targets.memory.CGROUP", tmp_path / "none")
    assert (host_free(), host_total()) == (200 * GIB, 256 * GIB)


def held(tree: Any) -> int:
    """Bytes of its arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
