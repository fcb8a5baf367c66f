"""Identity: which weights, which versions and which machine a receipt is of."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafters.registry import every
from specdec.assembly.model import Model
from specdec.audit.digests import file_digest
from specdec.core.config import SpeculationConfig
from specdec.core.provenance import gpus, run_record
from specdec.report.parts import Section
from specdec.report.profile import K
from specdec.report.questions import digest
from specdec.report.subject import Subject
from targets.hub import WANTED
from targets.mini import NAMES, checkpoint_path
from targets.published import size_of

SCHEMA_VERSION = 1
"""Of report.json: raised when a field changes its meaning or goes."""
FIXED_GPU_FACTS = ("name", "driver_version", "clocks.max.sm", "power.limit", "memory.total")
"""What nvidia-smi reports of a GPU that does not change while it runs."""


def weight_files(model: str, speculation: SpeculationConfig) -> list[dict[str, Any]]:
    """Name, size and sha256 of each file that is read of the model and of its drafter with weights.
    speculation: resolved. Raises UserError."""
    found = list(_files_of("model", checkpoint_path(model)))
    folder = _drafter_folder(speculation)
    if folder is not None:
        found += _files_of("drafter", folder)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_digest, [file for _, file in found]))
    return [
        {"of": of, "name": file.name, "bytes": file.stat().st_size, "sha256": sha256}
        for (of, file), sha256 in zip(found, digests, strict=True)
    ]


def measure(subject: Subject, files: list[dict[str, Any]]) -> Section:
    """The section. files: those of `weight_files`; empty for random weights."""
    model, target = subject.model, subject.model.target
    record = run_record(model.backend.device(model.config))
    del record["argv"]  # it has paths
    return (
        {"schema_version": SCHEMA_VERSION}
        | record
        | {
            "gpus": [{fact: gpu.get(fact) for fact in FIXED_GPU_FACTS} for gpu in gpus()],
            "files": files,
            "random_weights": subject.random,
            "arch": _described(model, subject.random),
            "backend": target.backend,
            "dtype": dtype_name(target.dtype),
            "kv_dtype": dtype_name(target.kv_dtype),
            "int8": model.config.int8,
            "slots": target.slots,
            "max_len": target.max_len,
            "k": K,
            "drafter": subject.speculation.drafter,
            "assistant": subject.weighted,
            "profile": subject.profile.name,
            "prompts": len(subject.prompts),
            "prompts_sha256": digest(subject.prompts),
        }
    )


def dtype_name(dtype: Any) -> str:
    """As users name it: numpy's types and torch's have names of their own."""
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")


def _described(model: Model, random: bool) -> str:
    """A public size, an embedded model's name, or the dimensions: never a folder's name."""
    if model.config.model in NAMES and not random:
        return model.config.model
    arch = model.target.arch
    dimensions = f"{len(arch.layers)} layers, {arch.hidden} wide, {arch.vocab} words"
    return size_of("", arch) or dimensions


def _drafter_folder(speculation: SpeculationConfig) -> Path | None:
    folders = (kind.folder for kind in every() if kind.folder is not None)
    name = speculation.draft_model
    return next((folder(name) for folder in folders), None) if name is not None else None


def _files_of(of: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in WANTED):
            yield of, file
