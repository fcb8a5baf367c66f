"""A drafter is a folder and a name: a stranger's runs in every loop, an unknown one is an error."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from drafters import registry
from drafters.kind import DrafterKind, TextDraft
from drafters.none.host import NoDrafter
from drafters.suffix.host import SuffixDrafter
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.types import Sampling, Sequence
from tests.support.commands import refused, run

pytestmark = pytest.mark.usefixtures("cheap_programs")

PROMPT = "def quicksort(items):"
MODEL = {"slots": 2, "max_len": 128}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(registry.KINDS, "toy", "tests.drafters.toy_drafter")


def decoded(model, speculation):
    """Texts, and what was drafted and accepted."""
    engine = make_engine(model, speculation)
    ids = model.tokenizer.encode(PROMPT)
    seqs = [Sequence(ids + [9 + i], Sampling(0.8 * i, seed=i), max_tokens=12) for i in range(3)]
    engine.run_to_end(seqs)
    return [seq.tokens for seq in seqs], engine.acceptance


def load(config, **chosen):
    speculation = registry.config_type()(drafter="toy", k=3, **chosen)
    speculation = registry.resolved(speculation, config)
    return load_model(config, speculation), speculation


def check(config, loops):
    """Every loop gives plain decoding's text, with the same guesses."""
    model, speculation = load(config)
    plain, _ = decoded(model, registry.plain(speculation))
    runs = [
        decoded(model, type(speculation)(**{**vars(speculation), "loop": loop})) for loop in loops
    ]
    assert all(text == plain for text, _ in runs)
    assert all(acceptance == runs[0][1] for _, acceptance in runs)
    assert runs[0][1].drafted > 0


def test_a_strangers_drafter_runs_in_both_loops_of_jax(toy, worded):
    check(ModelConfig(str(worded), **MODEL), ("host", "device"))


def test_a_strangers_drafter_runs_on_the_cuda_target(toy, worded):
    check(ModelConfig(str(worded), backend="cuda", device="cpu", slots=2, max_len=64), ("host",))


@pytest.mark.gpu
def test_a_strangers_drafter_is_captured(toy):
    check(ModelConfig(backend="cuda", dtype="bfloat16", **MODEL), ("host", "device"))


def test_its_options_are_options_of_the_command_line(toy):
    assert registry.config_type()(toy_shift=3).toy_shift == 3
    alias = json.dumps({"method": "toy", "num_speculative_tokens": 2, "toy": 5})
    given = registry.config_type()(speculative_config=alias)
    found = registry.resolved(given, ModelConfig())
    assert (found.drafter, found.k, found.toy_shift) == ("toy", 2, 5)


@pytest.mark.parametrize("loop", ["host", "device"])
@pytest.mark.parametrize("backend", ["jax", "cuda"])
def test_an_unknown_drafter_is_one_line_in_every_loop(capsys, backend, loop):
    line = refused(
        capsys, "generate", PROMPT, "--drafter", "medusa", "--backend", backend, "--loop", loop
    )
    names = ", ".join(registry.KINDS)
    assert f"unknown drafter 'medusa': choose one of {names}" in line


def test_a_device_loop_with_lookup_builds_no_index_on_the_host():
    speculation = registry.config_type()(drafter="suffix", loop="device")
    model = load_model(ModelConfig(**MODEL), speculation)
    assert isinstance(make_engine(model, speculation).drafter, NoDrafter)
    host = make_engine(model, registry.config_type()(drafter="suffix", loop="host"))
    assert isinstance(host.drafter, SuffixDrafter)


@pytest.fixture
def still(monkeypatch):
    """A drafter without a step for any device loop."""
    kind = DrafterKind("still", "nothing", lambda asked: TextDraft(NoDrafter))
    monkeypatch.setitem(registry.KINDS, "still", "tests.still_drafter")
    monkeypatch.setitem(sys.modules, "tests.still_drafter", SimpleNamespace(KIND=kind))


def test_a_drafter_without_a_device_step_is_one_line(still):
    """Otherwise it would silently propose nothing."""
    model = load_model(ModelConfig(**MODEL), SpeculationConfig(drafter="still"))
    match = "still has no step for the device loop of jax: use --loop host"
    with pytest.raises(UserError, match=match):
        make_engine(model, SpeculationConfig(drafter="still", loop="device"))


@pytest.mark.parametrize(
    "asked",
    [
        *(("still", backend, "device") for backend in ("jax", "cuda")),
        ("still", "cuda", None),
    ],
)
def test_it_is_refused_before_anything_is_read(monkeypatch, still, asked):
    name, backend, loop = asked
    monkeypatch.setattr("specdec.assembly.model.read_arch", lambda path: pytest.fail("too late"))
    with pytest.raises(UserError, match=f"{name} has no step for the device loop of {backend}"):
        load_model(
            ModelConfig(backend=backend, **MODEL), SpeculationConfig(drafter=name, loop=loop)
        )


def test_help_names_every_drafter(capsys):
    out, _ = run(capsys, "generate", "--help")
    assert all(kind.name in out for kind in registry.every())
    out, _ = run(capsys, "generate", "--help-all")
    assert "--ngram-min" in out and "--ngram-max" in out
