"""Programs that are compiled in a third of the time and run four times as long: right for random
models as tiny as the tests', wrong for what is proved of programs as users have them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.places import ROOT

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""The same for a process of its own, as XLA_FLAGS."""


def beside(*arguments: str, devices: int = 1) -> subprocess.Popen:
    """Another Python, while this one works; it compiles as this one does."""
    flags = f"--xla_force_host_platform_device_count={devices} {FLAGS}"
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
