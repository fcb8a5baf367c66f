"""Reads a checkpoint's image side, strict both ways: each tensor of it is there and has its shape,
and nothing of it is left unread. Quantised weights are widened: they are few and small."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specdec.core.errors import UserError
from targets.checkpoint import WIDE_TYPES, quantization_config
from targets.schemes import Weight
from targets.shards import tensors_of
from targets.soundness import is_sound, refuse_unsound
from targets.stored import dequantise
from targets.vision.spec import PROJECTOR, VisionSpec
from targets.vision.tensors import EMBEDDER, TOWER, Shape, vision_tensors

OWN = (TOWER, EMBEDDER, PROJECTOR.partition(".")[0] + ".")
"""How names of the image side begin, behind their prefix."""
NAMED = 8
"""Tensors that a refusal names."""
OFF = "download it again, or leave its images off (--images off)"


class VisionFiles:
    """The image side's tensors of one checkpoint folder; `read` is lazy."""

    def __init__(self, path: Path, spec: VisionSpec, hidden: int) -> None:
        """Opens, and checks names and shapes by the headers; raises UserError. hidden: the text
        model's size."""
        self.path, self.shapes = path, vision_tensors(spec, hidden)
        self._where = tensors_of(path)
        self._config = quantization_config(path)
        found = next(name for name in self._where if name.endswith(PROJECTOR))
        self._prefix = found.removesuffix(PROJECTOR)
        self._check_headers()

    def read(self, name: str) -> np.ndarray:
        """A tensor, as `vision_tensors` names it. Raises UserError."""
        weight, full = self._weight(name), self._prefix + name
        if weight is not None:
            return dequantise(weight.read())
        values = self._where[full].read(full)
        if values.dtype not in WIDE_TYPES:
            raise UserError(
                f"{self.path}: {full} is {values.dtype}, which specdec can't read: {OFF}"
            )
        if not is_sound(values):
            refuse_unsound(self.path, full)
        return values

    def _weight(self, name: str) -> Weight | None:
        """A weight that is stored quantised."""
        base = (self._prefix + name).removesuffix(".weight")
        parts = {f"{base}.{part}" for part in ("weight_packed", "weight_scale", "weight_scale_inv")}
        if len(self.shapes[name]) != 2 or parts.isdisjoint(self._where):
            return None
        return Weight(self.path, self._where, base, self.shapes[name], self._config)

    def _check_headers(self) -> None:
        used: set[str] = set()
        missing: set[str] = set()
        for name, shape in self.shapes.items():
            weight, full = self._weight(name), self._prefix + name
            if weight is not None:
                weight.check()
                used |= weight.names
            elif full in self._where:
                self._check_shape(full, shape)
                used.add(full)
            else:
                missing.add(full)
        own = {n for n in self._where if n.removeprefix(self._prefix).startswith(OWN)}
        self._refuse("lacks", missing)
        self._refuse("has unused", own - used)

    def _check_shape(self, full: str, shape: Shape) -> None:
        found = self._where[full].shape(full)
        if found != shape:
            raise UserError(
                f"{self.path}: {full} has shape {list(found)}, vision_config needs {list(shape)}: "
                f"{OFF}"
            )

    def _refuse(self, what: str, names: set[str]) -> None:
        if names:
            more = f" and {len(names) - NAMED} more" * (len(names) > NAMED)
            listed = ", ".join(sorted(names)[:NAMED])
            raise UserError(f"{self.path} {what} tensors of images: {listed}{more}: {OFF}")
