"""What Google publishes on the Hugging Face hub for each size of Gemma 4."""

from __future__ import annotations

import re

from targets.arch import Arch, released

SIZES = {
    "gemma-4-e2b": "E2B",
    "gemma-4-e4b": "E4B",
    "gemma-4-12b": "12B",
    "gemma-4-26b-a4b": "26B-A4B",
    "gemma-4-31b": "31B",
}
"""As `targets.arch.released` calls them, and as the hub does."""
UNPACKED = "-qat-q4_0-unquantized"
"""Of weights trained to be rounded to Q4_0, in bfloat16, and of their assistants."""
PACKED = "-qat-w4a16-ct"
"""The same weights in 4 bits, as compressed-tensors stores them."""


def instruct(size: str) -> str:
    """The hub's name of an instruction-tuned model; size: one of SIZES' values."""
    return f"google/gemma-4-{size}-it"


def size_of(name: str, arch: Arch | None = None) -> str | None:
    """Which size a model has, by its architecture, or by its name where that is all that is known;
    None for one that Google does not publish."""
    if arch is not None:
        return next(
            (s for known, s in SIZES.items() if _shape(released(known)) == _shape(arch)), None
        )
    found = re.search(rf"gemma-?4-({'|'.join(SIZES.values())})(?![a-z0-9])", name, re.IGNORECASE)
    return found and next(size for size in SIZES.values() if size.lower() == found[1].lower())


def _shape(arch: Arch) -> tuple[int, int, bool, int]:
    return arch.hidden, len(arch.layers), arch.moe is None, arch.per_layer_input


def instead_of_gguf(name: str) -> str:
    """Which safetensors have the weights of a GGUF file or repository, and how to run them."""
    size = size_of(name)
    if size == "26B-A4B":
        return f"{instruct(size)}{UNPACKED} with --dtype int4"
    return f"{instruct(size or 'SIZE')}{PACKED}"


REPORTED = {
    "12B": "lablup/mlxcel#744 reports 53 to 75 % of 12B's guesses right at K = 4",
    "26B-A4B": "eugr/spark-vllm-docker#343 reports 84 % of 26B-A4B's first guesses right, at K = 4",
    "31B": "noonghunna/club-3090#68 reports 92 % of 31B's first guesses right on code, and a mean "
    "acceptance length of 4 at K = 4",
}
"""What was published about the acceptance of Google's assistants, by size."""


def reported_acceptance(size: str) -> str | None:
    """A sentence with a published figure for an assistant of this size; None where none is
    known."""
    return REPORTED.get(size)
