"""The EAGLE-3 drafter of the CUDA target, on its references: the formulas' guesses on the committed
text, in any batch; lossless; its wrong inputs one line."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.eagle3.cuda.drafter import EagleDraftHead
from drafters.eagle3.cuda.head import HeadModel, need_bytes
from drafters.eagle3.files import save_flat
from drafters.eagle3.jax import head as jax_head
from drafters.eagle3.jax.head import place
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.errors import UserError
from targets.cuda.footprint import TargetShape, fitted
from targets.cuda.host_drafter import HostHead
from targets.cuda.noise import gumbel
from targets.cuda.ops import Linear, Rows
from targets.cuda.reference import Reference
from targets.sampling_params import split_seed
from tests.support import eagle3_oracle
from tests.support.commands import CUDA, refused, run
from tests.support.eagle3_heads import BASE, EAGLE3, MINI, SPEC, cuda_target_of, random_head
from tests.support.eagle3_oracle import FLAGS, STEPS, TOKENS, Judging, Oracle, inputs
from tests.support.lossless import check_guesses_end, check_nothing_is_drafted, decode, decode_three

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4
TOLERANCE = 1e-5


def standing_in(spec, embedded: np.ndarray) -> SimpleNamespace:
    """A stand-in with the attributes of a target that a head reads; token t's embedding is row
    t."""
    arch = SimpleNamespace(hidden=spec.hidden, vocab=spec.vocab, layers=range(8))
    table = torch.zeros(spec.vocab, spec.hidden)
    table[: len(embedded)] = torch.from_numpy(embedded)
    embedding = Linear(*table.shape, "float32", table, None)
    return SimpleNamespace(
        arch=arch,
        plan=SimpleNamespace(features=spec.layers),
        ops=Reference(arch),
        weights=SimpleNamespace(embedding=embedding),
        dtype="float32",
        device=torch.device("cpu"),
        slots=2,
        max_len=64,
    )


def rows(tokens, start, slot) -> Rows:
    return Rows(*(torch.tensor(part, dtype=torch.int32) for part in (tokens, start, slot)))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_cached_steps_equal_the_formulas(flags):
    """Two rows of different lengths, their prefixes stored over stale entries, then drafted on."""
    head, (embedded, features) = eagle3_oracle.random_head(**flags), inputs()
    model = HeadModel(head, standing_in(head.spec, embedded))
    for part in (model.layer.cache.k, model.layer.cache.v):
        part += 7
    anchors, ids = [9, 3], torch.arange(TOKENS + STEPS)
    context, first = torch.from_numpy(features)[None], torch.zeros(1, dtype=torch.int32)
    for slot, anchor in enumerate(anchors):
        fed = rows(ids[None, :anchor].tolist(), [0], [slot])
        model.store(fed, model.fuse(context[:, :anchor].contiguous(), first))
    last = context[0, anchors][:, None].contiguous()
    h = model.fuse(last, torch.tensor([0, 1], dtype=torch.int32))
    found = []
    for n in range(STEPS):
        fed = rows([[a + n] for a in anchors], [a + n for a in anchors], [0, 1])
        found.append(model.logits(h, model.mix(fed, h, own=n > 0)))
    for row, anchor in enumerate(anchors):
        fed = torch.from_numpy(embedded), torch.from_numpy(features)
        expected = Oracle(head).chain(*fed, anchor, STEPS)
        drafted = torch.stack([step[row] for step in found])
        assert (drafted - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("flags", [*FLAGS, {"silu": False}], ids=str)
def test_both_heads_say_the_same(flags):
    """JAX's and ours on the same text, then each on its own output."""
    head, (embedded, features) = eagle3_oracle.random_head(**flags), inputs(seed=2)
    ours, weights = HeadModel(head, standing_in(head.spec, embedded)), place(head, jnp.float32)[0]
    cache = jax_head.make_cache(head.spec, 1, TOKENS + STEPS, jnp.float32)
    hidden = jax_head.fuse(weights, head.spec, jnp.asarray(features[None]))
    h = ours.fuse(torch.from_numpy(features)[None], torch.zeros(1, dtype=torch.int32))
    fed, first = np.arange(TOKENS), 0
    for n in range(STEPS):
        positions = jnp.asarray(first + np.arange(len(fed))[None])
        fed_in = jnp.asarray(embedded[fed][None]), hidden, positions
        cache, out = jax_head.decode(weights, head.spec, cache, *fed_in)
        theirs = np.asarray(jax_head.logits(weights, head.spec, out[0]))
        drafted = ours.logits(h, ours.mix(rows([fed.tolist()], [first], [0]), h, own=n > 0))
        assert np.abs(drafted.numpy() - theirs).max() < TOLERANCE
        hidden, h = jax_head.feedback(weights, head.spec, out[:, -1:]), h[-1:].clone()
        first, fed = TOKENS + n, np.array([TOKENS + n])


def drafter_of(target, k=K, **change):
    return HostHead(EagleDraftHead(HeadModel(random_head(replace(SPEC, **change)), target), k))


