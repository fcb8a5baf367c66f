"""The assistant's steps on the JAX target against transformers' own class: states and logits of
each, from caches of every kind; and each mistake that others made shows in these numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.assistant.jax import model as forward
from drafters.assistant.jax.drafter import PlacedAssistant
from drafters.assistant.spec import tensors
from targets.jax.cache import LayerCache, Rounded
from targets.jax.kv_view import KVView, entries_of, key_norm_of
from targets.jax.layers import rms_norm
from targets.jax.load import JaxOptions, load_target
from targets.jax.model import embed
from targets.jax.params import Quantized
from targets.model_folder import read_arch
from targets.stored import dequantise, quantise_int8
from tests.support.assistants import (
    STEPS,
    TOLERANCE,
    a_text,
    assistant_for,
    chain,
    read_all_but_the_last,
)

pytestmark = pytest.mark.usefixtures("cheap_programs")

TEXTS = [a_text(40, 1), a_text(27, 2)]
MAIN = ("31b", "e4b")
EACH = [
    pytest.param(v, marks=() if v in MAIN else pytest.mark.slow)
    for v in ("31b", "12b", "26b-a4b", "e4b", "e2b")
]


@cache
def target_of(path, kv_dtype=None):
    """A target that has read the texts, with the states before their last tokens."""
    options = JaxOptions(slots=2, max_len=64, k=7, chunk=8, kv_dtype=kv_dtype)
    last = len(read_arch(path).layers) - 1
    target = load_target(path, replace(options, features=(last,)))
    steps = read_all_but_the_last(target, TEXTS)
    return target, np.stack([np.asarray(step.features)[slot, 0] for slot, step in steps])


def steps_of(path, variant, tokens, ahead=1, kv_dtype=None, change=lambda given: given):
    """States [B, STEPS, H] and scores of each step, fed these tokens [B, STEPS]. change: of what
    the steps are given, as a mistake would."""
    target, states = target_of(path, kv_dtype)
    arch = target.arch
    placed = PlacedAssistant(assistant_for(path, variant), target, ahead, False, False)
    given = change(
        {
            "weights": placed.weights,
            "spec": placed.spec,
            "ahead": ahead,
            "last": jnp.array([len(text) - 2 for text in TEXTS]),
            "state": rms_norm(jnp.array(states), target.params.top["norm"], arch.eps),
            "embed": partial(embed, target.params, arch),
            "sources": [layer.kv_from for layer in placed.spec.arch.layers],
            "feedback": lambda y, handed: handed,
        }
    )
    view = KVView(given["last"], given["ahead"])
    donors = tuple(entries_of(arch, target.cache, i) for i in given["sources"])
    spec = given["spec"]
    made, scores, state = [], [], given["state"]
    for j in range(STEPS):
        embedded = given["embed"](tokens[:, j])
        y, handed, scored = one_step(
            spec, given["ahead"], given["weights"], view, donors, embedded, state
        )
        made.append(handed)
        scores.append(scored)
        state = given["feedback"](y, handed)
    return np.stack(made, 1), scores


@partial(jax.jit, static_argnums=(0, 1))
def one_step(spec, ahead, weights, view, donors, embedded, state):
    """One step, compiled once for all tests with the same shapes."""
    fed = embedded[:, None], state[:, None]
    y, handed = (rows[:, 0] for rows in forward.step(weights, spec, view, donors, ahead, *fed))
    return y, handed, forward.score(weights, spec, None, y)


def expected(variant, ahead=1, lent=(None, None)):
    return [
        chain(variant, text, STEPS, ahead, lent=own) for text, own in zip(TEXTS, lent, strict=True)
    ]


def fed(said):
    """The token of each step: the text's last, then the guesses."""
    return np.array([[text[-1], *one.tokens[:-1]] for text, one in zip(TEXTS, said, strict=True)])


def difference(said, states, scores):
    """The most that states and logits differ from transformers' by."""
    worst = 0.0
    for b, one in enumerate(said):
        for j in range(STEPS):
            ids = scores[j].ids
            own = one.logits[j] if ids is None else one.logits[j][np.asarray(ids)[b]]
            worst = max(worst, float(np.abs(states[b, j] - one.states[j]).max()))
            worst = max(worst, float(np.abs(np.asarray(scores[j].logits)[b] - own).max()))
            assert np.isfinite(own).all(), "other words were scored"
    return worst


@pytest.mark.parametrize("ahead", [1, 0], ids=["next", "last"])
@pytest.mark.parametrize("variant", EACH)
def test_each_step_is_transformers(tiny, variant, ahead):
    said = expected(variant, ahead)
    assert difference(said, *steps_of(tiny[variant], variant, fed(said), ahead)) <= TOLERANCE


