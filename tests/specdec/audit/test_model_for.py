"""A receipt's arithmetic decides how the model that checks it is loaded, and that one has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.assembly.model import Model, load_model
from specdec.audit import verify
from specdec.audit.identity import differing, identity_of
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import TooLarge, UserError
from targets.arch import released
from targets.cuda.load import CudaOptions, make_plan
from tests.support.audits import IDENTITY
from tools import seeing_mini

K = 4


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> str:
    return str(seeing_mini.write(tmp_path_factory.mktemp("seeing") / "mini"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"images": "off"},
        {"image_tokens": 70},
        {"backend": "cuda", "device": "cpu"},
        {"backend": "cuda", "device": "cpu", "images": "off"},
    ],
)
def test_whatever_a_server_was_started_with_its_receipts_are_comparable(
    seeing, options: dict[str, Any]
):
    config = ModelConfig(seeing, slots=2, max_len=256, **options)
    served = identity_of(load_model(config, SpeculationConfig("none", k=K)))
    assert served.arithmetic.dtype == ("float32" if "backend" in options else None)
    own = identity_of(verify.model_for(served.arithmetic, seeing))
    assert differing(served, own) == []


def test_the_dtype_of_a_receipt_does_not_depend_on_the_replays_k():
    b31 = released("gemma-4-31b")
    served = make_plan(b31, CudaOptions(slots=4, max_len=4096, k=K), "fp8").dtype
    assert make_plan(b31, CudaOptions(slots=4, max_len=4096, k=31), "fp8").dtype != served
    asked = CudaOptions(slots=4, max_len=4096, k=31, dtype=served)
    assert make_plan(b31, asked, "fp8").dtype == served


@dataclass
class Loaded:
    """In place of a model."""

    k: int


def test_a_replay_guesses_as_much_as_there_is_room_for(monkeypatch):
    """64 slots of a mixture route too many rows at K = 31."""
    options = {"slots": 64, "max_len": 4096, "dtype": "fp8"}
    moe = released("gemma-4-26b-a4b")

    def load(config: Any, speculation: Any, *rest: Any) -> Loaded:
        make_plan(moe, CudaOptions(**options, k=speculation.k), "fp8")
        return Loaded(speculation.k)

    monkeypatch.setattr(verify, "load_model", load)
    monkeypatch.setattr(verify, "require_exact", lambda *given: None)
    served = IDENTITY.arithmetic.model_copy(update={"backend": "cuda", "slots": 64})
    with pytest.raises(TooLarge, match="smaller --k"):
        make_plan(moe, CudaOptions(**options, k=31), "fp8")
    assert verify.model_for(served, "x").k == 7


@pytest.mark.parametrize("refused", [TooLarge, UserError])
def test_what_can_not_be_loaded_is_refused(monkeypatch, refused: type[UserError]):
    tried: list[int] = []

    def load(config: Any, speculation: Any, *rest: Any) -> Model:
        tried.append(speculation.k)
        raise refused("no")

    monkeypatch.setattr(verify, "load_model", load)
    served = IDENTITY.arithmetic.model_copy(update={"backend": "cuda"})
    with pytest.raises(refused, match="no"):
        verify.model_for(served, "x", cache=Path("unused"))
    assert tried == (list(verify.KS) if refused is TooLarge else [31])
