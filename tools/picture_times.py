"""How long a picture takes on a GPU: the encoder of true size at several budgets, and the first
token of a prompt with one picture beside that of a text as long. Weights are random.

    python tools/picture_times.py gemma-4-31b --dtype fp8
    python tools/picture_times.py gemma-4-e4b --tower-only --device cpu --budgets 70
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.pictures import Picture, PlacedPicture, place_ids
from specdec.core.types import Sequence
from targets.arch import Arch, released
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.tower import PictureEncoder, VisionWeights
from targets.vision.preprocessing import Patches, of_levels
from targets.vision.rows import SoftTokens
from targets.vision.spec import PictureIds, TowerSpec, VisionSpec
from targets.vision.tensors import EMBEDDER, TOWER, layer_tensors, vision_tensors

SMALL = TowerSpec(16, 3072, 12, 64, 100.0, True, False)
LARGE = TowerSpec(27, 4304, 16, 72, 100.0, False, True)
SIDES: dict[str, tuple[int, TowerSpec | None]] = {
    "gemma-4-e2b": (768, SMALL),
    "gemma-4-e4b": (768, SMALL),
    "gemma-4-26b-a4b": (1152, LARGE),
    "gemma-4-31b": (1152, LARGE),
    "gemma-4-12b": (3840, None),
}
"""Width and tower of each size's image side."""
IDS = PictureIds(255999, 258880, 258882)
TEXT = 24
"""Tokens of text around a picture."""
WIDE_BOUND = 100.0
"""Clipped layers' bounds, which clip nothing here."""


def spec_of(name: str) -> VisionSpec:
    width, tower = SIDES[name]
    patches, places = (Patches(48, 1), 1120) if tower is None else (Patches(16, 3), 10240)
    return VisionSpec(patches, width, places, 1e-6, tower, IDS, 280, 1120)


def random_encoder(spec: VisionSpec, arch: Arch, device: str) -> PictureEncoder:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not shape:
            value = -WIDE_BOUND if name.endswith("_min") else WIDE_BOUND
            return torch.tensor(value, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=generator, device=device)
        return (noise * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * noise).to(dtype)

    prefix = EMBEDDER if spec.tower is None else TOWER
    shapes = vision_tensors(spec, arch.hidden).items()
    top = {n.removeprefix(prefix): draw(n, s) for n, s in shapes if ".layers." not in n}
    count = 0 if spec.tower is None else spec.tower.layers
    layers = tuple({n: draw(n, s) for n, s in layer_tensors(spec).items()} for _ in range(count))
    return PictureEncoder(spec, VisionWeights(top, layers), arch.eps)


def picture_of(spec: VisionSpec, budget: int, seed: int) -> Picture:
    """One that fills most of a budget."""
    levels = np.random.default_rng(seed).integers(0, 256, (672, 960, 3), np.uint8)
    return of_levels(levels, budget, spec.patches)


def milliseconds(work: Callable[[int], Any], device: str, tries: int) -> float:
    """The median of so many, after two that warm up. work: is given the try's number."""
    took = []
    for number in range(tries + 2):
        began = time.perf_counter()
        work(number)
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(took[2:]), 2)


def first_tokens(
    target: Any, encoder: PictureEncoder, budget: int, device: str, tries: int
) -> dict[str, float]:
    """Milliseconds to the first token: of a text, and of a prompt as long with one picture, which
    is another each time."""
    target.soft_tokens, target.vision = SoftTokens(encoder), encoder.spec
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    tokens = picture_of(encoder.spec, budget, 0).tokens

    def text(number: int) -> None:
        ids = np.random.default_rng(number).integers(3, 9999, tokens + 2 + TEXT).tolist()
        engine.run_to_end([Sequence(ids, max_tokens=1, reuse=None)])

    pictures = [picture_of(encoder.spec, budget, number) for number in range(tries + 2)]

    def picture(number: int) -> None:
        around = np.random.default_rng(number).integers(3, 9999, TEXT).tolist()
        ids = [*around[:4], IDS.begin, *place_ids(5, tokens), IDS.end, *around[4:]]
        placed = (PlacedPicture(5, pictures[number]),)
        engine.run_to_end([Sequence(ids, max_tokens=1, reuse=None, pictures=placed)])

    return {
        "tokens": tokens + 2 + TEXT,
        "text_ms": milliseconds(text, device, tries),
        "picture_ms": milliseconds(picture, device, tries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SIDES))
    parser.add_argument("--dtype", default="fp8", help="of the text model")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[70, 280, 1120])
    parser.add_argument("--tower-only", action="store_true")
    parser.add_argument("--tries", type=int, default=10)
    asked = parser.parse_args()
    spec, arch = spec_of(asked.model), released(asked.model)
    encoder = random_encoder(spec, arch, asked.device)
    found: dict[str, Any] = {"model": asked.model, "tower_ms": {}, "first_token": {}}
    for budget in asked.budgets:
        picture = picture_of(spec, budget, 0)

        def encode(number: int, own: Picture = picture) -> Any:
            return encoder.encode(own)

        took = milliseconds(encode, asked.device, asked.tries)
        found["tower_ms"][budget] = {"tokens": picture.tokens, "ms": took}
        print(json.dumps(found["tower_ms"]), flush=True)
    if not asked.tower_only:
        both_ways = replace(arch, pictures_both_ways=spec.tower != SMALL)
        options = CudaOptions(
            slots=1, max_len=2048, dtype=asked.dtype, device=asked.device, vision=spec
        )
        target = random_target(both_ways, options)
        for budget in asked.budgets:
            times = first_tokens(target, encoder, budget, asked.device, asked.tries)
            found["first_token"][budget] = times
    print(json.dumps(found))


if __name__ == "__main__":
    main()
