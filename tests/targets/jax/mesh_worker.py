"""Run by test_mesh.py on eight forced host devices: every tiny variant's text by split and loop.

`python -m tests.targets.jax.mesh_worker ROOT` writes checkpoints there and prints one JSON line
per variant and split. What takes time is compiling, so the variants have two groups of two layers
here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.none.jax import TracedNone
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from targets.jax import kv_exchange
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, load_target
from targets.jax.target import JaxTarget
from tests.support.assistants import assistant_for
from tests.support.tiny import VARIANTS, write_tiny

SPLITS = (1, 2, 4, 8)
"""Of the 31B; each of the others adds a way of splitting, not a number."""
END_SPLITS = (1, 2, 8)
EXPERTS_SPLITS = (1, 8)
"""test_random_mesh.py has their two."""
K = 4
NARROW = "31b in int8"
SPLIT_OR_NOT = (
    "mlp.gate_proj",
    "self_attn.k_proj",
    "input_layernorm",
    "experts.gate_up_proj",
    "experts.down_proj",
    "per_layer_model_projection",
)
"""Tensors of which the parts are counted."""
LAYERS = ["sliding_attention", "full_attention"] * 2


def texts(target: JaxTarget, drafter, cycle) -> list[list[int]]:
    """Decode a sampled and a greedy row together. The sampled one joins first and ends last, so
    that the device loop needs one program, the one with the sampler."""
    seeded = Sampling(temperature=0.8, top_p=0.9, seed=7)
    seqs = [Sequence([9, 4], seeded, max_tokens=24), Sequence([5, 6, 7] * 4, max_tokens=16)]
    Engine(target, drafter, cycle).run_to_end(seqs)
    return [seq.tokens for seq in seqs]


def every_way(target: JaxTarget, device: bool, thorough: bool) -> dict[str, list[list[int]]]:
    """By drafter and loop. device: the device loop with ngram too; thorough: and with none."""
    none, ngram = NoDrafter(), NgramDrafter(1, 3)
    ways = {
        "none host": texts(target, none, host_cycle(target, none, 0)),
        "ngram host": texts(target, ngram, host_cycle(target, ngram, K)),
    }
    if device:
        traced = TextDrafter(TracedLookup(1, 3))
        ways["ngram device"] = texts(target, none, device_loop(target, traced, K))
    if thorough:
        ways["none device"] = texts(target, none, device_loop(target, TextDrafter(TracedNone()), 0))
    return ways


def main(root: Path, variants: list[str]) -> None:
    for variant in variants:
        config = VARIANTS[variant]
        shared = {"num_kv_shared_layers": 2} if "num_kv_shared_layers" in config else {}
        config |= {"layer_types": LAYERS} | shared
        write_tiny(root / variant, variant)
        for tp in splits_of(variant):
            features = (len(LAYERS) - 1,) if variant == "31b" else ()
            options = JaxOptions(slots=2, max_len=64, k=K, tp=tp, mapped=False, chunk=8)
            target = load_target(root / variant, replace(options, features=features))
            found = target.params.segments[0][0] | target.params.top
            parts = {name: split_in(found[name]) for name in SPLIT_OR_NOT if name in found}
            thorough = variant == "31b"
            ends = tp == SPLITS[-1] or (thorough and tp == SPLITS[0])
            ways = every_way(target, ends, thorough and tp == SPLITS[-1])
            line = {"variant": variant, "tp": tp, "parts": parts, "texts": ways}
            if features and tp in (SPLITS[0], SPLITS[-1]):
                line["guesses"] = guesses(target, root / variant)
            print(json.dumps(line), flush=True)
    if "31b" in variants:
        in_blocks_of_int8(root / "31b")


def guesses(target: JaxTarget, path: Path) -> list[int]:
    """An assistant's guesses. It has half as many query heads as the target: with as many devices,
    more copies of a K/V head are cached than are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS["31b"], "num_attention_heads", 4)
        assistant = assistant_for(path, "31b")
    drafter = HostHead(AssistantDraftHead(PlacedAssistant(assistant, target, 1, False, False)))
    seq = Sequence([9, 4, 7, 5, 8, 6], Sampling(0.8, seed=7), slot=0)
    step = target.prefill(seq, 0, seq.prompt_len)
    drafter.prefill(seq, 0, seq.prompt_len, step)
    seq.tokens.append(int(step.chosen[0, 0]))
    return drafter.propose([seq], K).tokens[0].tolist()


def splits_of(variant: str) -> tuple[int, ...]:
    return {"31b": SPLITS, "26b-a4b": EXPERTS_SPLITS}.get(variant, END_SPLITS)


def split_in(weight: Any) -> int:
    """How many different parts of it the devices hold."""
    (array,) = jax.tree.leaves(weight)
    return len({str(shard.index) for shard in array.addressable_shards})


def in_blocks_of_int8(path: Path) -> None:
    """Keys and values in int8, caches of 96 entries in three blocks."""
    kv_exchange.BLOCK = 32
    for tp in (SPLITS[0], SPLITS[-1]):
        options = JaxOptions(slots=2, max_len=64, k=K, tp=tp, mapped=False, chunk=8)
        target = load_target(path, replace(options, kv_dtype="int8"))
        ways = every_way(target, device=tp > 1, thorough=False)
        print(json.dumps({"variant": NARROW, "tp": tp, "texts": ways}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
