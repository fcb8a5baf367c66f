"""Run the Dockerfile's steps without docker, in a fresh folder: build, start, health check, end.

    python deploy/docker/rehearse.py    # as root, so that the server can run as another user

RUN steps run as they stand, with the image's folders under a temporary one. Steps that set up the
system's users are left out, and said. The server then runs as uid 10001, which may write its cache
and nothing else, until the HEALTHCHECK's command succeeds; SIGTERM must end it in order.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UID = 10001
PATIENCE = 300.0
"""Seconds for the server to become healthy."""
OF_THE_SYSTEM = ("useradd",)
SYSTEM = "/usr/local/bin:/usr/bin:/bin"
"""Where Python is everybody's: one in root's home could not be run by another user."""


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of the Dockerfile, in order."""
    lines = (HERE / "Dockerfile").read_text().splitlines()
    kept = [line for line in lines if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in kept]  # type: ignore[misc]


def build(image: Path) -> None:
    """Copy what .dockerignore lets through, and run the RUN steps."""
    names = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    source = image / "src"
    source.mkdir(parents=True)
    for name in names:
        path = ROOT / name
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=skip) if path.is_dir() else shutil.copy(
            path, source / name
        )
    (image / "opt").mkdir()
    for name, step in instructions():
        if name != "RUN":
            continue
        if step.startswith(OF_THE_SYSTEM):
            print(f"left out: {step}")
            continue
        here = re.sub(r"(?<![\w.])/opt/", f"{image}/opt/", step)
        print(f"RUN {step}", flush=True)
        subprocess.run(
            ["bash", "-ec", here],
            cwd=source,
            check=True,
            env=os.environ | {"EXTRAS": "", "PATH": SYSTEM},
        )
    shutil.rmtree(source)  # the second stage has none of it


def only(name: str) -> list[str]:
    """An instruction's JSON list."""
    (rest,) = [rest for found, rest in instructions() if found == name]
    return json.loads(rest[rest.index("[") :])


def serve(image: Path, home: Path) -> None:
    """Start it as it would be started, wait for its health, end it."""
    paths = f"{image}/opt/specdec/bin:{SYSTEM}"
    env = {"PATH": paths, "HOME": str(home), "SPECDEC_API_KEY": "rehearsal"}
    command = [*only("ENTRYPOINT"), *only("CMD")]
    command[0] = shutil.which(command[0], path=paths) or command[0]
    print(shlex.join(command), flush=True)
    server = subprocess.Popen(command, env=env, cwd=home, user=UID, group=UID, extra_groups=[])
    try:
        began = time.monotonic()
        while subprocess.run(only("HEALTHCHECK"), env=env, stderr=subprocess.DEVNULL).returncode:
            assert server.poll() is None, f"the server has ended: {server.returncode}"
            assert time.monotonic() - began < PATIENCE, "the server does not become healthy"
            time.sleep(1)
        print("healthy")
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == -15, f"SIGTERM should end it by the signal, but it ended with {code}"
    print("ended by SIGTERM, in order")


def main() -> None:
    if os.getuid() != 0:
        sys.exit("rehearse.py needs root, so that the server can run as another user")
    with tempfile.TemporaryDirectory(prefix="specdec-image-") as folder:
        Path(folder).chmod(0o755)
        image, home = Path(folder) / "image", Path(folder) / "home"
        build(image)
        cache = home / ".cache"
        cache.mkdir(parents=True)
        os.chown(cache, UID, UID)
        serve(image, home)


if __name__ == "__main__":
    main()
