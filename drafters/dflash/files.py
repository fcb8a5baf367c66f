"""Block drafters as files. Strict: every tensor used, every parameter filled, or an error that
lists names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from drafters.dflash.config_json import dspark_config, parse_config
from drafters.dflash.spec import BlockHead, BlockSpec, check_pair, check_spec, tensors
from drafters.draft_ids import from_offsets, offsets
from drafters.export import write_folder
from specdec.core.errors import UserError
from targets.arch import Arch, read_config
from targets.checkpoint import quantization_config
from targets.schemes import Weight
from targets.shards import Shard, tensors_of
from targets.soundness import is_sound, refuse_unsound
from targets.stored import dequantise

WHOLE_NAMES = (
    "base_kernel",
    "predecessor_codebook",
    "successor_codebook",
    "layer_scalar",
    "proj.bias",
)
"""Ends of names that files write without `.weight`."""
TABLE = "embed_tokens.weight"
HEAD = "lm_head.weight"
OFFSETS = "d2t"
COPIES = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""The inverse of `d2t`, and the target's own: older files of speculators have them."""
LISTED = 8
"""Names that an error lists."""
MATRIX = 2
"""Dimensions of weights that may be quantised."""


def stored_name(name: str) -> str:
    """A tensor's name in a file."""
    return name if name.endswith(WHOLE_NAMES) else f"{name}.weight"


def load_head(path: Path, arch: Arch) -> BlockHead:
    """A head of any dialect for this target; weights as the file stores them, float32 where it has
    them quantised. Raises UserError for a head of another target, and for files that are
    incomplete or unclear."""
    spec = parse_config(read_config(path))
    check_spec(spec)
    check_pair(spec, arch)
    files = tensors_of(path)
    spec = replace(spec, own_table=TABLE in files, own_head=HEAD in files)
    if spec.draft_vocab < spec.vocab and not spec.own_head:
        raise UserError(
            f"{path} lacks {HEAD}: its config.json has a draft vocabulary of {spec.draft_vocab} "
            "words, which needs a head of its own"
        )
    weights = _read(path, files, spec)
    return BlockHead(spec, weights, _target_ids(spec, files, path))


def save_dspark(
    head: BlockHead, out: Path, stop_ids: tuple[int, ...], verifier: str, dtype: str = "bfloat16"
) -> None:
    """A causal head with a previous-token bias, as speculators and vLLM read it. verifier: the
    target's folder or hub name. Raises UserError on a full disk."""
    kind = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    stored = {stored_name(name): np.asarray(w).astype(kind) for name, w in head.weights.items()}
    if head.target_ids is not None:
        stored[OFFSETS] = offsets(head.target_ids)
        stored["t2d"] = np.isin(np.arange(head.spec.vocab), head.target_ids)
    write_folder(out, dspark_config(head.spec, stop_ids, verifier, dtype), stored, "block drafter")


def _read(path: Path, files: Mapping[str, Shard], spec: BlockSpec) -> dict[str, np.ndarray]:
    config, used, weights = quantization_config(path), {OFFSETS, *COPIES}, dict[str, np.ndarray]()
    missing = list[str]()
    for name, shape in tensors(spec).items():
        stored = stored_name(name)
        weight = Weight(path, files, name, shape, config)
        if not {stored, f"{name}.weight_packed"} & files.keys():
            missing.append(stored)
            continue
        quantisable = len(shape) == MATRIX and stored != name
        used |= weight.names if quantisable else {stored}
        values = _matrix(weight) if quantisable else _plain(path, files[stored], stored, shape)
        if not is_sound(values):
            refuse_unsound(path, stored)
        weights[name] = values
    _refuse(f"{path} lacks tensors", missing)
    _refuse(f"{path} has tensors that nothing reads", sorted(files.keys() - used))
    return weights


def _matrix(weight: Weight) -> np.ndarray:
    weight.check()
    read = weight.read()
    return read.values if read.wide else dequantise(read)


def _plain(path: Path, shard: Shard, stored: str, shape: tuple[int, ...]) -> np.ndarray:
    if shard.shape(stored) != shape:
        raise UserError(
            f"{path}: {stored} has shape {list(shard.shape(stored))}, its config.json needs "
            f"{list(shape)}: config and weights are of different heads"
        )
    return shard.read(stored)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise UserError(
            f"{what}: {', '.join(names[:LISTED])}{more}: this is not a whole block drafter that "
            "its config.json describes"
        )


def _target_ids(spec: BlockSpec, files: Mapping[str, Shard], path: Path) -> np.ndarray | None:
    if spec.draft_vocab == spec.vocab:
        return None
    if OFFSETS not in files:
        raise UserError(
            f"{path} lacks {OFFSETS}, without which its {spec.draft_vocab} draft ids mean nothing "
            f"among {spec.vocab}: export the head again"
        )
    d2t = _plain(path, files[OFFSETS], OFFSETS, (spec.draft_vocab,))
    return from_offsets(d2t, spec.vocab)
