"""Replicas' addresses for Prometheus: each has a file while it lives, and dead ones have none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from serve.prometheus_files import leave_with, tell_prometheus
from tests.support.commands import free_port
from tests.support.stub_web import answering


@pytest.fixture
def port() -> Iterator[int]:
    with answering({"/metrics": (200, b'specdec:slots{engine="alive"} 4.0\n')}) as port:
        yield port


def names(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.iterdir())


def test_a_file_is_what_prometheus_reads(tmp_path):
    file = tell_prometheus(tmp_path / "new", "a", "10.0.0.1", 9000)
    assert json.loads(file.read_text()) == [
        {"targets": ["10.0.0.1:9000"], "labels": {"replica": "a"}}
    ]
    file = tell_prometheus(tmp_path / "new", "b", "fd00::1", 9000)
    assert json.loads(file.read_text())[0]["targets"] == ["[fd00::1]:9000"]


def test_a_start_removes_the_files_of_the_dead(tmp_path, port):
    tell_prometheus(tmp_path, "alive", "127.0.0.1", port)
    tell_prometheus(tmp_path, "reused", "127.0.0.1", port)  # the port is somebody else's now
    tell_prometheus(tmp_path, "refused", "127.0.0.1", int(free_port()))
    others = {"note": "{}", "cut": "[{", "own": '[{"targets": ["127.0.0.1:1"]}]'}
    for name, text in others.items():
        (tmp_path / f"{name}.json").write_text(text)
    tell_prometheus(tmp_path, "new", "127.0.0.1", port)
    assert names(tmp_path) == sorted(["alive", "new", *others])


def test_a_file_goes_when_its_replica_ends(tmp_path):
    file, app = tell_prometheus(tmp_path, "a", "127.0.0.1", 9), FastAPI()
    leave_with(app, file)

    async def live() -> bool:
        async with app.router.lifespan_context(app):
            return file.exists()

    assert asyncio.run(live()) and not file.exists()
