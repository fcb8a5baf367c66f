"""The peer of `specdec bench --peer transformers`: its own decoding of the same dimensions.

Random weights, so only its speed means something. A run that fails is reported, not fatal.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.timing import random_prompts
from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from specdec.core.packages import missing
from targets.mini import checkpoint_path

if TYPE_CHECKING:
    from specdec.bench.sweep import Grid

RUNS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 0},
    "static cache, compiled": {"cache_implementation": "static"},
}
"""Name of a run -> options of `generate`; the run that may take minutes is last."""


def require() -> None:
    """Raise UserError where the peer is not installed."""
    if lacking := missing(("torch", "transformers")):
        raise UserError(f"--peer transformers: pip install {' '.join(lacking)}")


def text_config(random: str | None, model: str) -> dict[str, Any]:
    """The text decoder's config.json."""
    import targets

    if random is not None:
        file = Path(targets.__file__).parent / "released" / f"{random}.json"
    else:
        file = checkpoint_path(model) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    return config.get("text_config") or config


def measure(text: dict[str, Any], grid: Grid, k: int, model: ModelConfig) -> dict[str, Any]:
    """Decode tokens per second, the first token not counted, by run and batch."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() and model.device != "cpu" else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    facts = {"device": device, "dtype": str(dtype), "model_type": text["model_type"]}
    facts |= {"context": grid.contexts[0]}
    try:
        config = transformers.AutoConfig.for_model(**text)
        with torch.device(device):
            peer = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except Exception as failure:  # no room, or an older library
        rows = [row | _told(failure) for row in _rows(grid)]
    else:
        rows = [_run(peer, row, k, grid, text["vocab_size"]) for row in _rows(grid)]
    return {"name": "transformers", "version": transformers.__version__, **facts, "runs": rows}


def _rows(grid: Grid) -> list[dict[str, Any]]:
    """What is to be run. Prompt lookup takes one sequence at a time."""
    batches = {name: (1,) if name == "prompt lookup" else grid.batches for name in RUNS}
    return [{"name": name, "batch": batch} for name in RUNS for batch in batches[name]]


def _told(failure: Exception) -> dict[str, str]:
    """Whatever it is: its failure is a result, not ours."""
    return {"failure": f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"}


def _run(peer: Any, row: dict[str, Any], k: int, grid: Grid, vocab: int) -> dict[str, Any]:
    import torch

    batch = row["batch"]
    options = {key: value or k for key, value in RUNS[row["name"]].items()}
    prompts = random_prompts(batch, grid.contexts[0], vocab)
    try:
        ids = torch.tensor(prompts, device=peer.device)
        _generate(peer, ids, grid.max_tokens, options)  # compiles, and warms
        first = _generate(peer, ids, 1, options)
        whole = _generate(peer, ids, grid.max_tokens, options)
    except Exception as failure:
        return row | _told(failure)
    tokens = batch * (grid.max_tokens - 1)
    return row | {"seconds": whole, "first": first, "tokens_per_second": tokens / (whole - first)}


def _generate(peer: Any, ids: Any, count: int, options: dict[str, Any]) -> float:
    """Seconds of one greedy call that emits exactly `count` tokens."""
    import torch

    started = time.perf_counter()
    with torch.inference_mode():
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
