"""The assistant as a drafter of the CUDA target, on its references: transformers' steps from every
kind of cache, its guesses on the committed text, lossless."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from drafters.assistant.cuda.drafter import AssistantDraftHead
from drafters.assistant.cuda.model import AssistantModel, need_bytes, widened
from drafters.assistant.cuda.ops import States
from drafters.assistant.spec import released_size
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from targets.arch import released
from targets.cuda import cache as kv
from targets.cuda.attention import variants
from targets.cuda.footprint import TargetShape
from targets.cuda.formulas import rms
from targets.cuda.host_drafter import HostHead
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.noise import gumbel
from targets.cuda.ops import Rows
from targets.model_folder import read_arch
from targets.sampling_params import split_seed
from tests.support.assistants import (
    STEPS,
    TOLERANCE,
    a_text,
    assistant_for,
    chain,
    read_all_but_the_last,
)
from tests.support.eagle3_oracle import Judging
from tests.support.lossless import decode, decode_three
from tests.support.tiny import VOCAB

K = 4
TEXTS = [a_text(40, 1), a_text(27, 2)]


@cache
def target_of(path, kv_dtype=None, dtype=None):
    last = len(read_arch(path).layers) - 1
    own = {"kv_dtype": kv_dtype, "dtype": dtype, "features": (last,)}
    options = CudaOptions(slots=2, max_len=96, k=K, device="cpu", chunk=16, short=5, **own)
    return load_target(path, options)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def read_texts(target):
    """The states before the texts' last tokens."""
    steps = read_all_but_the_last(target, TEXTS)
    return torch.stack([step.features[0, 0] for _, step in steps])


def lent_by(target, spec, states):
    """What the target lends, as transformers' class takes it."""
    lent = []
    for slot, text in enumerate(TEXTS):
        entries, count = {}, len(text) - 1
        for layer in spec.arch.layers:
            stored = target.cache.of(target.arch.layers, layer.kv_from)
            first = 0 if layer.window is None else max(0, count - layer.window - 1)
            k, v = (part.float()[None] for part in kv.read(stored, slot, first, count))
            entries["sliding_attention" if layer.sliding else "full_attention"] = k, v
        state = rms(states[slot], target.weights.norm, target.arch.eps)
        lent.append((state[None, None], entries))
    return lent


@pytest.mark.parametrize("ahead", [1, 0], ids=["next", "last"])
@pytest.mark.parametrize(
    ("variant", "kv_dtype"), [("31b", None), ("31b", "bfloat16"), ("31b", "fp8"), ("e4b", "fp8")]
)
def test_each_step_is_transformers(tiny, variant, kv_dtype, ahead):
    target = target_of(tiny[variant], kv_dtype)
    model = AssistantModel(assistant_for(tiny[variant], variant), target, ahead)
    rows = read_texts(target)
    lent = lent_by(target, model.spec, rows)
    said = [chain(variant, t, STEPS, ahead, lent=own) for t, own in zip(TEXTS, lent, strict=True)]
    states = States(rows, ints(0, 1), target.weights.norm)
    seen = Rows(ints([0], [0]), ints(*(len(text) - 2 for text in TEXTS)), ints(0, 1))
    for j in range(STEPS):
        tokens = ints(*((text[-1], *one.tokens)[j] for text, one in zip(TEXTS, said, strict=True)))
        logits, x = model.step(tokens, states, seen)
        handed = model.handed(x)
        for b, one in enumerate(said):
            assert np.abs(handed[b].numpy() - one.states[j]).max() <= TOLERANCE
            scored = np.isfinite(one.logits[j])
            assert (np.isfinite(logits[b].numpy()) == scored).all()
            ours, theirs = logits[b].numpy()[scored], one.logits[j][scored]
            assert np.abs(ours - theirs).max() <= TOLERANCE
        states = States(handed)


class Judged(Judging, HostHead):
    variant = ""

    def by_the_formulas(self, seq, guesses):
        sampling, length = seq.sampling, len(seq.tokens)

        def choose(logits, j):
            if not sampling.temperature:
                return int(logits.argmax())
            seed = torch.tensor(split_seed(sampling.seed))
            noise = gumbel(seed, torch.tensor(length + j), VOCAB).numpy()
            return int((logits / sampling.temperature + noise).argmax())

        return chain(self.variant, seq.tokens, len(guesses), choose=choose).tokens


@pytest.mark.parametrize("variant", ["31b", "e4b"])
def test_guesses_are_transformers_on_the_text(tiny, variant):
    target = target_of(tiny[variant])
    model = AssistantModel(assistant_for(tiny[variant], variant), target, 1)
    drafter = Judged(AssistantDraftHead(model))
    drafter.variant = variant
    decode_three(target, drafter, K)
    assert drafter.judged >= 6


@pytest.mark.parametrize(
    ("variant", "mode", "ids"),
    [("31b", "everything", np.arange(0, VOCAB, 2)), ("e4b", "nucleus", None)],
)
def test_lossless(tiny, variant, mode, ids):
    target = target_of(tiny[variant])
    assistant = assistant_for(tiny[variant], variant)._replace(target_ids=ids)
    drafter = HostHead(AssistantDraftHead(AssistantModel(assistant, target, 1)))

    def run(d, k):
        return decode(target, d, host_cycle(target, d, k), mode, 8)

    text, acceptance = run(drafter, K)
    assert text == run(NoDrafter(), 0)[0]
    assert acceptance.drafted > 0


def test_weights_are_as_narrow_as_the_targets(tiny):
    """fp8 beside an 8-bit target, head and all; and their bytes are counted."""
    target = target_of(tiny["31b"], None, "fp8")
    assistant = assistant_for(tiny["31b"], "31b")
    model = AssistantModel(assistant, target, 1)
    w = model.weights
    assert {w.pre.kind, w.post.kind, w.head.kind, w.layers[0].gate_up.kind} == {"fp8"}
    shape = TargetShape(2, 96, K + 1, 16, "fp8", "bfloat16")
    wide = TargetShape(2, 96, K + 1, 16, "bfloat16", "bfloat16")
    narrower = need_bytes(assistant, wide) - need_bytes(assistant, shape)
    values = sum(v.size for v in assistant.weights.values() if v.ndim == 2)
    scales = 4 * sum(len(v) for v in assistant.weights.values() if v.ndim == 2)
    assert narrower == values - scales
    pruned = assistant._replace(target_ids=np.arange(100))
    assert need_bytes(pruned, shape) < need_bytes(assistant, shape)
    drafter = HostHead(AssistantDraftHead(model))
    seqs = [Sequence([5, 9, 3], Sampling(0.8, seed=1), 8)]
    Engine(target, drafter, host_cycle(target, drafter, K)).run_to_end(seqs)
    lone = [Sequence([5, 9, 3], Sampling(0.8, seed=1), 8)]
    Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)).run_to_end(lone)
    assert seqs[0].tokens == lone[0].tokens


@pytest.mark.parametrize(("ahead", "keys"), [(0, 64), (1, 128)])
def test_kernels_are_compiled_for_the_windows_that_are_run(ahead, keys):
    """E4B's window of 512 keys is read in chunks of 64, one of 513 in chunks of 128."""
    arch = released_size(released("gemma-4-e4b")).arch
    sliding = [
        dict(variant.macros)
        for variant in variants(widened(arch, ahead), kv8=0)
        if ("HEAD_DIM", 256) in variant.macros
    ]
    assert sliding and {macros["CHUNK_KEYS"] for macros in sliding} == {keys}
