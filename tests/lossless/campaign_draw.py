"""Random cases of a campaign: JSON documents, each complete in itself.

    {"target": {backend, model, slots, max_len, k, chunk, dtype, kv_dtype, features, ...},
     "runs": [{drafter, k, loop, draft | head | block | assistant | lengths,
               "requests": [{prompt, sampling, max_tokens, stop_ids, at, cancel, prediction}]}]}

`at` and `cancel` count the engine's turns. `prediction` is the share of the predicted answer that
is wrong, None where nothing is predicted. Several runs share a target: compiling it takes longest.
"""

from __future__ import annotations

from random import Random
from typing import Any

from drafters import registry
from specdec.core.pages import PagePlan
from tests.lossless import campaign_parts as parts
from tests.support.block_heads import FORMS
from tests.support.tiny import VARIANTS

Case = dict[str, Any]
TINY = tuple(VARIANTS)
CONTEXTS = (16, 17, 24, 33, 48, 64, 96, 129, 200, 400)
SLOW = 64
"""Longest context where references go row by row, in Python."""
RUNS = 4
"""On each target."""
HEADS = ["eagle3", "eagle3", "eagle3", "dflash", "dflash"]
"""Drafters that read some layers' outputs."""
WIDTHS = (7, 7, 15, 31)
"""Most guesses: JAX compiles a width for each."""


def draw_case(random: Random, backend: str, device: str) -> Case:
    """backend: jax or cuda; device: where cuda runs, cuda or cpu."""
    target = draw_target(random, backend, device)
    return {"target": target, "runs": [draw_run(random, target, device) for _ in range(RUNS)]}


def draw_target(random: Random, backend: str, device: str) -> dict[str, Any]:
    model = random.choice([*TINY, *TINY, "mini", "mini-e"])
    slow = backend == "cuda" and device == "cpu"
    longest = _context(random, SLOW if slow else CONTEXTS[-1])
    options: dict[str, Any] = {
        "backend": backend,
        "model": model,
        "slots": random.randint(1, 4),
        "max_len": longest,
        "k": random.choice(WIDTHS),
        "chunk": random.choice([1, 3, 8, 8, 16, 32, 128]),
        "features": _features(random, model),
    }
    if backend == "jax":
        return options | _jax(random)
    options |= _cuda(random, device)
    return options | {"pages": _pages(random, options)}


def _pages(random: Random, target: dict[str, Any]) -> list[int] | None:
    """A `PagePlan` with which texts give way to each other."""
    if random.random() < 0.3 or not target["short"]:
        return None
    cycles = 1 if target["device"] == "cpu" else 2  # a device loop is one ahead of the host
    page, ahead = random.choice([1, 4, 16]), cycles * (target["k"] + 1)
    sizes = page, 1, ahead, target["max_len"] + ahead, min(target["short"], 64)
    least = PagePlan(*sizes).least(target["slots"])
    return [page, least + random.choice([0, 0, 1]), *sizes[2:]]


def _jax(random: Random) -> dict[str, Any]:
    # batched rows have to be proved first, which compiles more
    mapped = {"mapped": False} if random.random() < 0.15 else {}
    return mapped | {
        "dtype": random.choice([None, None, "float32", "bfloat16"]),
        "kv_dtype": random.choice([None, None, "bfloat16", "int8"]),
        "narrow": random.choice([None, None, None, None, "int8", "int4"]),
    }


def _cuda(random: Random, device: str) -> dict[str, Any]:
    dtypes, caches = ["bfloat16", "fp8", "fp8-w8a8"], ["bfloat16", "fp8"]
    if device == "cpu":
        dtypes, caches = [*dtypes, "float32", "float32"], [*caches, "float32"]
    return {
        "device": device,
        "dtype": random.choice(dtypes),
        "kv_dtype": random.choice(caches),
        # chunks above this take the library's path
        "short": random.choice([0, 8, 128]) if device == "cpu" else 128,
        "graphs": random.random() < 0.8,
    }


def _context(random: Random, most: int) -> int:
    if random.random() < 0.5:
        return random.randint(16, min(most, 120))
    return random.choice([length for length in CONTEXTS if length <= most])


def _features(random: Random, model: str) -> list[int]:
    """Layers that an EAGLE-3 head reads, or the last, for an assistant; none where neither will be
    drawn."""
    if random.random() < 0.4:
        return []
    if random.random() < 0.4:
        return [len(parts.arch_of(model).layers) - 1]
    trained = parts.embedded_layers(model)
    if trained and random.random() < 0.7:
        return list(trained)
    count = len(parts.arch_of(model).layers)
    return sorted(random.sample(range(count), random.choice([2, 3])))


def draw_run(random: Random, target: dict[str, Any], device: str) -> dict[str, Any]:
    kinds = ["none", "ngram", "suffix", "auto", "model", "model", "noise", "wild"]
    fed = {0: [], 1: ["assistant"] * 3}.get(len(target["features"]), HEADS)
    drafter = random.choice(kinds + fed)
    run: dict[str, Any] = {
        "drafter": drafter,
        "k": random.choice([1, 2, 4, random.randint(0, target["k"]), target["k"]]),
        "loop": _loop(random, target, device, drafter),
        "argmax": random.random() < 0.2,
    }
    run |= _draft(random, drafter, target)
    details = random.random() < 0.3
    count = random.randint(1, 2 * target["slots"])
    run["requests"] = [draw_request(random, target, details) for _ in range(count)]
    return run


