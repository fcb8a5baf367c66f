"""What a checkpoint's image side needs of a device's memory, in bytes, before it is loaded."""

from __future__ import annotations

from targets.vision.rows import ROWS_BYTES
from targets.vision.spec import VisionSpec
from targets.vision.tensors import vision_values

WIDTHS_AT_ONCE = 10
"""Rows of the encoder's width that a layer holds for each patch: the stream, queries, keys, values,
what is mixed of them, and norms in float32."""
GATES_AT_ONCE = 4
"""Rows of the feed-forward's width: gate, up, their product, and one in float32."""


def weight_bytes(spec: VisionSpec | None, hidden: int, itemsize: int) -> int:
    """hidden: the text model's size. itemsize: bytes of a value on the device."""
    return 0 if spec is None else vision_values(spec, hidden) * itemsize


def workspace_bytes(
    spec: VisionSpec | None, itemsize: int, scores: int = 0, captured: int = 0
) -> int:
    """One picture's activations at the largest budget, and the soft tokens that are kept. scores:
    queries of which all scores are held at once. captured: patches up to which graphs keep
    activations of their own."""
    if spec is None:
        return 0
    tower = spec.tower
    values = WIDTHS_AT_ONCE * max(spec.width, spec.patch_values)
    if tower is not None:
        values += GATES_AT_ONCE * tower.ffw
        values += 2 * tower.heads * scores * 4 // itemsize
    patches = spec.most_patches + min(captured, spec.most_patches)
    return patches * values * itemsize + ROWS_BYTES
