"""The image's health check, as docker runs it; and where it and others write."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.places import ROOT
from tests.support.stub_web import answering


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_no_proxy_stands_between_a_container_and_its_health(status, code):
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("HEALTHCHECK")]
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "HTTP_PROXY", "all_proxy")}
    with answering({"/health": (status, b"")}) as port:
        command = json.loads(line[line.index("[") :].replace("8000", str(port)))
        done = subprocess.run(command, env=os.environ | proxies, capture_output=True, check=False)
    assert done.returncode == code, done


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("xla", "targets/jax/compile_cache.py"),
        ("kernels", "targets/cuda/launch.py"),
        ("digests", "specdec/audit/digests.py"),
    ],
)
def test_the_guide_names_each_folder_that_is_written(name, writer):
    guide = (ROOT / "docs/guide/install.md").read_text()
    kept = guide[guide.index("## Where files are kept") :]
    assert f'"{name}"' in (ROOT / writer).read_text() and f"`~/.cache/specdec/{name}`" in kept
