"""Emulated kernels: each test has its own orders of threads and its own memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.targets.cuda.emulation import emulated


@pytest.fixture(autouse=True)
def emulation(request) -> Iterator[None]:
    """Draws the orders of threads by the test's file, its name and `--schedule`."""
    name = f"tests/{request.path.name}::{request.node.name}"
    with emulated.one_test(f"{name} {request.config.option.schedule}"):
        yield


@pytest.fixture
def eager(monkeypatch):
    """Makes `is_current_stream_capturing` return False for emulated kernels' launchers: torch
    without CUDA can't answer it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
