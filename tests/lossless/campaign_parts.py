"""Builds targets, drafters and engines for a campaign's cases. Only this file of the campaign
imports the product's parts.

A case is plain JSON, see campaign_draw.py. Frameworks are imported in functions, so that a machine
with one of them is enough.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Seqs
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from drafters import registry
from drafters.assistant.kind import AssistantDraft
from drafters.assistant.spec import Clusters, random_assistant, released_size
from drafters.dflash.kind import BlockDraft
from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.kind import EagleDraft
from drafters.eagle3.spec import Head, HeadSpec, random_head
from drafters.kind import DraftRequest
from drafters.model.host import CATCH_UP
from drafters.model.kind import placed as placed_model
from specdec.assembly.engine import make_engine, require_exact
from specdec.assembly.model import Model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.pages import PagePlan
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.arch import Arch
from targets.backend import backend_of
from targets.model_folder import read_arch
from tests.support.block_heads import block_for
from tests.support.fakes import Noise
from tests.support.tiny import write_tiny

HEADS = {"mini": "mini-eagle3"}
"""Trained heads that come with a model: random ones are hardly ever right."""
PLAIN = {"drafter": "none", "k": 0, "loop": "host"}


@cache
def folder(model: str) -> Path:
    """An embedded model's, or that of a tiny checkpoint which is written for this process."""
    if model in mini.NAMES:
        return mini.path(model)
    path = Path(_folders().name) / model
    write_tiny(path, model)
    return path


@cache
def _folders() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="campaign-")


@cache
def arch_of(model: str) -> Arch:
    return read_arch(folder(model))


def embedded_layers(model: str) -> tuple[int, ...]:
    """What the model's own head reads, () where it has none."""
    return _trained(model).spec.layers if model in HEADS else ()


@cache
def _trained(model: str) -> Head:
    return load_head(embedded.path(HEADS[model]), arch_of(model))


def cuda_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load(case: dict[str, Any], draft: bool = False) -> Any:
    """The target, or with `draft` a draft model, compiled for its narrower width."""
    options = dict(case)
    path, backend = folder(options.pop("model")), options.pop("backend")
    options["features"] = tuple(options.get("features", ()))
    if backend == "jax":
        from targets.jax.load import JaxOptions, load_target

        options |= {"width": CATCH_UP} if draft else {}
        return load_target(path, JaxOptions(**options))
    from targets.cuda.load import CudaOptions, load_target as load_cuda

    options |= {"k": CATCH_UP - 1} if draft else {}
    if options.get("pages"):
        options["pages"] = PagePlan(*options["pages"])
    return load_cuda(path, CudaOptions(**options))


class Bench:
    """One target, and engines on it."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Raises UserError as a start does, too where rows depend on their place on this device."""
        self.case, self.target = case, load(case)
        chosen = {name: case.get(name) for name in ("device", "dtype")}
        self.config = ModelConfig(backend=case["backend"], **chosen)
        self.backend = backend_of(self.config)
        speculation = SpeculationConfig(drafter="none", k=case["k"])
        require_exact(self._model(speculation), speculation)

    def engine(self, run: dict[str, Any]) -> Engine:
        """run: drafter, k and loop, and what such a drafter needs."""
        if run["drafter"] in ("noise", "wild"):
            noise = Noise(self.target.vocab, run["drafter"] == "wild")
            driver = host_cycle(self.target, noise, run["k"])
            return Engine(self.target, noise, driver, pages=self.target.pages)
        low, high = run.get("lengths", (2, 5))
        own = {"ngram_min": low, "ngram_max": high}
        speculation = registry.config_type()(
            drafter=run["drafter"],
            k=run["k"],
            loop=run["loop"],
            draft_sample_method="greedy" if run.get("argmax") else "probabilistic",
            **own,
        )
        return make_engine(self._model(speculation, run), speculation)

    def _model(self, speculation: SpeculationConfig, run: dict[str, Any] | None = None) -> Model:
        tokenizer: Any = None  # nothing is read or written in words
        drafters = {speculation.drafter: self._placed(speculation, run or {})}
        loops = self.backend.loops(self.config)
        parts = self.target, tokenizer, self.backend, drafters, loops
        return Model(self.case["model"], *parts, self.config, speculation.k)

    def _placed(self, speculation: SpeculationConfig, run: dict[str, Any]) -> Any:
        if "draft" in run:
            same = {n: self.case[n] for n in ("backend", "device", "slots") if n in self.case}
            model = load(run["draft"] | same, draft=True)
            return placed_model(model, self.target, speculation.greedy)
        if "assistant" in run:
            draft = _assistant_draft(self.target.arch, run["assistant"], speculation.greedy)
        elif "block" in run:
            taps = tuple(self.case["features"])
            size = 16 if self.case.get("device") == "cuda" else None  # that kernels take
            block = block_for(self.target.arch, taps, run["block"], size)
            draft = BlockDraft(block, speculation.greedy)
        elif "head" in run:
            draft = EagleDraft(self._head(run["head"]), speculation.greedy)
        else:
            draft = registry.find(speculation.drafter).read(
                DraftRequest(self.target.arch, None, speculation)
            )
        return draft.place(self.backend, self.target, self.config)

    def _head(self, case: dict[str, Any]) -> Head:
        if case.get("trained"):
            head = _trained(self.case["model"])
            return head._replace(spec=replace(head.spec, max_position=case["max_position"]))
        arch, layers = self.target.arch, tuple(self.case["features"])
        return random_head(HeadSpec(hidden=arch.hidden, vocab=arch.vocab, layers=layers, **case))


def _assistant_draft(arch: Arch, case: dict[str, Any], greedy: bool) -> AssistantDraft:
    """A small random one, of either kind of head."""
    spec = released_size(arch)
    layers = tuple(replace(layer, ffw=96) for layer in spec.arch.layers)
    clusters = Clusters(*case["clusters"]) if case["clusters"] else None
    small = replace(spec.arch, hidden=64, layers=layers)
    made = random_assistant(replace(spec, arch=small, clusters=clusters))
    count = case["drafts"]
    ids = None if count is None else np.arange(count) * arch.vocab // count
    last = len(arch.layers) - 1
    return AssistantDraft(made._replace(target_ids=ids), (last,), case["ahead"], greedy)


def sequence(request: dict[str, Any], vocab: int, answer: Seqs[int] = ()) -> Sequence:
    """A request of a case, ready to be submitted. Its prompt is periodic, so that prompt lookup
    finds matches. answer: its plain answer, from which its prediction is made, if it has one."""
    prompt = request["prompt"]
    random = np.random.default_rng(prompt["seed"])
    text = np.resize(random.integers(0, vocab, prompt["period"]), prompt["length"]).tolist()
    sampling = dict(request["sampling"])
    bias = tuple((int(i), float(v)) for i, v in sampling.pop("logit_bias", ()))
    seq = Sequence(
        text,
        Sampling(**sampling, logit_bias=bias),
        max_tokens=request["max_tokens"],
        stop_ids=frozenset(request["stop_ids"]),
    )
    wrong = request.get("prediction")
    if wrong is not None and answer:
        other = random.integers(0, vocab, len(answer))
        predicted = np.where(random.random(len(answer)) < wrong, other, answer).tolist()
        seq.prediction = Prediction(PredictedText(predicted), seq.prompt_len)
    return seq
