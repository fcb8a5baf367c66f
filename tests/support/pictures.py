"""Tiny checkpoints that see, their oracle (transformers' own towers and decoder), and pictures."""

from __future__ import annotations

import io
import json
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from specdec.core.pictures import PlacedPicture, place_ids
from targets.vision.preprocessing import of_levels
from targets.vision.spec import VisionSpec, read_vision
from targets.vision.tensors import vision_tensors
from tests.support.tiny import VARIANTS, VOCAB, oracle, write_tiny

BUDGET = 70
IDS = {"boi_token_id": 300, "image_token_id": 301, "eoi_token_id": 302}
TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "pooling_kernel_size": 3,
    "patch_size": 4,
    "position_embedding_size": 256,
    "default_output_length": BUDGET,
    "use_clipped_linears": False,
    "standardize": True,
}
CLIPPED = TOWER | {"use_clipped_linears": True, "standardize": False}
FREE: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "model_patch_size": 12,
    "mm_embed_dim": 40,
    "output_proj_dims": 40,
    "mm_posemb_size": 128,
    "num_soft_tokens": BUDGET,
    "rms_norm_eps": 1e-6,
}
VISION = {"31b": TOWER, "26b-a4b": TOWER, "e4b": CLIPPED, "12b": FREE}
"""By the text model's variant. Windows are of 12 tokens, so that pictures are longer."""


def write_seeing(path: Path, variant: str) -> Path:
    """Write a checkpoint folder with a random image side."""
    write_tiny(path, variant)
    config = json.loads((path / "config.json").read_text())
    config |= IDS | {"vision_config": VISION[variant]}
    both_ways = None if variant == "e4b" else "vision"
    config["text_config"]["use_bidirectional_attention"] = both_ways
    (path / "config.json").write_text(json.dumps(config))
    file = path / "model.safetensors"
    kept = {n: v for n, v in load_file(file).items() if "vision_tower" not in n}
    save_file(kept | {"model.vision_tower.x": np.zeros(1), PROJECTION: np.zeros(1)}, file)
    spec = read_vision(path)
    assert spec is not None
    own = random_vision(spec, config["text_config"]["hidden_size"])
    narrow = {f"model.{name}": value.astype(ml_dtypes.bfloat16) for name, value in own.items()}
    save_file(kept | narrow, file)
    return path


PROJECTION = "model.embed_vision.embedding_projection.weight"


def random_vision(spec: VisionSpec, hidden: int, seed: int = 5) -> dict[str, np.ndarray]:
    """float32, every value exactly representable in bfloat16."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = random.standard_normal(shape).astype(np.float32)
        if name.endswith(("_min", "_max")):  # bounds that bite
            value = (1.5 + 0.2 * noise) * (-1 if name.endswith("_min") else 1)
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif len(shape) == 1:
            value = 1 + 0.2 * noise
        else:
            value = noise * np.float32(shape[-1] ** -0.5)
        return np.asarray(value).astype(ml_dtypes.bfloat16).astype(np.float32)

    return {name: draw(name, shape) for name, shape in vision_tensors(spec, hidden).items()}


def levels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """RGB [height, width, 3] uint8: smooth, with noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [120 + 100 * np.sin((x * a + y * b) / 9) for a, b in ((1, 0), (0, 1), (1, 1))]
    noise = random.integers(0, 30, (height, width, 3))
    return (np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)


def file_of(pixels: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, form, **options)
    return written.getvalue()


