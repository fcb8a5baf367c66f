"""On a GPU: text under masks is the same with any drafter, K, loop, batch and capture."""

from __future__ import annotations

from functools import cache

import pytest

from drafters import registry
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from targets import mini
from targets.cuda.load import CudaOptions, load_target
from tests.support.constrained import check_predictions, texts
from tests.support.fakes import Noise

pytestmark = pytest.mark.gpu


@cache
def target_of(slots, graphs=True, dtype="fp8"):
    options = CudaOptions(slots=slots, max_len=512, dtype=dtype, kv_dtype="bfloat16", graphs=graphs)
    return load_target(mini.path("mini"), options)


@cache
def plain(dtype):
    lone = target_of(1, graphs=False, dtype=dtype)
    return texts(Engine(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0)))


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_constrained_texts_are_plain_decodings(slots, dtype):
    from drafters.lookup.cuda import DeviceLookup
    from drafters.none.cuda import DeviceNone
    from targets.cuda.device_loop import device_loop

    target = target_of(slots, dtype=dtype)
    for k in (0, 1, 4, 7, 31):
        for name, drafter in (("none", DeviceNone()), ("ngram", DeviceLookup(target, 2, 5))):
            engine = Engine(target, NoDrafter(), device_loop(target, drafter, k))
            assert texts(engine) == plain(dtype), (name, k, "captured cycle")
    for k in (4, 31):
        for drafter in (NgramDrafter(), Noise(target.vocab), Noise(target.vocab, wild=True)):
            engine = Engine(target, drafter, host_cycle(target, drafter, k))
            assert texts(engine) == plain(dtype), (drafter, k, "host loop")


def engine_of(drafter: str, k: int, slots: int):
    model = ModelConfig("mini", backend="cuda", dtype="fp8", max_len=512, slots=slots)
    asked = registry.config_type()(drafter=drafter, k=k)
    speculation = registry.resolved(asked, model)
    return make_engine(load_model(model, speculation), speculation)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_no_prediction_changes_a_token_and_a_good_one_saves_cycles(drafter):
    check_predictions(engine_of(drafter, 4, 3), plain("fp8"))


@pytest.mark.parametrize("drafter", ["eagle3", "model"])
def test_drafters_with_weights_too(drafter):
    for k in (1, 7):
        assert texts(engine_of(drafter, k, 3)) == plain("fp8"), k