def _loop(random: Random, target: dict[str, Any], device: str, drafter: str) -> str:
    backend = target["backend"]
    if drafter in ("noise", "wild") or backend not in registry.find(drafter).device_loops:
        return "host"
    if backend == "cuda":  # references are not captured
        captured = device == "cuda" and target["dtype"] != "float32"
        return random.choice(["host", "device", "device"]) if captured else "host"
    return random.choice(["host", "host", "device"])


def _draft(random: Random, drafter: str, target: dict[str, Any]) -> dict[str, Any]:
    if drafter == "ngram":
        low = random.randint(1, 4)
        return {"lengths": [low, low + random.randint(0, 4)]}
    if drafter == "model":
        return {"draft": _draft_model(random, target)}
    if drafter == "assistant":
        return {"assistant": _assistant(random, target)}
    if drafter == "dflash":
        return {"block": random.choice(FORMS)}
    return {"head": _head(random, target)} if drafter == "eagle3" else {}


def _assistant(random: Random, target: dict[str, Any]) -> dict[str, Any]:
    vocab = parts.arch_of(target["model"]).vocab
    clusters = random.choice([None, None, [16, random.randint(1, 16)]])
    drafts = None if clusters else random.choice([None, 7, vocab // 2])
    return {"clusters": clusters, "drafts": drafts, "ahead": random.choice([0, 1, 1])}


def _shorter(random: Random, longest: int) -> int:
    """A draft's own context: the target's, or one that ends earlier."""
    return longest if random.random() < 0.4 else random.randint(16, longest)


def _draft_model(random: Random, target: dict[str, Any]) -> dict[str, Any]:
    """The target's own weights, with right drafts, or another model with the same vocabulary."""
    family = ("mini", "mini-e") if target["model"].startswith("mini") else TINY
    other = random.choice([target["model"], random.choice(family)])
    same = {name: target[name] for name in ("dtype", "kv_dtype")}
    chunk = random.choice([target["chunk"], 5, 8, 128])
    longest = _shorter(random, target["max_len"])
    return {"model": other, "max_len": longest, "chunk": chunk} | same


def _head(random: Random, target: dict[str, Any]) -> dict[str, Any]:
    longest = _shorter(random, target["max_len"])
    if target["features"] == list(parts.embedded_layers(target["model"])):
        return {"trained": True, "max_position": longest}
    vocab = parts.arch_of(target["model"]).vocab
    kinds: list[dict[str, Any]] = [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"fc_norm": True},
        {"norm_before_fc": True, "window": random.randint(2, 40)},
    ]
    return random.choice(kinds) | {
        "ffw": 64,
        "heads": 4,
        "kv_heads": random.choice([1, 2, 4]),
        "head_dim": random.choice([16, 64]),
        "draft_vocab": random.choice([1, 7, vocab // 2, vocab]),
        "max_position": longest,
    }


def draw_request(random: Random, target: dict[str, Any], details: bool) -> dict[str, Any]:
    """details: some requests have log-probabilities, which need separate programs."""
    slow = target.get("device") == "cpu"
    vocab = parts.arch_of(target["model"]).vocab
    length = _length(random, target["max_len"] - 1, target["chunk"])
    at = random.choice([0, 0, random.randint(0, 25)])
    stops = random.choice([0, 0, 3, 20, 40])  # the device loops check 16 of them
    return {
        "prompt": {
            "seed": random.randrange(2**16),
            "length": length,
            "period": random.randint(1, length),
        },
        "sampling": _sampling(random, vocab, details),
        "max_tokens": random.choice([1, 5, 12, 20 if slow else 40, 20 if slow else 10**6]),
        "stop_ids": sorted(random.sample(range(vocab), stops)),
        "prediction": random.choice([None, None, 0.0, 0.1, 1.0]),
        "at": at,
        "cancel": at + random.randint(0, 20) if random.random() < 0.15 else None,
    }


def _length(random: Random, most: int, chunk: int) -> int:
    edges = [1, 2, chunk, chunk + 1, most, most - 1, random.randint(1, most)]
    return max(1, min(most, random.choice([*edges, random.randint(1, 20)])))


def _sampling(random: Random, vocab: int, details: bool) -> dict[str, Any]:
    """Each parameter at rest or at work; half of all requests are greedy."""

    def some(share: float, *values: Any) -> Any:
        return random.choice(values) if random.random() < share else None

    drawn = {
        "temperature": some(0.5, 0.3, 0.8, 1.0, 2.0),
        "top_k": some(0.2, 1, 5, 40),
        "top_p": some(0.3, 0.1, 0.5, 0.95),
        "min_p": some(0.2, 0.02, 0.3),
        "repetition_penalty": some(0.2, 0.8, 1.3),
        "presence_penalty": some(0.15, -0.5, 0.7),
        "frequency_penalty": some(0.15, -0.2, 0.4),
        "logit_bias": some(0.15, [[random.randrange(vocab), random.choice([-100, 3, 100])]]),
        "logprobs": some(0.5, 0, 3, 20) if details else None,
    }
    rest = {name: value for name, value in drawn.items() if value is not None}
    return rest | {"seed": random.randrange(2**32)}
