"""Every variant of every kernel: the target's and the drafters'."""

from __future__ import annotations

from pathlib import Path

import drafters
from drafters.assistant.cuda.kernels import assistant_variants
from drafters.assistant.cuda.model import widened
from drafters.assistant.spec import released_size
from drafters.dflash import spec as dflash
from drafters.dflash.cuda import placing as dflash_placing
from drafters.eagle3.cuda.head import arch_of
from drafters.eagle3.cuda.kernels import draft_variants
from drafters.eagle3.spec import sized
from drafters.lookup.cuda import LOOKUP
from targets import arch, mini
from targets.arch import released
from targets.cuda import four_bits, launch, prefill_launch
from targets.cuda.attention import reaching_variants
from targets.cuda.launch import Variant
from targets.cuda.ranks import RANKS
from targets.cuda.variants import norm_variant, variants as target_variants
from targets.model_folder import read_arch

RELEASED = sorted(file.stem for file in Path(arch.__file__).with_name("released").glob("*.json"))
DRAFTERS = Path(drafters.__file__).parent
FOLDERS = (launch.SOURCES, *DRAFTERS.glob("**/sources"))
FILES = {file.stem: folder for folder in FOLDERS for file in folder.glob("*.cu")}
KINDS = {"fp8", "w8a8", "bf16", "int8", *four_bits.KINDS}
"""Of weights."""
SHARED = "gemma-4-31b", "gemma-4-12b"
"""Models that several cards share."""
SEEING = "gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-12b"
"""Models in which the rows of a picture see each other; a `mini` that sees is made for tests."""


def variants() -> set[Variant]:
    """What any released model and the embedded ones launch, with either cache."""
    archs = [released(name) for name in RELEASED]
    archs += [read_arch(mini.path(name)) for name in ("mini", "mini-e")]
    decoding = [target_variants(a, kv8, KINDS) for a in archs for kv8 in (0, 1)]
    heads = [draft_variants(arch_of(sized(a)), {"fp8", "bf16"}) for a in archs]
    assistants = [
        assistant_variants(widened(released_size(a).arch, ahead), kv8, {"fp8", "bf16"})
        for a in archs
        for kv8 in (0, 1)
        for ahead in (0, 1)
    ]
    ranks = {
        norm_variant(kind, released(name).hidden, count)
        for kind in KINDS
        for name in SHARED
        for count in RANKS
    }
    blocks = [
        target_variants(dflash_placing.arch_of(dflash.sized(released(name))), 0, {"fp8", "bf16"})
        for name in RELEASED
    ]
    seeing = [
        reaching_variants(a, kv8)
        for a in (*map(released, SEEING), read_arch(mini.path("mini")))
        for kv8 in (0, 1)
    ]
    drafting = *heads, *assistants, *blocks
    return prefill_launch.variants().union({LOOKUP}, ranks, *decoding, *drafting, *seeing)


def needed(file: str) -> list[Variant]:
    """The variants of one .cu file; of one that no model uses the file as it is."""
    found = {v for v in variants() if v.file == file} or {Variant(file, folder=FILES[file])}
    return sorted(found, key=repr)


def covering(made: list[Variant]) -> list[Variant]:
    """Some of them, in which each value of a macro is met; the slow test has them all."""
    chosen, left = [], {macro for variant in made for macro in variant.macros}
    while left or not chosen:
        chosen.append(max(made, key=lambda variant: len(left & set(variant.macros))))
        left -= set(chosen[-1].macros)
    return chosen


def changed(variant: Variant, file: str, before: str, after: str, folder: Path) -> Variant:
    """The variant in `folder`, beside all sources, of which one file has a line in place of
    another. Headers come from `launch.SOURCES`: a caller sets that to the folder."""
    for source in launch.SOURCES.glob("*.cu*"):
        (folder / source.name).write_text(source.read_text())
    whole = (folder / file).read_text()
    assert whole.count(before) == 1, (file, before)
    (folder / file).write_text(whole.replace(before, after))
    return Variant(variant.file, variant.macros, folder)
