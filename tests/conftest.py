"""Tiny checkpoints, written once per session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli import backend_jax
from tests.tiny import IDS, VARIANTS, oracle, random_tensors, write_tiny


def pytest_addoption(parser) -> None:
    """What `pytest -m campaign` can be told, see test_campaign.py."""
    group = parser.getgroup("campaign", "a random campaign")
    group.addoption("--seconds", type=float, default=60.0, help="draw new cases for so long")
    group.addoption("--seed", type=int, default=0, help="of the cases that are drawn")
    group.addoption("--backend", choices=("jax", "cuda"), help="one of them; both by default")
    group.addoption("--case", type=json.loads, help="one case, as a failure printed it")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint folder per variant."""
    root = tmp_path_factory.mktemp("tiny")
    for variant in VARIANTS:
        write_tiny(root / variant, variant)
    return {variant: root / variant for variant in VARIANTS}


@pytest.fixture(scope="session")
def references() -> dict:
    """transformers' logits [2, LENGTH, V] of tiny's IDS and hidden states, per variant."""
    import torch

    made = {}
    for variant in VARIANTS:
        with torch.no_grad():
            out = oracle(variant, random_tensors(variant))(
                torch.tensor(IDS), output_hidden_states=True
            )
        made[variant] = out.logits.numpy(), [h.numpy() for h in out.hidden_states]
    return made


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory) -> None:
    """Commands keep their programs for this session only, not where the user's are."""
    backend_jax.PROGRAMS = tmp_path_factory.mktemp("programs")


@pytest.fixture
def few_samples(monkeypatch):
    """A bench that is only run, not believed."""
    for name, value in {"STEPS": 3, "CYCLE_SAMPLES": 2, "FIRST_TOKENS": 2}.items():
        monkeypatch.setattr(f"specdec.bench.{name}", value)
    monkeypatch.setattr("targets.cuda.roofline.GROUPS", 3)
