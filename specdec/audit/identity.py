"""A loaded model as receipts name it."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from specdec.assembly.model import Model
from specdec.audit.digests import weight_digests
from specdec.audit.making import Identity
from specdec.audit.receipt import Arithmetic, ModelPart
from specdec.core.provenance import versions
from specdec.core.version import VERSION
from targets.mini import checkpoint_path

LIBRARIES = {
    "jax": ("jax", "jaxlib", "libtpu"),
    "cuda": ("torch", "cuda-bindings", "nvidia-cuda-nvrtc"),
}
"""Packages that compute, or compile what does, by backend."""
CPU_FACTS = Path("/proc/cpuinfo")


def identity_of(model: Model) -> Identity:
    """The identity of a model that was loaded from files. Reads all of its weights once."""
    tokenizer = model.tokenizer
    return Identity(
        ModelPart(
            name=model.name,
            weights=weight_digests(checkpoint_path(model.config.model)),
            tokenizer=tokenizer.fingerprint,
            template=tokenizer.template_fingerprint,
            suppress=tuple(tokenizer.suppress_ids),
        ),
        _arithmetic(model),
    )


def differing(claimed: Identity, own: Identity) -> list[str]:
    """The parts in which two identities differ, so that their answers can't be compared."""
    parts = [f"model.weights ({name})" for name in _unlike_files(claimed.model, own.model)]
    parts += _unlike("model", claimed.model, own.model, ("tokenizer", "suppress"))
    told = [name for name in Arithmetic.model_fields if name in claimed.arithmetic.model_fields_set]
    return parts + _unlike("arithmetic", claimed.arithmetic, own.arithmetic, told)


def _unlike_files(claimed: ModelPart, own: ModelPart) -> list[str]:
    names = sorted({*claimed.weights, *own.weights})
    return [name for name in names if claimed.weights.get(name) != own.weights.get(name)]


def _unlike(where: str, claimed: Any, own: Any, names: Any) -> list[str]:
    pairs = ((name, getattr(claimed, name), getattr(own, name)) for name in names)
    return [f"{where}.{name}{_shown(a, b)}" for name, a, b in pairs if a != b]


def _shown(claimed: Any, own: Any) -> str:
    """Both values, where a person can read them."""
    if isinstance(claimed, dict):
        names = sorted(name for name in {*claimed, *own} if claimed.get(name) != own.get(name))
        pairs = (f"{n} {claimed.get(n)} against {own.get(n)} here" for n in names)
        return f" ({'; '.join(pairs)})"
    short = isinstance(claimed, int | str | None) and len(str(claimed)) < 64
    return f" ({claimed} against {own} here)" if short else ""


def _arithmetic(model: Model) -> Arithmetic:
    config, target = model.config, model.target
    cuda = config.backend == "cuda"
    assert config.max_len is not None, "the loader sets it"
    return Arithmetic.model_validate(
        {
            "backend": config.backend,
            "device": _device(model),
            "place": (config.device or "cuda") if cuda else None,
            "dtype": target.dtype if cuda else config.dtype,  # cuda's default depends on K
            "kv_dtype": config.kv_dtype,
            "int8": config.int8,
            "tp": config.tp,
            "slots": target.slots,
            "max_len": target.max_len,
            "width": target.max_draft + 1,
            "chunk": target.prefill_chunk,
            "features": tuple(target.plan.features),
            "pictures": 0 if cuda else target.plan.pictures,
            "target": hashlib.sha256(target.identity.encode()).hexdigest(),
            "flags": "" if cuda else os.environ.get("XLA_FLAGS", ""),
            "versions": {"specdec": VERSION, **_libraries(config.backend)},
        }
    )


def _libraries(backend: str) -> dict[str, str]:
    names = LIBRARIES[backend]
    return {name: v for name, v in versions(names).items() if name in names}


def _device(model: Model) -> str:
    device = model.backend.device(model.config)
    return f"{device}, {_processor()}" if "cpu" in device.lower() else device


def _processor() -> str:
    """The CPU's name, and a digest of its features: XLA generates code for just these."""
    try:
        lines = CPU_FACTS.read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    features = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"{facts.get('model name', platform.machine())} ({digest})"
