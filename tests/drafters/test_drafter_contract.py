"""The drafter's contract is typed whole: no member is looked up by its name, and a misspelt one
fails the type checker."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

PACKAGES = ("specdec", "drafters", "targets", "training", "serve")
LOOKED_UP = {"getattr", "hasattr", "setattr", "delattr"}
ALLOWED = {
    "drafters/assistant/spec.py": 2,  # fields of two layers, compared
    "drafters/eagle3/config_json.py": 1,  # flags of a head's spec, written to JSON
    "drafters/eagle3/jax/head.py": 1,  # numbers of a head's spec, divided by a mesh
    "drafters/kind.py": 1,  # options, from a configuration of all drafters' fields
    "serve/engine_metrics.py": 3,  # counters of an acceptance, as labels name them
    "serve/foreign.py": 1,  # the kind of a part, parsed or not
    "serve/responses/emitter.py": 2,  # fields of a request, as the answer repeats them
    "serve/schema.py": 2,  # fields of a request that were set
    "serve/structure.py": 1,  # the field of a request that an error names
    "serve/translate.py": 1,  # fields of a request
    "serve/overrides.py": 1,  # fields of a request
    "specdec/__init__.py": 1,  # a lazy import
    "specdec/audit/identity.py": 2,  # fields of two identities, compared
    "specdec/cli/bench.py": 2,  # options, checked alike
    "specdec/cli/compile_report.py": 2,  # options, checked alike
    "specdec/cli/scraping.py": 1,  # an exception's reason
    "specdec/core/config.py": 1,  # options, checked alike
    "specdec/core/stats.py": 2,  # counters, added alike
    "specdec/core/types.py": 2,  # sampling parameters, checked alike
    "specdec/report/identity.py": 1,  # the name of a data type
    "specdec/report/speed.py": 1,  # times of a request, summarised alike
    "specdec/report/transformers_scores.py": 1,  # torch's type of a name
    "specdec/replicas.py": 1,  # options of a parsed command line
    "targets/backend.py": 1,  # a backend's class, in its module
    "targets/cuda/candidates.py": 1,  # columns of the sampling table
    "targets/cuda/int8.py": 1,  # parts of a stored weight
    "targets/cuda/params.py": 1,  # fields of a layer's weights
    "targets/cuda/staging.py": 1,  # a thread's own buffer
    "targets/cuda/upload.py": 1,  # a thread's own buffer
    "targets/hub.py": 2,  # an exception's response
}
"""Calls by file: none of them is on a drafter."""


def looked_up(source: str) -> list[str]:
    """The calls that read or write a member by its name."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in LOOKED_UP
    ]


def test_no_member_of_a_drafter_is_looked_up_by_name():
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    calls = {str(file.relative_to(ROOT)): looked_up(file.read_text()) for file in files}
    found = {file: len(these) for file, these in calls.items() if these}
    changed = {file: calls[file] for file in found if found[file] != ALLOWED.get(file)}
    assert found == ALLOWED, changed


def test_a_lookup_is_seen():
    assert looked_up("depth = getattr(drafter, 'depth', 7)\nhasattr(drafter, 'names')") == [
        "getattr(drafter, 'depth', 7)",
        "hasattr(drafter, 'names')",
    ]


TOY = """
from collections.abc import Callable, Sequence as Seqs
from typing import Any

import torch

from specdec.core.protocols import Drafter, LookupDrafter, Proposer
from specdec.core.types import Array, CycleChoice, Proposal, Sequence, Step
from targets.cuda import device_drafter as cuda, host_drafter as cuda_head
from targets.jax import device_drafter as jax, host_drafter as jax_head


class Host:
    def reset(self, seq: Sequence) -> None: ...
    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None: ...
    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal: ...
    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None: ...
    def matched(self, seq: Sequence) -> int: ...


class Captured:
    target: Any
    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice: ...
    def take_back(self) -> None: ...
    def propose(self, batch: cuda.CapturedBatch, k: int) -> Proposal: ...
    def observe(self, batch: cuda.CapturedBatch, step: Step, accepted: torch.Tensor) -> None: ...


class Traced:
    memory: Any
    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice: ...
    def program(self, needs_sampler: bool) -> jax.TracedProgram: ...
    def weights(self) -> Any: ...


def choices() -> list[CycleChoice]:
    return [CycleChoice(depth=1, variant="a", takes_known=False, repeats=False)]


def proposals(tokens: Array) -> list[Proposal]:
    return [Proposal(tokens, source=tokens, names=("a",))]


host: Drafter = Host()
lookup: LookupDrafter = Host()
captured: cuda.DeviceDrafter = Captured()
traced: jax.DeviceDrafter = Traced()
"""
HOOKS = (
    "def reset",
    "def prefill",
    "def propose",
    "def observe",
    "def matched",
    "def ready",
    "def take_back",
    "def program",
    "def weights",
    "    memory: Any",
    "depth=",
    "variant=",
    "takes_known=",
    "repeats=",
    "source=",
    "names=",
)


def misspelt(hook: str) -> str:
    """The toy drafter with this member's name wrong, everywhere."""
    word = re.findall(r"\w+", hook)[-1] if "memory" not in hook else "memory"
    return re.sub(re.escape(hook), hook.replace(word, word + "x"), TOY)


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> dict[str, int]:
    """Errors of the type checker by file."""
    folder = tmp_path_factory.mktemp("toys")
    toys = {f"toy_{number}.py": misspelt(hook) for number, hook in enumerate(HOOKS)}
    for name, text in {"toy.py": TOY, **toys}.items():
        (folder / name).write_text(text)
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(folder)]
    command += ["--pythonpath", sys.executable]
    out = subprocess.run(command, capture_output=True, text=True).stdout
    errors = [d for d in json.loads(out)["generalDiagnostics"] if d["severity"] == "error"]
    names = [Path(error["file"]).name for error in errors]
    return {name: names.count(name) for name in ("toy.py", *toys)}


def test_every_misspelt_hook_fails_the_type_checker(reported):
    assert reported.pop("toy.py") == 0
    silent = [hook for hook, errors in zip(HOOKS, reported.values(), strict=True) if not errors]
    assert not silent
