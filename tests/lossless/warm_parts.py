"""What the campaign of warm chats is made of: models, drafters and engines with a prefix cache."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from drafters.kind import PlacedDrafter
from specdec.assembly.prefix import make_prefix_cache
from specdec.core.config import PrefixConfig
from specdec.core.engine import Engine
from specdec.core.prefix_cache.pool import Budget
from tests.lossless import campaign_parts as parts
from tests.support.tiny import VARIANTS

HEAD = {"ffw": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
WINDOWED = {"window": 40}
"""Rings, of one of the models' heads."""
LENGTH = {"mini": 2048, "mini-e": 2048}
"""Contexts; SHORT for the tiny models."""
SHORT = 1024
MINI_CHUNK = {"jax": 64, "cuda": 128}
"""As on a CPU by default."""
CHUNK = 32


@cache
def _longer(folder: Path) -> None:
    """Tiny models are written with a short context: positions cost nothing."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = SHORT
    file.write_text(json.dumps(config))


class WarmBench(parts.Bench):
    """A target, and engines on it with a prefix cache or without one."""

    name = "warm"
    """As a `Model` has one: it goes into the names of prefixes."""

    def __init__(
        self,
        backend: str,
        model: str,
        drafter: str,
        device: str = "cpu",
        context: int | None = None,
        **options: Any,
    ) -> None:
        """context: the context length; None for the model's value in `LENGTH`, else SHORT."""
        if model in VARIANTS:
            _longer(parts.folder(model))
        chunk = CHUNK if model in VARIANTS else MINI_CHUNK[backend]
        case = {"backend": backend, "model": model, "slots": 3, "k": 4, "chunk": chunk}
        case["max_len"] = context or LENGTH.get(model, SHORT)
        if backend == "cuda":
            case |= {"device": device, "short": chunk // 4}
        if drafter == "dflash":
            case["features"] = [0, 1, 2]
        if drafter == "eagle3":
            case["features"] = list(parts.embedded_layers(model) or (0, 1, 2))
        if drafter == "assistant":
            case["features"] = [len(parts.arch_of(model).layers) - 1]
        super().__init__(case | options)
        self.run: dict[str, Any] = {"drafter": drafter, "k": 4}
        own = {name: case[name] for name in ("max_len", "chunk", "k")}
        if drafter == "model":
            small = "mini-e" if model == "mini" else model
            self.run["draft"] = own | {"model": small}
        if drafter == "dflash":
            self.run["block"] = "zlab"
        if drafter == "eagle3" and model == "mini":
            self.run["head"] = {"trained": True, "max_position": case["max_len"]}
        elif drafter == "eagle3":
            vocab = self.target.vocab // 2
            self.run["head"] = HEAD | {"draft_vocab": vocab, "max_position": case["max_len"]}
            self.run["head"] |= WINDOWED if model == "12b" else {}
        if drafter == "assistant":
            self.run["assistant"] = {"clusters": None, "drafts": None, "ahead": 1}
        self._last: PlacedDrafter | None = None

    def cold(self, loop: str = "host") -> Engine:
        return self.engine(self.run | {"loop": loop})

    def warm(self, loop: str = "host", device: int = 2**40, host: int = 2**40) -> Engine:
        engine = self.cold(loop)
        assert self._last is not None
        model: Any = self
        cache = make_prefix_cache(
            model, self._last, engine.drafter, PrefixConfig(prefix_cache=True)
        )
        assert cache is not None
        cache.pool.budget = Budget(device, host)
        engine.prefix_cache = cache
        return engine

    def _placed(self, speculation: Any, run: dict[str, Any]) -> Any:
        self._last = super()._placed(speculation, run)
        return self._last
