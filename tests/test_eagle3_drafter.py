"""The EAGLE-3 drafter of the JAX target: lossless in both loops, its guesses those of the formulas
on the committed text, its wrong inputs one line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.device_cycle_jax import device_cycle
from drafters.eagle3.drafter_jax import EagleDrafter
from drafters.eagle3.files import save_flat
from drafters.eagle3.spec import Head, HeadSpec, tensors
from drafters.none import NoDrafter
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.errors import UserError
from specdec.types import NO_GUESS, Sampling, Sequence
from targets.jax.load import JaxOptions, load_target
from targets.jax.noise import gumbel
from targets.rules import split_seed
from tests.commands import CUDA, refused, run
from tests.eagle3_oracle import Oracle
from tests.test_lossless import decode
from tests.tiny import config_of

SPEC = HeadSpec(
    hidden=48,
    ffw=40,
    heads=4,
    kv_heads=2,
    head_dim=12,
    vocab=320,
    draft_vocab=200,
    layers=(0, 2, 4),
    max_position=256,
)
K = 4


def random_head(spec: HeadSpec = SPEC) -> Head:
    random, weights = np.random.default_rng(0), {}
    for name, shape in tensors(spec).items():
        noise = random.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return Head(spec, weights, np.sort(random.choice(spec.vocab, spec.draft_vocab, replace=False)))


@cache
def target_of(path, slots=2, max_len=96):
    options = JaxOptions(slots=slots, max_len=max_len, k=7, chunk=8, features=SPEC.layers)
    return load_target(path, options)


class Judged(EagleDrafter):
    """Compares guesses with the formulas on a fresh prefill of the text, chosen by argmax or with
    the target's noise."""

    judged = 0

    def propose(self, seqs, k):
        draft = super().propose(seqs, k)
        for seq, guesses in zip(seqs, draft, strict=True):
            if seq.emitted % 5 == 1:  # the formulas take a while
                expected = self.by_the_formulas(seq, guesses)
                assert guesses.tolist() == expected, (seq.request_id, seq.emitted)
                self.judged += 1
        return draft

    def by_the_formulas(self, seq, guesses):
        fresh, tokens, sampling = target_of(self.path, slots=1), seq.tokens, seq.sampling
        text, chunk = Sequence(tokens[:-1], slot=0), fresh.prefill_chunk
        starts = range(0, len(tokens) - 1, chunk)
        steps = [fresh.prefill(text, s, min(len(tokens) - 1, s + chunk)) for s in starts]
        features = torch.tensor(np.concatenate([np.asarray(s.features[0]) for s in steps]))
        table = np.array(self.target.params.top["embed_tokens"])
        embedded = torch.tensor(table[[*tokens[1:], *guesses[:-1]]])
        rows = Oracle(random_head()).chain(embedded, features, len(tokens) - 2, len(guesses))
        ids, scores = random_head().target_ids, rows.numpy()
        if sampling.temperature:
            places = np.arange(len(tokens), len(tokens) + len(guesses))
            seeds = np.tile(np.array(split_seed(sampling.seed), np.uint32), (len(guesses), 1))
            noise = np.asarray(gumbel(seeds, places, SPEC.vocab))[:, ids]
            scores = scores / sampling.temperature + noise
        return ids[scores.argmax(-1)].tolist()


def test_guesses_are_those_of_a_fresh_prefill(tiny):
    """So the draft cache is that of the committed text, whatever was drafted and rejected."""
    target = target_of(tiny["31b"])
    drafter = Judged(random_head(), target, K)
    drafter.path = tiny["31b"]
    samplings = Sampling(), Sampling(0.8, seed=5), Sampling()
    prompts = [5, 9, 3], [7] * 17, [11, 12]
    seqs = [Sequence(list(p), s, 20) for p, s in zip(prompts, samplings, strict=True)]
    Engine(target, drafter, host_cycle(target, drafter, K)).run_to_end(seqs)
    assert drafter.judged >= 9


