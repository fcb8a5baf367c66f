"""On the card: block drafters change no token in either loop, and their forward is the reference's.

To time one at 31B's size: specdec bench --random gemma-4-31b --backend cuda --dtype fp8 --drafter
dflash --ks 7,15, beside --drafter none at the same widths: the difference is one draft.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.dflash.cuda import body
from drafters.dflash.cuda.drafter import BlockDraftHead
from drafters.dflash.cuda.model import BlockModel
from drafters.dflash.cuda.placing import Placed, arch_of, place
from drafters.dflash.spec import BlockHead, BlockSpec
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets.arch import Rope
from targets.cuda.device_loop import device_loop
from targets.cuda.host_drafter import DeviceHead, HostHead
from targets.cuda.ops import Rows
from targets.cuda.reference import Reference
from tests.support.block_heads import SPECS, grown, random_block
from tests.support.modes import MODES
from tests.targets.cuda.gpu.card_targets import SPEC, target_of

pytestmark = pytest.mark.gpu

KINDS = [("fp8", "fp8"), ("bfloat16", "bfloat16")]
FORMS = ["dflash", "dspark", "dspark-anchor", "dflash2", "zlab", "jetspec", "deepspec"]
LENGTHS = (3, 40, 170, 1, 26, 64, 129, 400, 9, 17)
TOKENS = 24
WRITTEN = 250
"""Tokens of the longer of two texts whose features are written."""
PART = 50
"""Of these at a time."""
BEGINS = (250, 170)
"""Where the texts' blocks begin: the second one's lies over features that were written before."""
ERROR = {"fp8": 0.1, "bfloat16": 0.03}
"""Of states after the final norm, relative to their size: rounding through some layers."""


def spec_of(form: str) -> BlockSpec:
    """For mini, with sizes that a card's heads have; the windows are shorter than the prompts."""
    made = grown(SPECS[form], SPEC.hidden, SPEC.vocab, SPEC.layers)
    rope = Rope(made.body.rope.theta, 8 if made.body.gemma else 32)
    layers = tuple(replace(layer, window=layer.window and 64) for layer in made.body.layers)
    sizes = {"ffw": 320, "heads": 4, "kv_heads": made.body.kv_heads, "head_dim": 64}
    return replace(made, body=replace(made.body, **sizes, rope=rope, layers=layers))


@cache
def head_of(form: str) -> BlockHead:
    return random_block(spec_of(form))


@cache
def model_of(form: str, kind, slots: int) -> BlockModel:
    return BlockModel(head_of(form), target_of(kind, slots))


@cache
def prompts():
    random = np.random.default_rng(3)
    return [random.integers(3, SPEC.vocab, n).tolist() for n in LENGTHS]


def decode(target, drafter, cycle, mode):
    engine = Engine(target, drafter, cycle)
    seqs = [Sequence(list(p), MODES[mode](i), TOKENS) for i, p in enumerate(prompts())]
    engine.run_to_end(seqs)
    return [seq.tokens for seq in seqs], engine.acceptance


@cache
def plain(kind, mode):
    """One slot, no features, launched kernel by kernel."""
    lone = target_of(kind, 1, False, ())
    return decode(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0), mode)[0]


def on_cpu(form: str, dtype: str) -> Placed:
    """The reference's linear layers in this dtype."""
    head = head_of(form)
    spec, own = head.spec, {n: w for n, w in head.weights.items() if n != "embed_tokens"}
    return place(spec, own, Reference(arch_of(spec)), dtype, torch.device("cpu"))


def states(placed: Placed, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """After the final norm, of two texts; keys and values of the first lie in wrapped rings."""
    device = placed.weights["norm"].device
    caches = body.make_caches(placed, 2, WRITTEN)

    def rows(tokens: int, *starts: int, slots=(1, 0)) -> Rows:
        ints = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, slots))
        return Rows(torch.zeros((2, tokens), dtype=torch.int32, device=device), *ints)

    for start in range(0, WRITTEN, PART):
        part = features[:, start : start + PART].to(device)
        slots = (1, 0) if start < BEGINS[1] else (1, -1)
        body.inject(placed, caches, part.contiguous(), rows(PART, start, start, slots=slots))
    slots = placed.spec.slots
    x = body.block(placed, caches, embedded.to(device).flatten(0, 1), rows(slots, *BEGINS))
    return body.normed(placed, x).float().cpu()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_states_are_the_references(kind, form):
    """The kernels against float32 on the CPU: as far from it as rounding takes them, which the
    reference in their dtype shows too."""
    model = model_of(form, kind, 3)
    random = torch.Generator().manual_seed(1)
    features = torch.randn(2, WRITTEN, model.spec.features, generator=random)
    embedded = torch.randn(2, model.spec.slots, SPEC.hidden, generator=random)
    exact = states(on_cpu(form, "float32"), features, embedded)

    def error(placed: Placed) -> float:
        return float((states(placed, features, embedded) - exact).norm() / exact.norm())

    assert error(model.placed) < max(ERROR[kind[0]], 2 * error(on_cpu(form, kind[0])))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "slots"), [(KINDS[0], 1), (KINDS[0], 8), (KINDS[1], 3)])
def test_every_token_is_plain_decodings(kind, slots, form):
    target = target_of(kind, slots)
    for k in (1, 7):
        host = HostHead(BlockDraftHead(model_of(form, kind, slots)))
        captured = device_loop(target, DeviceHead(host), k)
        for mode in ("greedy", "everything"):
            text, drafted = decode(target, host, captured, mode)
            assert text == plain(kind, mode), (k, mode, "captured")
            assert drafted.drafted > 0
        text, drafted = decode(target, host, host_cycle(target, host, k), "nucleus")
        assert text == plain(kind, "nucleus"), (k, "host loop")
