"""What training simulates comes true: mini's head on the engine's own answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from specdec.stats import Acceptance
from specdec.types import Sampling, Sequence
from targets import mini
from targets.tokenizer import load_tokenizer
from training.live import TOKENS, Live
from training.packing import Rows, pack
from training.teacher import load_teacher, teach
from training.unroll import judge, simulated

K = 4
NAMES = "add", "mean", "is_prime", "reverse", "split_words", "read_json"
TEXTS = [f"def {name}({given}):\n" for name in NAMES for given in ("x", "items, limit=3")]


def answered(live: Live, temperature: float) -> tuple[list[Sequence], float]:
    seqs = [
        Sequence(list(prompt), Sampling(temperature, seed=i), TOKENS, live.stop_ids)
        for i, prompt in enumerate(live.prompts)
    ]
    live.engine.run_to_end(seqs)
    total = Acceptance()
    for seq in seqs:
        total.merge(seq.acceptance)
    return seqs, total.tau


def rows_of(seqs: list[Sequence]) -> Rows:
    made = [
        {
            "input_ids": seq.tokens,
            "gen_mask": [at >= seq.prompt_len for at in range(len(seq.tokens))],
            "finish": seq.finish,
        }
        for seq in seqs
    ]
    return pack(made, 256)


def test_simulated_tau_is_what_the_engine_measures() -> None:
    """At T = 1 and on greedy answers, within 5 %; a limit of TOKENS cuts the last cycles short."""
    path = mini.path("mini")
    params, arch = load_teacher(path)
    head, tokenizer = (
        load_head(embedded.path("mini-eagle3"), arch),
        load_tokenizer(path, arch.vocab),
    )
    ids, weights = (
        jnp.asarray(head.target_ids),
        {name: jnp.asarray(x, jnp.float32) for name, x in head.weights.items()},
    )
    prompts, stops = [tokenizer.encode(text) for text in TEXTS], tuple(tokenizer.stop_ids)
    suppressed = tokenizer.suppress_ids
    live = Live(params, arch, head.spec, head.target_ids, prompts, K, stops, suppressed)
    live.drafter.head = weights

    @jax.jit
    def simulate(rows: Rows):
        lesson = teach(params, arch, head.spec.layers, ids, suppressed, rows)
        table = params.top["embed_tokens"]
        judged = judge(weights, head.spec, table, ids, rows, lesson, K)
        keys = jax.random.split(jax.random.key(0), 16)
        return jax.vmap(lambda key: simulated(judged, key))(keys)

    for temperature, name in ((0.0, "tau_t0"), (1.0, "tau_t1")):
        seqs, real = answered(live, temperature)
        found = np.mean(simulate(rows_of(seqs))[name])
        assert found == pytest.approx(real, rel=0.05)
