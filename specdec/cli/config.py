"""What the commands can be told: one frozen dataclass per topic, filled from TOML, then flags."""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from specdec.errors import UserError
from specdec.types import Sampling

DRAFTERS = ("none", "ngram", "model", "eagle3")
EMBEDDED_DRAFTS = {("model", "mini"): "mini-e", ("eagle3", "mini"): "mini-eagle3"}
"""Drafter and model for which weights to draft with come with specdec, so no path is needed."""


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
    dtype: Literal["float32", "bfloat16", "fp8", "fp8-w8a8"] | None = None
    """Arithmetic; by default the checkpoint's (float32 on a CPU). With cuda, of linear layers: fp8
    (8-bit weights), fp8-w8a8 (8-bit inputs too: coarser, faster from 32 rows at once on)."""
    kv_dtype: Literal["bfloat16", "fp8", "int8"] | None = None
    """What keys and values are cached in, bfloat16 by default (float32 on a CPU): fp8 with cuda,
    int8 with jax halve the cache and what long contexts read of it."""
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
    cache: Path | None = None
    "Where jax keeps compiled programs between runs; ~/.cache/specdec/xla by default."


@Parameter(name="*", group="Speculation")
@dataclass(frozen=True)
class SpeculationConfig:
    drafter: str = "ngram"
    """Who guesses: none (plain decoding), ngram (prompt lookup), model (a smaller Gemma 4 of the
    same tokenizer) or eagle3 (a head that reads the model's states). Never changes the output."""
    k: int = 4
    "Draft tokens per cycle, 0 to 31."
    draft_model: str | None = None
    """The drafter's folder. --drafter model: any smaller Gemma 4 with the model's own tokenizer
    (E4B for 31B). --drafter eagle3: a head trained for this very model, as vLLM, SGLang or
    speculators read it. mini brings both, mini-e and mini-eagle3, and needs none."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    """How model and eagle3 guess when sampling: with the target's own noise, which agrees with it
    more often, or their argmax (to compare)."""
    ngram_min: int = 2
    "Shortest suffix that prompt lookup matches; shorter ones say too little."
    ngram_max: int = 5
    "Longest suffix that prompt lookup tries first."
    loop: Literal["host", "device"] | None = None
    """Where cycles are driven: host, or device (no wait for the host); by default the faster one:
    device with cuda, and with jax in one process on a GPU; else host."""
    speculative_config: Annotated[str | None, Parameter(show_default=False)] = None
    """vLLM's JSON, understood as an alias: '{"method": "ngram", "num_speculative_tokens": 4}'."""

    def resolved(self, model: ModelConfig, random: bool = False) -> SpeculationConfig:
        """Checked, with `speculative_config` folded in. random: weights are made, an EAGLE-3
        head's too. Raises UserError."""
        from drafters.ngram.host import NgramDrafter

        chosen = self if self.speculative_config is None else self._from_vllm()
        if chosen.drafter not in DRAFTERS:
            raise UserError(
                f"unknown drafter {chosen.drafter!r}: choose one of {', '.join(DRAFTERS)}"
            )
        chosen._refuse_on_cuda(model)
        NgramDrafter(chosen.ngram_min, chosen.ngram_max)  # refuses bad lengths before any loading
        draft = chosen._draft_model(model.model, random)
        return replace(chosen, draft_model=draft)

    def _refuse_on_cuda(self, model: ModelConfig) -> None:
        """Raise UserError for what the CUDA backend can't capture as graphs: its references, which
        a CPU and float32 run, ask the host as they go."""
        references = model.device == "cpu" or model.dtype == "float32"
        if self.loop == "device" and model.backend == "cuda" and references:
            raise UserError(
                "--loop device captures CUDA graphs: with --device cpu or --dtype float32 use "
                "--loop host"
            )

    @property
    def drafts(self) -> bool:
        """Whether the drafter has weights of its own."""
        return self.drafter in ("model", "eagle3")

    def _draft_model(self, model: str, random: bool) -> str | None:
        """The draft model's folder or name, None for drafters that have none. Raises UserError."""
        if random and self.drafter == "eagle3":
            if self.draft_model is not None:
                raise UserError(
                    "--random makes an EAGLE-3 head for the model's size: leave --draft-model out"
                )
            return None
        if not self.drafts:
            if self.draft_model is not None:
                raise UserError(
                    "--draft-model is for --drafter model or eagle3, but the drafter is "
                    f"{self.drafter}"
                )
            return None
        found = self.draft_model or EMBEDDED_DRAFTS.get((self.drafter, model))
        if found is None:
            raise UserError(
                f"--drafter {self.drafter} needs --draft-model PATH; without one, every model "
                "drafts with --drafter ngram, and mini with any"
            )
        return found

    def _from_vllm(self) -> SpeculationConfig:
        names = {
            "method": "drafter",
            "model": "draft_model",
            "draft_sample_method": "draft_sample_method",
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
            # by type, for true is an int to Python
            if type(value) is not (int if key in ("k", "ngram_min", "ngram_max") else str):
                name = next(theirs for theirs, ours in names.items() if ours == key)
                raise UserError(f"--speculative-config: {value!r} does not fit {name}")
        if values.get("drafter") == "draft_model":  # what vLLM calls it
            values["drafter"] = "model"
        if values.get("draft_sample_method", "greedy") not in ("probabilistic", "greedy"):
            raise UserError(
                "--speculative-config: draft_sample_method must be probabilistic or greedy, got "
                f"{values['draft_sample_method']!r}"
            )
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