class Judged(Judging, HostHead):
    def by_the_formulas(self, seq, guesses):
        fresh, tokens, sampling = cuda_target_of(self.path, slots=1), seq.tokens, seq.sampling
        steps = self.read_again(fresh, tokens)
        features = torch.cat([step.features[0] for step in steps])
        embedded = fresh.weights.embedding.data[[*tokens[1:], *guesses[:-1]]].float()
        scores = Oracle(random_head()).chain(embedded, features, len(tokens) - 2, len(guesses))
        ids = torch.from_numpy(random_head().target_ids)
        if sampling.temperature:
            seed = torch.tensor(split_seed(sampling.seed))
            places = torch.arange(len(tokens), len(tokens) + len(guesses))
            noise = torch.stack([gumbel(seed, place, SPEC.vocab) for place in places])
            scores = scores.detach() / sampling.temperature + noise[:, ids]
        return ids[scores.argmax(-1)].tolist()


def test_guesses_are_those_of_a_fresh_prefill(tiny):
    """So the draft cache is that of the committed text, whatever was drafted and rejected."""
    target = cuda_target_of(tiny["31b"])
    drafter = Judged(EagleDraftHead(HeadModel(random_head(), target), K))
    drafter.path = tiny["31b"]
    decode_three(target, drafter, K)
    assert drafter.judged >= 6


@pytest.mark.parametrize(
    ("mode", "k", "slots"),
    [
        ("greedy", 1, 1),
        ("everything", 4, 3),
        pytest.param("nucleus", 7, 8, marks=pytest.mark.slow),
    ],
)
def test_lossless(tiny, mode, k, slots):
    plain = cuda_target_of(tiny["31b"], 1, features=())
    expected, _ = decode(plain, NoDrafter(), host_cycle(plain, NoDrafter(), 0), mode, 24)
    target = cuda_target_of(tiny["31b"], slots)
    drafter = drafter_of(target, k)
    text, acceptance = decode(target, drafter, host_cycle(target, drafter, k), mode, 24)
    assert text == expected and acceptance.drafted > 0


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_narrow_weights(tiny, dtype):
    target = cuda_target_of(tiny["31b"], dtype=dtype, max_len=64)
    drafter = drafter_of(target)
    kind = drafter.head.inputs.head.weights.lm_head.kind
    assert kind == {"fp8": "fp8", "bfloat16": "bf16"}[dtype]
    run_ = [
        decode(target, d, host_cycle(target, d, K), "greedy", 8) for d in (NoDrafter(), drafter)
    ]
    assert run_[0][0] == run_[1][0]


def test_what_a_head_needs_is_known_before_it_is_there(tiny):
    target = cuda_target_of(tiny["31b"], dtype="fp8", max_len=64)
    own = drafter_of(target).head.inputs
    weights = [part for part in vars(own.head.weights).values() if isinstance(part, Linear)]
    parts = [*(part.data for part in weights), *own.pending[:1]]
    parts += [own.head.layer.cache.k, own.head.layer.cache.v]
    held = sum(part.numel() * part.element_size() for part in parts)
    needed = need_bytes(SPEC, TargetShape(2, 64, K + 1, 0, "fp8", "fp8"))
    assert held < needed < 1.1 * held
    with pytest.raises(UserError, match=r"are free beside 0\.\d GiB for the drafter"):
        fitted(target.arch, TargetShape(2, 64, 5, 16, "fp8", "fp8"), 2**30, 2**29)


def test_a_head_beside_four_bits_is_counted_as_it_is_packed():
    """As FP8."""
    shape = TargetShape(2, 64, K + 1, 0, "int4", "fp8")
    assert need_bytes(SPEC, shape) == need_bytes(SPEC, replace(shape, dtype="fp8"))


def test_features_that_graphs_of_prompts_keep_are_counted():
    """Of one prompt 3,192 rows, of two and four at once 3,808; and a chunk's."""
    shape = TargetShape(4, 2048, K + 1, 2048, "fp8", "fp8")
    more = need_bytes(SPEC, shape) - need_bytes(SPEC, replace(shape, chunk=0))
    assert more == 4 * SPEC.features * (2048 + 3192 + 3808)


@pytest.mark.parametrize(("change", "end"), [({}, 96), ({"max_position": 48}, 48)])
def test_nothing_is_guessed_beyond_a_context(tiny, change, end):
    """Of the target's 96 tokens, or of a shorter head's: K reaches beyond both."""
    target = cuda_target_of(tiny["31b"])
    check_guesses_end(target, drafter_of(target, **change), K, end, (44, 90, 95), context=96)


def test_says_nothing_where_nothing_that_it_knows_may_be_said(tiny, monkeypatch):
    target = cuda_target_of(tiny["31b"])
    drafter, bias = drafter_of(target), target.bias.clone()
    bias[:, random_head().target_ids] = -torch.inf
    monkeypatch.setattr(target, "bias", bias)
    check_nothing_is_drafted(target, drafter, K)


def test_a_head_for_another_target_is_one_line(tiny):
    for change, said in (({"hidden": 96}, "width 96, not 48"), ({"vocab": 400}, "of 400, not 320")):
        with pytest.raises(UserError, match=said):
            HeadModel(random_head(replace(SPEC, **change)), cuda_target_of(tiny["31b"]))


def test_eagle3_from_the_command_line(tmp_path, capsys):
    save_flat(random_head(MINI), tmp_path, stop_ids=(1,))
    texts = set()
    for drafter in (["eagle3", "--draft-model", str(tmp_path)], ["none"]):
        out, _ = run(capsys, *BASE, *CUDA, "--json", "--drafter", *drafter)
        document = json.loads(out.splitlines()[-1])
        texts.add(document["text"])
        assert (document["drafted"] > 0) == (drafter != ["none"])
    assert len(texts) == 1
    assert "--loop host" in refused(capsys, *EAGLE3, str(tmp_path), *CUDA, "--loop", "device")
