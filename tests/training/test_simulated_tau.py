"""What training simulates comes true: mini's own drafters, on the engine's own answers.

And what only the loop can do wrong, a state that is not the last one's, shows there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.assistant import embedded as embedded_assistants
from drafters.assistant.files import load_assistant
from drafters.assistant.jax import draft as assistant_drafting
from drafters.eagle3 import embedded as embedded_heads
from drafters.eagle3.files import load_head
from drafters.eagle3.jax.head import place
from specdec.core.types import Sequence
from targets import mini
from targets.arch import Arch
from targets.tokenizer import load_tokenizer
from tests.support import cheap
from training.heads import AnySpec, Weights, head_of
from training.packing import PackedRows, pack
from training.real_acceptance import Live, tau_of
from training.teacher import load_teacher, teach
from training.unroll import judge, simulated

K = 4
NAMES = "add", "mean", "is_prime", "reverse", "split_words", "read_json"
TEXTS = [f"def {name}({given}):\n" for name in NAMES for given in ("x", "items, limit=3")]
FLOORS = {"eagle3": 2.4, "assistant": 2.6}
"""Of tau at T = 1: what comes with mini must be worth its cycles."""


class Shipped(NamedTuple):
    spec: AnySpec
    weights: Weights
    ids: np.ndarray


def head_for(arch: Arch) -> Shipped:
    head = load_head(embedded_heads.path("mini-eagle3"), arch)
    return Shipped(head.spec, place(head, jnp.float32)[0], head.target_ids)


def assistant_for(arch: Arch) -> Shipped:
    assistant = load_assistant(embedded_assistants.path("mini-assistant"), arch)
    weights = {n: jnp.asarray(v, jnp.float32) for n, v in assistant.weights.items()}
    return Shipped(assistant.spec, weights, np.arange(arch.vocab))


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


@cache
def teacher() -> tuple[Any, Arch]:
    return load_teacher(mini.path("mini"))


@cache
def greedy_by(shipped_for: Callable[[Arch], Shipped]) -> list[Sequence]:
    """Greedy answers, drafted without a mistake."""
    params, arch = teacher()
    return live_with(shipped_for(arch), params, arch)[0].decode(0.0)


def live_with(shipped: Shipped, params: Any, arch: Arch) -> tuple[Live, tuple[int, ...]]:
    """The engine drafting with these weights, and the suppressed ids."""
    tokenizer = load_tokenizer(mini.path("mini"), arch.vocab)
    prompts, stops = [tokenizer.encode(text) for text in TEXTS], tuple(tokenizer.stop_ids)
    suppressed = tokenizer.suppress_ids
    live = Live(params, arch, shipped.spec, shipped.ids, prompts, K, stops, suppressed)
    live.draft_by(shipped.weights)
    return live, suppressed


@pytest.mark.parametrize(
    ("name", "shipped_for"),
    [("eagle3", head_for), pytest.param("assistant", assistant_for, marks=pytest.mark.slow)],
)
def test_simulated_tau_is_what_the_engine_measures(
    name: str, shipped_for: Callable[[Arch], Shipped]
) -> None:
    """At T = 1 and on greedy answers, within 5 %; a limit of TOKENS cuts the last cycles short."""
    params, arch = teacher()
    shipped = shipped_for(arch)
    live, suppressed = live_with(shipped, params, arch)
    head, ids = head_of(shipped.spec), jnp.asarray(shipped.ids)

    # the engine's programs are those that users have; this one only has to agree within 5 %
    @partial(jax.jit, compiler_options=cheap.OPTIONS)
    def simulate(params, weights, rows: PackedRows):
        lesson = teach(params, arch, head.layers, ids, suppressed, rows, head.lenders)
        table = params.top["embed_tokens"]
        judged = judge(weights, shipped.spec, table, ids, rows, lesson, K)
        keys = jax.random.split(jax.random.key(0), 16)
        return jax.vmap(lambda key: simulated(judged, key))(keys)

    for seqs, field in ((greedy_by(shipped_for), "tau_t0"), (live.decode(1.0), "tau_t1")):
        found = np.mean(simulate(params, shipped.weights, rows_of(seqs))[field])
        assert found == pytest.approx(tau_of(seqs), rel=0.05)
        assert tau_of(seqs) > FLOORS[name]


def stale(learn, seed, features, chosen, accepted, live):
    """The prompt's state, ever after."""
    return learn(seed, features, chosen, accepted, live).replace(state=seed.state)


def of_the_first_row(learn, seed, features, chosen, accepted, live):
    """As if no guess had been accepted."""
    right = learn(seed, features, chosen, accepted, live)
    return right.replace(state=learn(seed, features, chosen, 0 * accepted, live).state)


def of_the_row_after(learn, seed, features, chosen, accepted, live):
    """The state that the last token made, which no guess may come from."""
    right = learn(seed, features, chosen, accepted, live)
    after = learn(seed, features, chosen, (accepted + 1).clip(0, K), live)
    return right.replace(state=after.state)


@pytest.mark.parametrize(
    ("mistake", "at_most"),
    [
        (stale, 0.85),
        pytest.param(of_the_first_row, 0.9, marks=pytest.mark.slow),
        pytest.param(of_the_row_after, 0.98, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("traced_anew")
def test_a_wrong_state_costs_an_assistant_its_tau(mistake, at_most, monkeypatch) -> None:
    """A loop that passes on a wrong state doesn't change texts, only tau; test_assistant_drafter.py
    detects it by the guesses too."""
    params, arch = teacher()
    right = greedy_by(assistant_for)
    jax.clear_caches()  # its programs have no mistake
    learn = partial(mistake, assistant_drafting.learn)
    monkeypatch.setattr(assistant_drafting, "learn", learn)
    wrong = live_with(assistant_for(arch), params, arch)[0].decode(0.0)
    assert [seq.tokens for seq in wrong] == [seq.tokens for seq in right]
    assert tau_of(wrong) < at_most * tau_of(right)
