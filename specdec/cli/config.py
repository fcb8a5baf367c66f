"""What the commands can be told: one frozen dataclass per topic, filled from TOML, then flags."""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from specdec.errors import UserError
from specdec.types import Sampling

DRAFTERS = ("none", "ngram")


def _numbers(kind: type, tokens: Rows[Token]) -> tuple[float, ...]:
    """`1,8,32`, or the option several times."""
    parts = [part for token in tokens for part in token.value.split(",") if part.strip()]
    return tuple(kind(part) for part in parts)


Whole = Annotated[
    tuple[int, ...], Parameter(converter=lambda _, tokens: _numbers(int, tokens), n_tokens=1)
]
Real = Annotated[
    tuple[float, ...], Parameter(converter=lambda _, tokens: _numbers(float, tokens), n_tokens=1)
]


@Parameter(name="*", group="Model")
@dataclass(frozen=True)
class ModelConfig:
    model: str = "mini"
    "A Hugging Face checkpoint folder of Gemma 4, or mini / mini-e, the embedded models."
    backend: str = "jax"
    "Who computes: jax (CPU, GPU, TPU) or cuda (our kernels on a Hopper GPU)."
    dtype: Literal["float32", "bfloat16", "fp8"] | None = None
    "Arithmetic; by default the checkpoint's (float32 on a CPU). fp8: linear layers, with cuda."
    kv_dtype: Literal["bfloat16", "fp8"] | None = None
    "What cuda caches keys and values in; bfloat16 by default."
    device: Literal["cuda", "cpu"] | None = None
    "Where cuda runs: a GPU, or the slow references on a CPU, which are for tests."
    int8: bool = False
    "Quantise the linear layers to int8 per output channel while loading."
    max_len: int = 2048
    "Context per sequence, prompt and output together, in tokens."
    slots: int = 4
    "Sequences that decode at the same time."
    tp: int = 1
    "Devices to split the model over."

    @property
    def captures(self) -> bool:
        """Whether cycles run as captured graphs, which is how our kernels are meant to be used;
        their references, which a CPU and float32 run, ask the host as they go."""
        return self.backend == "cuda" and self.device != "cpu" and self.dtype != "float32"


@Parameter(name="*", group="Speculation")
@dataclass(frozen=True)
class SpeculationConfig:
    drafter: str = "ngram"
    "Who guesses: none (plain decoding) or ngram (prompt lookup). Never changes the output."
    k: int = 4
    "Draft tokens per cycle, 0 to 31."
    ngram_min: int = 2
    "Shortest suffix that prompt lookup matches; shorter ones say too little."
    ngram_max: int = 5
    "Longest suffix that prompt lookup tries first."
    loop: Literal["host", "device"] | None = None
    "Where cycles are driven: host, or device (no wait for the host); cuda's default on a GPU."
    speculative_config: Annotated[str | None, Parameter(show_default=False)] = None
    """vLLM's JSON, understood as an alias: '{"method": "ngram", "num_speculative_tokens": 4}'."""

    def resolved(self, model: ModelConfig) -> SpeculationConfig:
        """Checked, with `speculative_config` folded in and the model's loop. Raises UserError."""
        from drafters.ngram import NgramDrafter

        chosen = self if self.speculative_config is None else self._from_vllm()
        if chosen.loop == "device" and model.backend == "cuda" and not model.captures:
            raise UserError(
                "--loop device captures CUDA graphs: with --device cpu or --dtype float32 use "
                "--loop host"
            )
        if chosen.drafter not in DRAFTERS:
            raise UserError(
                f"unknown drafter {chosen.drafter!r}: choose one of {', '.join(DRAFTERS)}"
            )
        NgramDrafter(chosen.ngram_min, chosen.ngram_max)  # refuses bad lengths before any loading
        return replace(chosen, loop=chosen.loop or ("device" if model.captures else "host"))

    def _from_vllm(self) -> SpeculationConfig:
        names = {
            "method": "drafter",
            "num_speculative_tokens": "k",
            "prompt_lookup_min": "ngram_min",
            "prompt_lookup_max": "ngram_max",
        }
        try:
            given = json.loads(self.speculative_config or "")
        except json.JSONDecodeError as problem:
            raise UserError(f"--speculative-config is not JSON: {problem}") from None
        if not isinstance(given, dict) or given.keys() - names.keys():
            strange = ", ".join(given.keys() - names.keys()) if isinstance(given, dict) else given
            raise UserError(
                f"--speculative-config: unknown key {strange}; known are {', '.join(names)}"
            )
        values = {names[key]: value for key, value in given.items()}
        for key, value in values.items():
            if not isinstance(value, str if key == "drafter" else int):
                raise UserError(f"--speculative-config: {value!r} does not fit {key}")
        return replace(self, speculative_config=None, **values)


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True)
class SamplingConfig:
    temperature: float | None = None
    "0 is greedy. By default what the checkpoint's generation_config.json says."
    top_p: float | None = None
    "Nucleus sampling; 1 is off."
    top_k: int | None = None
    "Sample from the k likeliest tokens; 0 is off."
    min_p: float = 0.0
    "Drop tokens less likely than this share of the likeliest."
    repetition_penalty: float = 1.0
    "Above 1 discourages tokens that occur in prompt or output."
    seed: int = 0
    "Same seed, same output, whatever the drafter."

    def sampling(self, defaults: dict[str, float], **extra: object) -> Sampling:
        """The request's `Sampling`, gaps filled from the checkpoint's defaults."""

        def pick(name: str, fallback: float) -> float:
            given = getattr(self, name)
            return defaults.get(name, fallback) if given is None else given

        return Sampling(
            temperature=pick("temperature", 0.0),
            top_p=pick("top_p", 1.0),
            top_k=int(pick("top_k", 0)),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            **extra,  # type: ignore[arg-type]
        )
