"""From a recipe and distilled folders to a trainer: data split and packed, the teacher loaded, the
draft vocabulary counted, the feature cache filled, the run signed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from drafters.frequency import draft_vocabulary
from specdec.core.alone import hold_alone
from targets.arch import Arch
from targets.jax.params import Params
from targets.tokenizer import Tokenizer, load_tokenizer
from training.distil import read_answers, split_answers, target_hash
from training.feature_cache import CacheLayout, FeatureCache, joined, with_states
from training.heads import head_of
from training.packing import PackedRows, pack
from training.real_acceptance import Live, prompts_of
from training.recipe import AssistantShape, BlockShape, HeadShape, Recipe, any_spec_for
from training.teacher import TeacherOutput, load_teacher, read, teach
from training.trainer import Trainer, contract_of, sign
from training.vocabulary import count_generated, coverage


class Watcher(Protocol):
    """Shows what long work does."""

    def note(self, line: str) -> None: ...

    def working(self, doing: str) -> AbstractContextManager[Any]: ...

    def bar(self, title: str, total: int, done: int) -> AbstractContextManager[Any]:
        """What it yields has `advance(count)`."""
        ...


@dataclass(frozen=True)
class TrainingRequest:
    """What a run is made of. Written by the command."""

    recipe: Recipe[HeadShape] | Recipe[AssistantShape] | Recipe[BlockShape]
    data: list[Path]
    """Folders that `specdec distil` made."""
    run: Path
    target: Path
    """The checkpoint folder of the model that wrote the data."""
    dtype: str | None
    feature_cache: Path | None
    devices: int


@dataclass(frozen=True)
class _Teacher:
    params: Params
    arch: Arch
    layers: tuple[int, ...]
    lenders: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return str(self.params.top["norm"].dtype)


def make_trainer(request: TrainingRequest, watcher: Watcher) -> tuple[Trainer, float]:
    """The trainer, and what share of the generated tokens its draft vocabulary covers. Raises
    UserError."""
    recipe: Recipe[Any] = request.recipe
    parts = [(folder, *read_answers(folder)) for folder in request.data]
    with watcher.working("checking that this model wrote the data"):
        hashed = target_hash(request.target)
        answers, kept, source = split_answers(parts, hashed, recipe.heldout_share)
    params, arch = load_teacher(request.target, request.dtype)
    tokenizer = load_tokenizer(request.target, arch.vocab)
    spec = any_spec_for(arch, recipe.head, tokenizer.stop_ids)
    rows, judged = pack(answers, recipe.length), pack(kept, recipe.length)
    counts, head = count_generated(rows, arch.vocab), head_of(spec)
    ids = draft_vocabulary(counts, head.draft_vocab, tokenizer.stop_ids)
    teacher, cache = _Teacher(params, arch, head.layers, head.lenders), None
    if request.feature_cache is not None:
        cache = _claim_cache(request.feature_cache, teacher, source, (rows, judged), watcher)
    sign(request.run, contract_of(recipe, spec, source, cache is not None, teacher.dtype), ids)
    if cache is not None:
        _fill_cache(cache, teacher, recipe.batch, watcher)
        rows, judged = with_states(cache, rows, judged)
    prompts = prompts_of(kept, recipe.live_prompts, recipe.length)
    ends = tuple(tokenizer.stop_ids), tokenizer.suppress_ids
    live = Live(params, arch, spec, ids, prompts, recipe.unroll, *ends)
    teaching = _teaching(teacher, ids, tokenizer)
    inputs = recipe, spec, request.run, params, teaching, rows, judged, ids, live, request.devices
    return Trainer(*inputs), coverage(counts, ids)


def _teaching(
    teacher: _Teacher, ids: np.ndarray, tokenizer: Tokenizer
) -> Callable[[Params, PackedRows], TeacherOutput]:
    def teaching(params: Params, rows: PackedRows) -> TeacherOutput:
        inputs = teacher.layers, ids, tokenizer.suppress_ids, rows, teacher.lenders
        return teach(params, teacher.arch, *inputs)

    return teaching


def _claim_cache(
    folder: Path,
    teacher: _Teacher,
    source: dict[str, Any],
    parts: tuple[PackedRows, PackedRows],
    watcher: Watcher,
) -> FeatureCache:
    """The folder for these rows, and whether it has room. Raises UserError."""
    rows = joined(*parts)
    count, length = rows.tokens.shape
    hidden = teacher.arch.hidden
    layout = CacheLayout(count, length, len(teacher.layers) * hidden, hidden, teacher.dtype)
    facts = {"target": source["target"], "data": source, "layers": teacher.layers}
    cache = FeatureCache(folder, rows, layout, facts)
    if cache.missing():  # a whole one is only read, by as many as like
        hold_alone(folder, "--feature-cache")
        cache = FeatureCache(folder, rows, layout, facts)  # as whoever held it left it
    missing, size = cache.check_room(), count * layout.row_bytes / 2**20
    watcher.note(f"{folder}: features of {count:,} rows, {size:,.0f} MiB, {missing:,} rows to do")
    return cache


def _fill_cache(cache: FeatureCache, teacher: _Teacher, batch: int, watcher: Watcher) -> None:
    """Let the target read what is missing. Raises UserError."""
    program = jax.jit(lambda params, *inputs: read(params, teacher.arch, teacher.layers, *inputs))
    total = len(cache.rows.tokens)
    done = total - cache.check_room()
    if 0 < done < total:
        watcher.note(f"continues at row {done} of {total}")
    with watcher.bar("features", total, done) as bar:
        cache.build(partial(program, teacher.params), batch, bar.advance)
