"""The user's configuration: one frozen dataclass per topic. The command line, `specdec.load` and
the records beside each result are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from specdec.core.types import Sampling

Loop = Literal["host", "device"]


class Common:
    """Marks an option that most users set: `--help` shows it by its help's first sentence, and
    `--help-all` shows every option."""


@dataclass(frozen=True)
class ModelConfig:
    model: Annotated[str, Common] = "mini"
    """A Gemma 4: a checkpoint folder, org/name on the Hugging Face hub (or org/name@revision), or
    mini / mini-e, the embedded models. What is not on disk yet is downloaded."""
    backend: Annotated[str, Common] = "jax"
    "The backend: jax (CPU, GPU, TPU) or cuda (our kernels on a Hopper GPU)."
    dtype: Annotated[Literal["float32", "bfloat16", "fp8", "fp8-w8a8", "int4"] | None, Common] = (
        None
    )
    """Arithmetic; by default the checkpoint's (float32 on a CPU). With cuda, of linear layers: fp8
    (8-bit weights), fp8-w8a8 (8-bit inputs too: coarser, faster from 32 rows at once on). int4:
    4 bits where the checkpoint has them, else the linear layers rounded by groups of 32 inputs."""
    kv_dtype: Annotated[Literal["bfloat16", "fp8", "int8"] | None, Common] = None
    """Data type of the KV cache, bfloat16 by default (float32 on a CPU). fp8 with cuda and int8
    with jax halve the cache and the bytes that long contexts read of it."""
    device: Literal["cuda", "cpu"] | None = None
    "Where cuda runs: a GPU, or the slow references on a CPU, which are for tests."
    int8: bool = False
    "Quantise the linear layers to int8 per output channel while loading."
    prefill_copy: bool = False
    """With cuda on a GPU: keep the linear layers' weights once more in the order in which long
    prompts are multiplied. 31B in FP8 has read 1,200 tokens in 80 instead of 95 ms, and takes 31 GB
    more; the output is the same."""
    max_len: Annotated[int | None, Common] = None
    """Context per sequence, prompt and output together, in tokens. By default the model's limit, at
    most 65,536, and as much as fits with a quarter of the memory beside the weights left to the
    prefix cache."""
    slots: Annotated[int, Common] = 4
    "Sequences that decode at the same time."
    tp: int = 1
    """Devices that share the model. With cuda 2, 4 or 8 GPUs with peer access, for 31B and
    12B: one answer comes sooner; for many users a server per card gives more tokens."""
    images: Literal["auto", "off"] = "auto"
    """Whether pictures are taken: auto, where the checkpoint has an image side (with cuda on one
    GPU); off leaves that on disk."""
    image_tokens: int | None = None
    """Most tokens that a picture becomes, for `detail: high`: 70, 140, 280, 560 or 1120. By default
    the checkpoint's own number, 280 for Gemma 4, which all other pictures have in any case."""
    cache: Path | None = None
    "Where jax keeps compiled programs between runs; ~/.cache/specdec/xla by default."


@dataclass(frozen=True)
class ReportModelConfig(ModelConfig):
    """The same for a receipt, whose speed is measured with up to eight users."""

    slots: Annotated[int, Common] = 8
    "Sequences that decode at the same time."


@dataclass(frozen=True)
class PrefixConfig:
    prefix_cache: bool = True
    """Keep the KV cache of prompts, for later prompts with the same beginning. Never changes the
    output."""
    cache_ram: float | None = None
    """Most GiB of host memory for prompts that the device has no room to keep; 0 for none. By
    default 8, or a quarter of the machine's where that is less."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of all drafters. `drafters.registry` adds each drafter's own options as fields."""

    drafter: Annotated[str, Common] = "auto"
    "What guesses. Never changes the output."
    k: Annotated[int, Common] = 4
    "Draft tokens per cycle, 0 to 31."
    draft_model: Annotated[str | None, Common] = None
    """The drafter's weights, a folder or org/name on the Hugging Face hub. They are a smaller
    Gemma 4 with the model's own tokenizer (E4B for 31B), or a head trained for this very model, as
    vLLM, SGLang or speculators read it. The embedded model brings both, and needs none."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    """How drafters with weights guess when sampling: with the target's own noise, which agrees with
    it more often, or their argmax (to compare)."""
    loop: Loop | None = None
    """Where cycles are driven: host, or device (no wait for the host). By default the faster one:
    device with cuda, and with jax on a GPU."""
    speculative_config: str | None = None
    """vLLM's JSON, understood as an alias: '{"method": "ngram", "num_speculative_tokens": 4}'."""

    @property
    def greedy(self) -> bool:
        """Whether drafters guess their argmax at any temperature."""
        return self.draft_sample_method == "greedy"


@dataclass(frozen=True)
class SamplingConfig:
    temperature: Annotated[float | None, Common] = None
    "0 is greedy. By default the value in the checkpoint's generation_config.json."
    top_p: Annotated[float | None, Common] = None
    "Nucleus sampling; 1 is off."
    top_k: Annotated[int | None, Common] = None
    "Sample from the k likeliest tokens; 0 is off."
    min_p: float = 0.0
    "Drop tokens less likely than this share of the likeliest."
    repetition_penalty: float = 1.0
    "Above 1 discourages tokens that occur in prompt or output."
    seed: Annotated[int, Common] = 0
    "Same seed, same output, whatever the drafter."

    def sampling(self, defaults: dict[str, float]) -> Sampling:
        """The request's `Sampling`; unset values come from the checkpoint's defaults."""

        def pick(name: str, fallback: float) -> float:
            value = getattr(self, name)
            return defaults.get(name, fallback) if value is None else value

        return Sampling(
            temperature=pick("temperature", 0.0),
            top_p=pick("top_p", 1.0),
            top_k=int(pick("top_k", 0)),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )
