"""EAGLE-3 heads as files: both published forms, in and out. Strict: every tensor used, every
parameter filled, or an error that lists names."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from drafters.draft_ids import from_offsets, offsets
from drafters.eagle3 import config_json as names
from drafters.eagle3.spec import (
    Head,
    HeadSpec,
    check_pair,
    check_spec,
    tensors,
)
from drafters.export import write_folder
from specdec.core.errors import UserError
from targets.arch import Arch, read_config
from targets.checkpoint import quantization_config
from targets.schemes import Weight
from targets.shards import tensors_of
from targets.soundness import is_sound, refuse_unsound
from targets.stored import dequantise

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MATRIX = 2
"""Dimensions of weights that may be quantised."""
LAYER_PREFIXES = ("midlayer.", "layers.0.")
NOT_OURS = ("embed_tokens.weight", "t2d", "d2t")
"""The target's own table, the inverse of d2t, and d2t, which is read apart."""


def load_head(path: Path, arch: Arch) -> Head:
    """A head of either form for this target; weights float32.

    Raises UserError for a head of another target, and for files that are incomplete or unclear.
    """
    spec = names.parse_config(read_config(path), len(arch.layers))
    check_spec(spec)
    check_pair(spec, arch)
    stored = _read(path)
    weights = {}
    for name, shape in tensors(spec).items():
        found = _pop(stored, name, path)
        if found.shape != shape:
            raise UserError(
                f"{path}: {name} has shape {list(found.shape)}, its config.json needs "
                f"{list(shape)}: config and weights are of different heads"
            )
        weights[name] = found.astype(np.float32)
        if not is_sound(weights[name]):
            refuse_unsound(path, name)
    ids = _target_ids(spec, stored.pop("d2t", None), path)
    strange = [n for n in stored if n not in NOT_OURS]
    if strange:
        raise UserError(
            f"{path} has unused tensors: {', '.join(sorted(strange)[:8])}: this is not a plain "
            "EAGLE-3 head"
        )
    return Head(spec, weights, ids)


def save_flat(
    head: Head,
    out: Path,
    stop_ids: tuple[int, ...],
    dtype: str = "bfloat16",
    embedding: np.ndarray | None = None,
) -> None:
    """The form that vLLM, SGLang and SpecForge read. embedding [vocab, hidden]: the target's raw
    table, which only SpecForge needs; servers share the target's."""
    config = names.flat_config(head.spec, stop_ids) | {"torch_dtype": dtype}
    write_folder(out, config, _files(head, "midlayer.", dtype, embedding), "head")


def save_speculators(
    head: Head,
    out: Path,
    stop_ids: tuple[int, ...],
    verifier: Path | str,
    embedding: np.ndarray,
    k: int,
    dtype: str = "bfloat16",
) -> None:
    """The form that speculators and vLLM read. k: draft tokens per cycle that it proposes."""
    architectures = ["Gemma4ForCausalLM"]
    if Path(verifier).is_dir():
        architectures = read_config(Path(verifier)).get("architectures") or architectures
    config = names.speculators_config(head.spec, stop_ids, str(verifier), architectures, k)
    config["torch_dtype"] = config["transformer_layer_config"]["torch_dtype"] = dtype
    write_folder(out, config, _files(head, "layers.0.", dtype, embedding), "head")


def _read(path: Path) -> dict[str, np.ndarray]:
    """All tensors by their names in the file; quantised weights as their float32 values."""
    file = path / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{path} has no model.safetensors: give an EAGLE-3 head's folder")
    where = tensors_of(path)
    config, stored, used = quantization_config(path), dict[str, np.ndarray](), set[str]()
    for name, shard in where.items():
        shape, base = shard.shape(name), name.removesuffix(".weight")
        if base == name or len(shape) != MATRIX:
            continue
        weight = Weight(path, where, base, shape, config)
        weight.check()
        used |= weight.names
        read = weight.read()
        stored[name] = read.values if read.wide else dequantise(read)
    return stored | {name: where[name].read(name) for name in where.keys() - used}


def _pop(stored: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    for prefix in LAYER_PREFIXES:
        found = stored.pop(names.stored_name(name, prefix), None)
        if found is not None:
            return found
    raise UserError(f"{path} lacks the tensor {name}: this is not a whole EAGLE-3 head")


def _target_ids(spec: HeadSpec, d2t: np.ndarray | None, path: Path) -> np.ndarray:
    if d2t is None and spec.draft_vocab < spec.vocab:
        raise UserError(
            f"{path} lacks d2t, without which its {spec.draft_vocab} draft ids mean nothing among "
            f"{spec.vocab}: export the head again"
        )
    if d2t is None:
        return np.arange(spec.vocab)
    if d2t.shape != (spec.draft_vocab,):
        raise UserError(f"{path}: d2t has {d2t.size} entries, not draft_vocab {spec.draft_vocab}")
    return from_offsets(d2t, spec.vocab)


def _files(
    head: Head, prefix: str, dtype: str, embedding: np.ndarray | None
) -> dict[str, np.ndarray]:
    kind = DTYPES[dtype]
    stored = {names.stored_name(n, prefix): w.astype(kind) for n, w in head.weights.items()}
    stored["d2t"] = offsets(head.target_ids)
    stored["t2d"] = np.isin(np.arange(head.spec.vocab), head.target_ids)
    if embedding is not None:
        stored["embed_tokens.weight"] = np.asarray(embedding, np.float32).astype(kind)
    return stored
