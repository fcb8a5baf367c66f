"""Files by which Prometheus finds replicas (file_sd_configs): one for each that lives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from specdec.core.writing import write_whole

PATIENCE = 2.0
"""Seconds that a replica has to answer. One that does not may be busy, or behind a network that is
away: it keeps its file."""
THREADS = 16


def tell_prometheus(folder: Path, replica: str, host: str, port: int) -> Path:
    """Write a replica's file, and remove those of replicas that are dead. Raises UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    _forget_dead(folder)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    file = folder / f"{replica}.json"
    write_whole(file, json.dumps([{"targets": [address], "labels": {"replica": replica}}]))
    return file


def leave_with(app: FastAPI, file: Path) -> None:
    """Remove a file when the app's lifespan ends."""
    within = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        try:
            async with within(app) as state:
                yield state
        finally:
            file.unlink(missing_ok=True)

    app.router.lifespan_context = lifespan


def _forget_dead(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    with ThreadPoolExecutor(THREADS) as pool:
        for file, dead in zip(files, pool.map(_is_dead, files), strict=True):
            if dead:
                file.unlink(missing_ok=True)


def _is_dead(file: Path) -> bool:
    """Whether nobody listens where the file's replica did, or another one does."""
    try:
        ((target,),) = [json.loads(file.read_text())]
        (address,), replica = target["targets"], target["labels"]["replica"]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # no file of a replica
    try:
        return f'engine="{replica}"' not in _metrics(address)
    except ConnectionRefusedError:
        return True
    except (OSError, HTTPException):
        return False


def _metrics(address: str) -> str:
    connection = HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode("utf-8", "replace")
    finally:
        connection.close()