@pytest.mark.parametrize("mode", ["greedy", "nucleus", "everything"])
def test_lossless_in_both_loops(tiny, mode):
    target = target_of(tiny["31b"])
    plain, _ = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), mode, 24)
    drafter = EagleDrafter(random_head(), target, K)
    host = decode(target, drafter, host_cycle(target, drafter, K), mode, 24)
    device = decode(target, drafter, device_cycle(target, drafter, K, 4), mode, 24)
    assert host[0] == device[0] == plain
    assert host[1] == device[1]  # the same guesses: the caches agree
    assert host[1].accepted > 0


def test_nothing_is_guessed_beyond_a_context(tiny):
    """Of the target's 32 tokens, and of a head's 16: K reaches beyond both."""
    target = target_of(tiny["31b"], max_len=32)
    for spec, end in ((SPEC, 32), (replace(SPEC, max_position=16), 16)):
        drafter = EagleDrafter(random_head(spec), target, 7)
        seen = []
        propose = drafter.propose

        def watched(seqs, k, propose=propose, seen=seen):
            draft = propose(seqs, k)
            seen.extend(
                (len(s.tokens) + j, int(g))
                for s, row in zip(seqs, draft, strict=True)
                for j, g in enumerate(row)
            )
            return draft

        drafter.propose = watched
        engine = Engine(target, drafter, host_cycle(target, drafter, 7))
        seqs = [Sequence([5] * n, max_tokens=99) for n in (3, 20, 31)]
        engine.run_to_end(seqs)
        assert all(len(s.tokens) == 32 for s in seqs)
        assert {place < end for place, guess in seen if guess != NO_GUESS} == {True}
        assert all(guess == NO_GUESS for place, guess in seen if place >= end)


def test_says_nothing_where_the_target_may_say_nothing_that_it_knows(tiny):
    head = random_head()
    ids = tuple(int(i) for i in head.target_ids)
    target = load_target(
        tiny["31b"], JaxOptions(slots=1, max_len=64, k=4, chunk=8, features=SPEC.layers), ids
    )
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        drafter = EagleDrafter(head, target, K)
        engine = Engine(target, drafter, host_cycle(target, drafter, K))
        engine.run_to_end([Sequence([5, 6], sampling, max_tokens=6)])
        assert engine.acceptance.drafted == 0


def test_a_head_for_another_target_is_one_line(tiny, tmp_path, capsys):
    for name, change, said in (
        ("wide", {"hidden": 96}, "width 96, not 48"),
        ("words", {"vocab": 400}, "vocabulary of 400, not 320"),
        ("deep", {"layers": (0, 2, 40)}, "layers"),
    ):
        save_flat(random_head(replace(SPEC, **change)), tmp_path / name, stop_ids=(1,))
        line = refused(
            capsys, "generate", "x", "--model", str(tiny["31b"]), "--drafter", "eagle3",
            "--draft-model", str(tmp_path / name),
        )  # fmt: skip
        assert said in line
    target = target_of(tiny["31b"])
    with pytest.raises(UserError, match="width 96"):
        EagleDrafter(random_head(replace(SPEC, hidden=96)), target, K)
    assert config_of("31b")["hidden_size"] == 48


def test_eagle3_from_the_command_line(tmp_path, capsys):
    """A random head for mini: the text is plain decoding's, and what's wrong is one line."""
    spec = replace(SPEC, hidden=256, vocab=4096, draft_vocab=500, layers=(1, 5, 8))
    save_flat(random_head(spec), tmp_path, stop_ids=(1,))
    base = ["generate", "def f(", "--max-tokens", "8", "--slots", "1", "--k", "3"]
    plain, _ = run(capsys, *base, "--drafter", "none")
    head = f'{{"method": "eagle3", "model": "{tmp_path}", "num_speculative_tokens": 3}}'
    drafted, _ = run(capsys, *base, "--speculative-config", head)
    assert drafted == plain
    assert "needs --draft-model" in refused(capsys, *base, "--drafter", "eagle3")
    eagle3 = ["--drafter", "eagle3", "--draft-model"]
    assert "no folder" in refused(capsys, *base, *eagle3, "/nowhere")
    assert "--backend jax" in refused(capsys, *base, *eagle3, str(tmp_path), *CUDA)