def whole_entries(path, kv_dtype, layer, slot, count):
    """What is cached of one layer's first positions, as transformers lends it: k and v
    [1, K, count, D]; keys of `k_eq_v` layers made whole again."""
    target, _ = target_of(path, kv_dtype)
    arch, spec = target.arch, target.arch.layers[layer]
    stored, repeat = entries_of(arch, target.cache, layer)

    def wide(half):
        if isinstance(half, Rounded):
            scale = np.swapaxes(np.asarray(half.scale), -1, -2)[..., None]
            return np.asarray(half.values, np.float32) * scale
        return np.asarray(half, np.float32)

    k, v = (wide(half)[repeat, slot] for half in LayerCache(*stored))
    held = np.arange(count) if spec.window is None else np.arange(count - spec.window - 1, count)
    k, v = k[held % len(k)], v[held % len(v)]
    if spec.k_eq_v:
        norm, turned, half = (
            np.asarray(key_norm_of(arch, target.params, layer)),
            k,
            spec.head_dim // 2,
        )
        k = v * norm
        k[..., : spec.rope.rotated] = turned[..., : spec.rope.rotated]
        k[..., half : half + spec.rope.rotated] = turned[..., spec.rope.rotated :]
    return tuple(torch.tensor(np.moveaxis(part, 1, 0)[None]) for part in (k, v))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["31b", pytest.param("e4b", marks=pytest.mark.slow)])
def test_steps_read_every_kind_of_cache(tiny, variant, kv_dtype):
    """The same entries, widened, and the same states give transformers' class the same steps."""
    path = tiny[variant]
    target, states = target_of(path, kv_dtype)
    norm, eps = target.params.top["norm"], target.arch.eps
    sources = {
        layer.sliding: layer.kv_from for layer in assistant_for(path, variant).spec.arch.layers
    }
    lent = []
    for slot, text in enumerate(TEXTS):
        state = torch.tensor(np.asarray(rms_norm(jnp.array(states[slot]), norm, eps)))
        entries = {
            kind: whole_entries(
                path, kv_dtype, sources[kind == "sliding_attention"], slot, len(text) - 1
            )
            for kind in ("sliding_attention", "full_attention")
        }
        lent.append((state[None, None], entries))
    said = expected(variant, lent=lent)
    assert difference(said, *steps_of(path, variant, fed(said), kv_dtype=kv_dtype)) <= TOLERANCE


def _window(given):
    arch = given["spec"].arch
    layers = tuple(replace(la, window=la.window and 64) for la in arch.layers)
    return given | {"spec": replace(given["spec"], arch=replace(arch, layers=layers))}


def _pad(rows, width):
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


MISTAKES = {
    "the state before the final norm": lambda g, path: g | {"state": jnp.array(target_of(path)[1])},
    "the hidden state handed on, not its projection": lambda g, path: (
        g | {"feedback": lambda y, handed: _pad(y, handed.shape[1])}
    ),
    "embeddings without their scale": lambda g, path: (
        g | {"embed": lambda t: target_of(path)[0].params.top["embed_tokens"][t]}
    ),
    "the assistant's own embeddings": lambda g, path: (
        g | {"embed": lambda t: _pad(g["weights"]["head"][t], g["state"].shape[1])}
    ),
    "keys of other layers": lambda g, path: g | {"sources": _first_layers(path, g)},
    "keys of a rejected draft": lambda g, path: g | {"last": g["last"] + 1, "ahead": 0},
    "the position of the last key": lambda g, path: g | {"ahead": 0},
    "a neighbour's length": lambda g, path: g | {"last": g["last"][::-1]},
    "no window": lambda g, path: _window(g),
    "the state of another row": lambda g, path: g | {"state": g["state"][::-1]},
}


def _first_layers(path, given):
    """The first layers of each type, not the last."""
    layers = target_of(path)[0].arch.layers
    first = {la.sliding: i for i, la in reversed(list(enumerate(layers)))}
    return [first[layer.sliding] for layer in given["spec"].arch.layers]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_shows_in_the_numbers(tiny, mistake):
    path, said = tiny["31b"], expected("31b")
    got = steps_of(path, "31b", fed(said), change=lambda given: MISTAKES[mistake](given, path))
    assert difference(said, *got) > 20 * TOLERANCE, mistake


@pytest.mark.parametrize("variant", MAIN)
def test_int8_weights_are_read_as_they_are_stored(tiny, variant):
    """Linears and the head: the same as those weights, widened again."""
    target, states = target_of(tiny[variant])
    assistant = assistant_for(tiny[variant], variant)
    linears = [name for name, tensor in tensors(assistant.spec).items() if tensor.linear]
    again = {name: dequantise(quantise_int8(assistant.weights[name])) for name in linears}
    rounded = assistant._replace(weights=assistant.weights | again)
    narrow, wide = (
        PlacedAssistant(given, target, 1, False, int8).weights
        for given, int8 in ((assistant, True), (rounded, False))
    )
    assert all(isinstance(narrow[n], Quantized) for n in ("head", "pre_projection"))
    tokens = np.zeros((2, STEPS), np.int64)
    (one, ours), (two, theirs) = (
        steps_of(tiny[variant], variant, tokens, change=lambda g, w=w: g | {"weights": w})
        for w in (narrow, wide)
    )
    assert np.abs(one - two).max() <= TOLERANCE
    for left, right in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(left.logits) - np.asarray(right.logits)).max() <= TOLERANCE
