"""A receipt from its sections: what is missing is measured, in one order, with one load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from specdec.assembly.engine import require_exact
from specdec.assembly.model import Model, load_model, random_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.provenance import run_record
from specdec.evaluation.prompts import Prompt
from specdec.report import (
    acceptance,
    doctor,
    equality,
    identity,
    memory,
    notes,
    parity,
    perplexity,
    speed,
)
from specdec.report.parts import TEACHER, Parts, Section
from specdec.report.profile import TEMPERATURES, USERS, Profile
from specdec.report.questions import digest
from specdec.report.subject import Progress, Subject
from targets.backend import backend_of

PARITY = "parity"
"""The section that is measured after the model is gone."""
ORDER = ("identity", "doctor", PARITY, "perplexity", "acceptance", "equality", "speed", "memory")
"""The sections as a receipt shows them."""


@dataclass(frozen=True)
class Request:
    """All that a receipt's sections depend on."""

    model: ModelConfig
    speculation: SpeculationConfig
    """Resolved."""
    profile: Profile
    output_len: int
    prompts: list[Prompt]
    accelerated: bool
    """Whether it runs on an accelerator."""
    text: str | None = None
    random: str | None = None
    """The public model whose size random weights have; None: a checkpoint is loaded."""

    def key(self, files: list[dict[str, Any]]) -> str:
        """Digest of settings, weights, prompts, version and machine. files: the weights'."""
        record = run_record(backend_of(self.model).device(self.model))
        settings = {
            "options": {k: v for k, v in asdict(self.model).items() if k not in ("model", "cache")},
            "profile": asdict(self.profile),
            "output_len": self.output_len,
            "users": USERS,
            "temperatures": TEMPERATURES,
            "random": self.random,
            "files": files,
            "prompts": digest(self.prompts),
            "text": self.text and hashlib.sha256(self.text.encode()).hexdigest(),
            "schema": identity.SCHEMA_VERSION,
            "made_by": {name: record[name] for name in ("specdec", "git", "versions", "device")},
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def load(self, progress: Progress) -> Subject:
        """The model with its drafters, proven exact. Raises UserError."""
        model = self._loaded(progress)
        require_exact(model, self.speculation, progress.status)
        return Subject(
            model,
            self.speculation,
            self.profile,
            self.prompts,
            self.output_len,
            progress,
            self.text,
            self.random is not None,
        )

    def _loaded(self, progress: Progress) -> Model:
        if self.random is not None:
            return random_model(self.random, self.model, self.speculation, progress.status)
        return load_model(self.model, self.speculation, progress.status)


def measure(
    request: Request,
    out: Path,
    progress: Progress,
    say: Callable[[str], None],
    again: Callable[[], None],
) -> Section:
    """The whole receipt; sections that are in the folder are not measured again.

    say: prints a line. again: where a device's memory goes only with the process, starts the
    command anew before the comparison with transformers. Raises UserError.
    """
    with progress.status("digests of the weights"):
        files = (
            []
            if request.random
            else identity.weight_files(request.model.model, request.speculation)
        )
    parts = Parts(out, request.key(files))
    steps = _steps(request, parts, files)
    missing = [name for name in steps if name not in parts and not _superseded(name, parts)]
    if len(missing) < len(steps):
        say(f"continues: {len(steps) - len(missing)} of {len(steps)} sections are there")
    if missing:
        _measure_missing(request, parts, {name: steps[name] for name in missing}, progress)
    if PARITY not in parts:
        if missing and parity.is_possible(parts[TEACHER]):
            again()
        _measure_parity(request, parts, progress)
    return receipt(parts)


def receipt(parts: Parts) -> Section:
    """All sections with what follows from them."""
    sections = {name: parts[name] for name in ORDER if name in parts}
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": {name: round(parts.seconds(name), 1) for name in sections},
        **sections,
        "equal": notes.equal(sections),
        "warnings": notes.warnings(sections),
        "skipped": notes.skipped(sections),
    }


def _measure_parity(request: Request, parts: Parts, progress: Progress) -> None:
    began = perf_counter()
    with progress.status("transformers scores the same ids"):
        section = parity.measure(parts[TEACHER], request.model)
    parts.put(PARITY, section, perf_counter() - began)
    parts.drop(TEACHER)


def _superseded(name: str, parts: Parts) -> bool:
    return name == TEACHER and PARITY in parts


def _steps(
    request: Request, parts: Parts, files: list[dict[str, Any]]
) -> dict[str, Callable[[Subject], Section]]:
    """By name, how each section is measured, in the order in which this is done."""
    steps: dict[str, Callable[[Subject], Section]] = {
        "identity": lambda subject: identity.measure(subject, files),
        "doctor": doctor.measure,
        "acceptance": acceptance.measure,
        "equality": lambda subject: equality.measure(subject, parts["acceptance"]),
        "speed": speed.measure,
        "memory": memory.measure,
        "perplexity": perplexity.measure,
        TEACHER: parity.teach,
    }
    if request.text is None:
        del steps["perplexity"]
    return steps


def _measure_missing(
    request: Request,
    parts: Parts,
    steps: dict[str, Callable[[Subject], Section]],
    progress: Progress,
) -> None:
    """The model is let go of at the end."""
    subject = request.load(progress)
    for name, step in steps.items():
        began = perf_counter()
        section = step(subject)
        parts.put(name, section, perf_counter() - began)