def bomb(width: int, height: int, padding: int = 0) -> bytes:
    """A PNG's header of that size, with a few pixels, and a comment of `padding` bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        sum_ = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + sum_

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(99)))
    comment = chunk(b"tEXt", b"Comment\0" + b"a" * padding)
    return b"\x89PNG\r\n\x1a\n" + head + comment + pixels + chunk(b"IEND", b"")


def prompt_of(spec: VisionSpec, *parts: Any) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """Ids for the engine, and the pictures, of parts that are lists of ids or RGB levels."""
    ids: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        picture = of_levels(part, spec.budget, spec.patches)
        placed.append(PlacedPicture(len(ids) + 1, picture))
        places = place_ids(len(ids) + 1, picture.tokens)
        ids += [spec.ids.begin, *places, spec.ids.end]
    return ids, tuple(placed)


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, count).tolist()


class SeeingOracle:
    """transformers' modules on a folder of `write_seeing`, in float32."""

    def __init__(self, path: Path, variant: str, tensors: dict[str, np.ndarray]) -> None:
        """tensors: the text model's, as `write_tiny` returns them."""
        self.variant, spec = variant, read_vision(path)
        assert spec is not None
        self.spec = spec
        self.text = oracle(variant, tensors)
        own = random_vision(spec, self.text.config.hidden_size)
        self.see = _free(own, self.text.config) if variant == "12b" else _tower(variant, own)

    @torch.no_grad()
    def soft_tokens(self, placed: PlacedPicture) -> torch.Tensor:
        """[S, H]."""
        picture = placed.picture
        pixels = torch.from_numpy(picture.levels).float()[None] * np.float32(1 / 255)
        positions = torch.from_numpy(picture.positions).long()[None]
        return self.see(pixels, positions)

    @torch.no_grad()
    def log_probs(
        self, ids: list[int], pictures: tuple[PlacedPicture, ...], mistake: str = ""
    ) -> np.ndarray:
        """[S, V] float32. mistake: one of `MISTAKES`, made on purpose."""
        model, rows = self.text.model, torch.tensor([max(i, 0) for i in ids])[None]
        embedded = model.embed_tokens(rows)
        typed = rows.clone()
        for placed in pictures:
            soft = self.soft_tokens(placed)
            if mistake == "rows in reverse":
                soft = soft.flip(0)
            if mistake == "rows scaled":
                soft = soft * self.text.config.hidden_size**0.5
            embedded[0, placed.start : placed.stop] = soft
            typed[0, placed.start : placed.stop] = self.spec.ids.image
        kwargs = {}
        if self.text.config.hidden_size_per_layer_input:
            per_layer = typed if mistake == "per-layer row of the placeholder" else rows
            kwargs["per_layer_inputs"] = model.get_per_layer_inputs(per_layer, None)
        masks = self._masks(len(ids), pictures, mistake)
        out = model(inputs_embeds=embedded, attention_mask=masks, use_cache=False, **kwargs)
        logits = self.text.lm_head(out.last_hidden_state[0])
        cap = self.text.config.final_logit_softcapping
        return (cap * torch.tanh(logits / cap)).log_softmax(-1).numpy()

    def _masks(
        self, size: int, pictures: tuple[PlacedPicture, ...], mistake: str
    ) -> dict[str, torch.Tensor]:
        position = torch.arange(size)
        ahead = position[:, None] - position
        span = torch.full((size,), -1)
        for number, placed in enumerate(pictures):
            span[placed.start : placed.stop] = number
        same = (span[:, None] == span) & (span[:, None] >= 0)
        window = ahead < self.text.config.sliding_window
        both_ways = (self.variant != "e4b") != (mistake == "the other way on sliding layers")
        sliding = ((ahead >= 0) | same if both_ways else ahead >= 0) & window
        if mistake == "span not clamped":
            sliding = sliding | same
        full = ahead >= 0
        if mistake == "both ways on full layers":
            full = full | same
        least = torch.finfo(torch.float32).min
        return {
            f"{kind}_attention": torch.where(seen, 0.0, least)[None, None]
            for kind, seen in (("full", full), ("sliding", sliding))
        }


def _tower(variant: str, own: dict[str, np.ndarray]) -> Any:
    from transformers.models.gemma4 import modeling_gemma4 as theirs
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    config = Gemma4VisionConfig(**VISION[variant], attn_implementation="eager")
    tower = theirs.Gemma4VisionModel(config).float().eval()
    _fill(tower, own, "vision_tower.")
    weight = torch.from_numpy(own["embed_vision.embedding_projection.weight"])

    def see(pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = tower(pixel_values=pixels, pixel_position_ids=positions).last_hidden_state
        normed = torch.nn.functional.rms_norm(rows, rows.shape[-1:], eps=1e-6)
        return normed @ weight.T

    return see


def _free(own: dict[str, np.ndarray], text: Any) -> Any:
    from transformers.models.gemma4_unified import (
        configuration_gemma4_unified as configs,
        modeling_gemma4_unified as theirs,
    )

    config = configs.Gemma4UnifiedVisionConfig(**FREE)
    embedder = theirs.Gemma4UnifiedVisionEmbedder(config, text).float().eval()
    named = {
        n.replace("embed_vision.", "vision_embedder.multimodal_embedder."): v
        for n, v in own.items()
    }
    _fill(embedder, named, "vision_embedder.")

    def see(pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embedder(pixels, positions).pooler_output[0]

    return see


def _fill(module: torch.nn.Module, own: dict[str, np.ndarray], prefix: str) -> None:
    state = {
        n.removeprefix(prefix): torch.tensor(v) for n, v in own.items() if n.startswith(prefix)
    }
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)


MISTAKES = {
    "rows in reverse": tuple(VISION),
    "rows scaled": tuple(VISION),
    "the other way on sliding layers": tuple(VISION),
    "both ways on full layers": ("31b", "26b-a4b", "12b"),
    "span not clamped": ("31b", "26b-a4b", "12b"),
    "per-layer row of the placeholder": ("e4b",),
}
"""What others got wrong, and the variants in which it changes anything."""


@cache
def seeing(folder: Path, variant: str) -> tuple[Path, SeeingOracle]:
    """A checkpoint in this folder, and its oracle."""
    path = folder / variant
    tensors = write_tiny(path, variant)
    write_seeing(path, variant)
    return path, SeeingOracle(path, variant, tensors)


assert set(VISION) <= set(VARIANTS) and max(IDS.values()) < VOCAB
