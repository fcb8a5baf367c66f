"""Tensor parallelism on eight forced host devices: the same model, split, gives the same text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from tempfile import TemporaryDirectory

import pytest

from tests.support import cheap
from tests.support.tiny import VARIANTS, config_of
from tests.targets.jax.mesh_worker import NARROW, SPLITS, splits_of

FLAGS = f"--xla_force_host_platform_device_count=8 {cheap.FLAGS}"


DEFAULT = ("31b", "26b-a4b", "e4b")
"""Dense, with experts, with per-layer inputs and shared K/V; the others are built of the same."""
EACH = [pytest.param(v, marks=() if v in DEFAULT else pytest.mark.slow) for v in VARIANTS]


@cache
def worked(variants: tuple[str, ...]) -> dict:
    """The worker's output by variant and split. One process for all, as jax is started once."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.targets.jax.mesh_worker", folder, *variants],
            env=os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        (line["variant"], line["tp"]): line
        for line in map(json.loads, done.stdout.split("\n")[:-1])
    }


@pytest.fixture
def lines(request) -> dict:
    """The worker's lines of this test's variant, and of those that are run with it."""
    variant = getattr(request.node, "callspec", None) and request.node.callspec.params["variant"]
    others = tuple(v for v in VARIANTS if v not in DEFAULT)
    return worked(others if variant in others else DEFAULT)


@pytest.mark.parametrize("variant", EACH)
def test_any_split_drafter_and_loop_gives_the_same_text(lines, variant):
    plain = lines[variant, 1]["texts"]["none host"]
    assert [len(tokens) for tokens in plain] == [26, 28]
    for tp in splits_of(variant):
        for way, tokens in lines[variant, tp]["texts"].items():
            assert tokens == plain, (tp, way)


@pytest.mark.parametrize("variant", EACH)
def test_what_divides_is_split_and_the_rest_is_copied(lines, variant):
    kv_heads = config_of(variant)["text_config"]["num_key_value_heads"]
    for tp in splits_of(variant):
        parts = lines[variant, tp]["parts"]
        whole = tp if kv_heads % tp == 0 else 1
        expected = {"mlp.gate_proj": tp, "self_attn.k_proj": whole, "input_layernorm": 1}
        if variant == "26b-a4b":
            expected |= {"experts.gate_up_proj": tp, "experts.down_proj": tp}
        if variant in ("e4b", "e2b"):
            expected |= {"per_layer_model_projection": tp}
        assert parts == expected


def test_an_assistant_guesses_the_same_of_a_split_cache(lines):
    whole, split = (lines["31b", tp]["guesses"] for tp in (SPLITS[0], SPLITS[-1]))
    assert whole == split and min(whole) >= 0


def test_a_split_in_blocks_of_int8_gives_the_same_text(lines):
    plain = lines[NARROW, 1]["texts"]["none host"]
    for tp in (SPLITS[0], SPLITS[-1]):
        assert all(tokens == plain for tokens in lines[NARROW, tp]["texts"].values()), tp
