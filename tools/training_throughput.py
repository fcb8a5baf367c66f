"""Tokens per second of training a head: random weights of true sizes, real steps.

`python -m tools.training_throughput configs/eagle3-31b.toml --target gemma-4-31b --teacher
gemma-4-e4b --out FILE`. A teacher that is not the head's own target (31B does not fit beside its
head and the optimizer) teaches with its own features, repeated to the width that the head reads;
the head is fed from a table of the target's size.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle3.spec import default_layers
from specdec.core.provenance import run_record
from targets.arch import Arch, released
from targets.jax.blank_params import init_params
from targets.jax.params import Params
from training.heads import Origin
from training.packing import PackedRows
from training.recipe import Recipe, read_recipe, spec_for
from training.teacher import TeacherOutput, teach
from training.trainer import initial_state, make_step

WARM = 2
"""Steps before those that count."""
STOP = 1


class Pair(NamedTuple):
    """What a step is given as the target's parameters: `top` is what the head is fed from."""

    top: dict[str, Any]
    teacher: Params


def measure(recipe: Recipe, target: Arch, teacher: Arch, steps: int) -> dict[str, Any]:
    """Train `steps` steps on random tokens, two documents a row, in bfloat16."""
    spec = spec_for(target, recipe.head, [STOP])
    ids = np.arange(spec.draft_vocab) * (target.vocab // spec.draft_vocab)
    draft_ids = jnp.asarray(ids)
    table = np.resize(_normal(1_000_003), (target.vocab, target.hidden))
    norm = np.ones(target.hidden, np.float32)
    state = initial_state(spec, recipe, Origin(table, norm), ids)
    weights = init_params(teacher, jax.random.key(0), jnp.bfloat16)
    params: Any = Pair({"embed_tokens": jnp.asarray(table, jnp.bfloat16)}, weights)
    layers = default_layers(len(teacher.layers))

    def lesson(params: Any, rows: PackedRows) -> TeacherOutput:
        heard = teach(params.teacher, teacher, layers, draft_ids, (), rows)
        times = -(-spec.features // heard.features.shape[-1])
        wide = jnp.tile(heard.features, times)[..., : spec.features]
        return heard._replace(features=wide)

    step, seconds = make_step(spec, recipe, lesson, draft_ids), []
    parameters = sum(leaf.size for leaf in state.weights.values())
    for number in range(WARM + steps):
        rows = _rows(recipe, min(target.vocab, teacher.vocab), number)
        begun = time.perf_counter()
        state, found = step(state, params, rows)
        float(found["loss"])  # waits for the device
        seconds.append(time.perf_counter() - begun)
    tokens = recipe.batch * recipe.length
    return {
        "head_parameters": parameters,
        "batch": recipe.batch,
        "length": recipe.length,
        "unroll": recipe.unroll,
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[WARM:],
        "tokens_per_second": tokens / statistics.median(seconds[WARM:]),
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _normal(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, np.float32)


def _rows(recipe: Recipe, vocab: int, seed: int) -> PackedRows:
    shape = recipe.batch, recipe.length
    tokens = np.random.default_rng(seed).integers(STOP + 1, vocab, shape, np.int32)
    documents = np.broadcast_to(
        np.arange(recipe.length, dtype=np.int32) * 2 // recipe.length, shape
    )
    return PackedRows(tokens, documents, np.ones(shape, bool), np.zeros(shape, bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--target", default="gemma-4-31b", help="model that the head is for")
    parser.add_argument("--teacher", default="gemma-4-e4b", help="model that is the teacher")
    parser.add_argument("--batch", type=int, help="rows a step, instead of the recipe's")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    recipe = replace(recipe, batch=options.batch or recipe.batch)
    target, teacher = released(options.target), released(options.teacher)
    found = measure(recipe, target, teacher, options.steps)
    named = {"target": options.target, "teacher": options.teacher}
    record = run_record(jax.devices()[0].device_kind, **named, **found)
    options.out.write_text(json.dumps(record, indent=1))
    print(f"{found['tokens_per_second']:,.0f} tokens/s")


if __name__ == "__main__":
    main()
