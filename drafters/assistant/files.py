"""Assistants as files, in transformers' form. Strict: every tensor used, every parameter filled, or
an error that lists names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from drafters.assistant.config_json import config_of, parse_config
from drafters.assistant.spec import Assistant, AssistantSpec, paired, tensors
from drafters.export import write_folder
from specdec.core.errors import UserError
from targets.arch import Arch, read_config
from targets.generation import as_ids, check_generation
from targets.shards import Shard, tensors_of
from targets.soundness import is_sound, refuse_unsound
from targets.tensors import stored_name

OUTSIDE = {
    "pre_projection": "pre_projection.weight",
    "post_projection": "post_projection.weight",
    "centroids": "masked_embedding.centroids.weight",
    "token_ordering": "masked_embedding.token_ordering",
}
"""Tensors that lie beside the decoder."""
HEADS = {True: "model.embed_tokens.weight", False: "lm_head.weight"}
"""What the head is called, by whether it is tied; a file may hold both."""
KINDS = ("BF16", "F16", "F32")


def file_name(spec: AssistantSpec, name: str) -> str:
    """A tensor's name in a file."""
    if name == "head":
        return HEADS[spec.tied]
    return OUTSIDE.get(name) or stored_name("model.", name)


def load_assistant(path: Path, arch: Arch) -> Assistant:
    """The assistant in a folder, for this target. Raises UserError for one of another target, and
    for files that are damaged, incomplete or not an assistant's."""
    spec = paired(parse_config(read_config(path)), arch)
    where = tensors_of(path)
    table = {name: file_name(spec, name) for name in tensors(spec)}
    _refuse("lacks", set(table.values()) - where.keys(), path)
    _refuse("has unused", where.keys() - set(table.values()) - set(HEADS.values()), path)
    weights = {name: _read(path, where[table[name]], spec, name) for name in table}
    if spec.clusters:
        _check_ordering(path, weights["token_ordering"])
    return Assistant(spec, weights)


def _refuse(what: str, names: set[str], path: Path) -> None:
    if names:
        listed = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" * (len(names) > 8))
        raise UserError(f"{path} {what} tensors: {listed}: this is not a whole Gemma 4 assistant")


def _read(path: Path, shard: Shard, spec: AssistantSpec, name: str) -> np.ndarray:
    stored, shape = file_name(spec, name), tensors(spec)[name].shape
    if shard.shape(stored) != shape:
        raise UserError(
            f"{path}: {stored} has shape {list(shard.shape(stored))}, its config.json needs "
            f"{list(shape)}: config and weights are of different assistants"
        )
    known = ("I64", "I32") if name == "token_ordering" else KINDS
    if shard.dtype(stored) not in known:
        raise UserError(
            f"{path}: {stored} is {shard.dtype(stored)}, not one of {', '.join(known)}: take the "
            "assistant with unquantised weights, which are quantised on load"
        )
    values = shard.read(stored)
    if not is_sound(values):
        refuse_unsound(path, stored)
    return values


def _check_ordering(path: Path, ordering: np.ndarray) -> None:
    if not np.array_equal(np.sort(ordering), np.arange(len(ordering))):
        raise UserError(
            f"{path}: masked_embedding.token_ordering does not name each word once: the file is "
            "damaged, download it again"
        )


def save_assistant(assistant: Assistant, out: Path, dtype: str = "bfloat16") -> None:
    """As transformers reads it. Raises UserError on a full disk."""
    kind = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    stored = {
        file_name(assistant.spec, name): value if name == "token_ordering" else value.astype(kind)
        for name, value in assistant.weights.items()
    }
    config = config_of(assistant.spec) | {"dtype": dtype}
    write_folder(out, config, stored, "assistant")


def suppressed(path: Path, vocab: int) -> tuple[int, ...]:
    """Ids that the assistant's generation_config.json bars from drafts. Raises UserError."""
    file = path / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
        ids = values.get("suppress_tokens")
    except (AttributeError, ValueError) as problem:
        raise UserError(f"{file} is not a JSON object ({problem}): download it again") from None
    check_generation({"suppress_tokens": ids}, file, vocab)
    return as_ids(ids)
