"""A small EAGLE-3 training on a random target. Run as a program, it kills itself (SIGKILL):

python -m tests.support.eagle3_worker RUN N: after N steps are saved and a few more are done.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.frequency import draft_vocabulary
from targets.arch import Arch, parse_arch
from targets.jax.params import Params, build
from targets.tensors import TensorSpec
from tests.support.tiny import VOCAB, config_of
from training.feature_cache import CacheLayout, FeatureCache, Read, joined, with_states
from training.packing import PackedRows, pack
from training.recipe import HeadShape, Rates, Recipe, spec_for
from training.teacher import TeacherOutput, read, teach
from training.trainer import Trainer
from training.vocabulary import count_generated

SHAPE = HeadShape(ffw=64, heads=4, kv_heads=2, head_dim=16, draft_vocab=200, max_position=512)
RECIPE = Recipe(
    seed=3,
    steps=20,
    batch=4,
    length=32,
    unroll=2,
    decay=0.8,
    heldout_share=0.2,
    live_prompts=2,
    evaluate_every=10,
    save_every=10,
    head=SHAPE,
    rates=Rates(learning_rate=3e-3, warmup_steps=5, clip=1.0),
)
STOPS = (1, 16)


@cache
def target() -> tuple[Params, Arch]:
    """A random one, the same for all, as `init_params` makes it but drawn by numpy: each shape
    that JAX draws is a program to compile."""
    arch, random = parse_arch(config_of("12b")), np.random.default_rng(0)

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> jax.Array:
        shape = ((len(names),) if stacked else ()) + spec.shape
        if len(spec.shape) == 1:
            return jnp.asarray(np.ones(shape, np.float32))
        drawn = random.standard_normal(shape, np.float32)
        return jnp.asarray(drawn * np.float32(shape[-1] ** -0.5))

    return build(arch, leaf), arch


def answers(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Made-up answers of 6 to 30 tokens."""
    random, made = np.random.default_rng(seed), []
    for _ in range(count):
        size, prompt = int(random.integers(6, 31)), int(random.integers(1, 5))
        ids = random.integers(2, VOCAB, size).tolist()
        finish = "stop" if random.random() < 0.5 else "length"
        if finish == "stop":
            ids[-1] = 1
        mask = [i >= prompt for i in range(size)]
        made.append({"input_ids": ids, "gen_mask": mask, "finish": finish})
    return made


def trainer(
    run: Path,
    wrap=lambda teach: teach,
    recipe: Recipe = RECIPE,
    devices: int = 1,
    cache: Path | None = None,
) -> Trainer:
    """wrap: changes the teacher (negative controls). cache: of its states."""
    params, arch = target()
    spec = spec_for(arch, recipe.head, STOPS)
    rows: PackedRows = pack(answers(60), recipe.length)
    ids = draft_vocabulary(count_generated(rows, VOCAB), recipe.head.draft_vocab, STOPS)
    teacher = wrap(partial(_teach, arch, spec.layers, jnp.asarray(ids)))
    run.mkdir(parents=True, exist_ok=True)
    kept = pack(answers(12, 1), 32)
    if cache is not None:
        features = cache_of(cache, joined(rows, kept), spec.layers)
        features.build(reader(spec.layers), recipe.batch)
        rows, kept = with_states(features, rows, kept)
    return Trainer(recipe, spec, run, params, teacher, rows, kept, ids, devices=devices)


def reader(layers: tuple[int, ...]) -> Read:
    """The random target's forward."""
    params, arch = target()
    return partial(jax.jit(lambda params, *rows: read(params, arch, layers, *rows)), params)


def cache_of(folder: Path, rows: PackedRows, layers: tuple[int, ...], **facts: Any) -> FeatureCache:
    hidden = target()[1].hidden
    layout = CacheLayout(*rows.tokens.shape, len(layers) * hidden, hidden, "float32")
    return FeatureCache(folder, rows, layout, {"target": "x", "layers": layers} | facts)


def _teach(arch, layers, ids, params, rows):
    return teach(params, arch, layers, ids, (), rows)


def made_up(teach):
    """A teacher with distributions that depend only on the features of the position before."""
    ids = teach.args[-1]

    def lesson(params, rows):
        key = jax.random.fold_in(jax.random.key(0), rows.tokens.sum())
        features = jax.random.normal(key, (*rows.tokens.shape, 3 * params.top["norm"].shape[0]))
        meaning = jax.random.normal(jax.random.key(1), (4, SHAPE.draft_vocab)) * 3
        logits = jnp.roll(features[..., :4] @ meaning, 1, 1)
        total = jax.nn.logsumexp(logits, -1)
        return TeacherOutput(features, logits, total, ids[logits.argmax(-1)])

    return lesson


def main() -> None:
    after = int(sys.argv[2])

    def die(row: dict[str, Any]) -> None:
        if row["step"] > after:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer(Path(sys.argv[1])).train(20, die)


if __name__ == "__main__":
    main()
