"""JAX runs on the CPU wherever it was installed without CUDA, and a real model is then slow."""

from __future__ import annotations

import pytest

from specdec.core.config import ModelConfig
from targets.jax import backend, compile_cache


@pytest.mark.parametrize(
    ("model", "node", "warnings"),
    [("./gemma", "nvidia0", 1), ("./gemma", "nvidiactl", 0), ("mini", "nvidia0", 0)],
)
def test_a_gpu_that_is_not_used_is_named_before_a_real_model_loads(
    model, node, warnings, tmp_path, monkeypatch, caplog
):
    (tmp_path / node).touch()
    monkeypatch.setattr(backend, "NODES", tmp_path)
    monkeypatch.setattr(compile_cache, "keep_programs_if_possible", lambda: None)
    backend.JaxBackend().prepare(ModelConfig(model))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warnings
    assert all("--backend cuda" in line for line in told)
