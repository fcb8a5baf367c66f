"""Scores of token ids by transformers: a process of its own, from JSON on stdin to JSON on stdout.

The answer is {"texts": [...], "version": ..., "device": ...}, or {"why_not": a sentence} without a
path in it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as missing:
        print(json.dumps({"why_not": f"{missing.name} is not installed"}))
        return
    try:
        print(json.dumps(_answer(request)))
    except Exception as failure:  # whatever it is: its failure is a result, not ours
        print(json.dumps({"why_not": f"transformers failed: {type(failure).__name__}"}))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() and request["device"] != "cpu" else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        request["folder"],
        dtype=getattr(torch, request["dtype"]),
        local_files_only=True,
        attn_implementation="eager",
    )
    model.to(device).eval()
    texts = [_scored(model, text["ids"], text["prompt_len"]) for text in request["texts"]]
    return {"texts": texts, "version": transformers.__version__, "device": device}


def _scored(model: Any, ids: list[int], prompt_len: int) -> dict[str, Any]:
    """Of each token behind the prompt: its log-probability; the likeliest token and its own."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=model.device)).logits[0].float()
    logprobs = torch.log_softmax(logits[prompt_len - 1 : -1], -1)
    answer = torch.tensor(ids[prompt_len:], device=logprobs.device)
    best = logprobs.max(-1)
    return {
        "logprobs": logprobs.gather(-1, answer[:, None])[:, 0].tolist(),
        "best": best.indices.tolist(),
        "best_logprobs": best.values.tolist(),
    }


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
