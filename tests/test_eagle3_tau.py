"""What training simulates comes true: mini's head on the engine's own answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.jax.head import place
from specdec.core.types import Sequence
from targets import mini
from targets.tokenizer import load_tokenizer
from training.packing import PackedRows, pack
from training.real_acceptance import Live, tau_of
from training.teacher import load_teacher, teach
from training.unroll import judge, simulated

K = 4
NAMES = "add", "mean", "is_prime", "reverse", "split_words", "read_json"
TEXTS = [f"def {name}({given}):\n" for name in NAMES for given in ("x", "items, limit=3")]


def rows_of(seqs: list[Sequence]) -> PackedRows:
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
    head = load_head(embedded.path("mini-eagle3"), arch)
    weights, ids = place(head, jnp.float32)
    tokenizer = load_tokenizer(path, arch.vocab)
    prompts, stops = [tokenizer.encode(text) for text in TEXTS], tuple(tokenizer.stop_ids)
    suppressed = tokenizer.suppress_ids
    live = Live(params, arch, head.spec, head.target_ids, prompts, K, stops, suppressed)
    live.draft_by(weights)

    @jax.jit
    def simulate(params, weights, rows: PackedRows):
        lesson = teach(params, arch, head.spec.layers, ids, suppressed, rows)
        table = params.top["embed_tokens"]
        judged = judge(weights, head.spec, table, ids, rows, lesson, K)
        keys = jax.random.split(jax.random.key(0), 16)
        return jax.vmap(lambda key: simulated(judged, key))(keys)

    for temperature, name in ((0.0, "tau_t0"), (1.0, "tau_t1")):
        seqs = live.decode(temperature)
        found = np.mean(simulate(params, weights, rows_of(seqs))[name])
        assert found == pytest.approx(tau_of(seqs), rel=0.05)
