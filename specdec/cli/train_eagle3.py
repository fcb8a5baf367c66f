"""`specdec train-eagle3`: a head from distilled answers."""

from __future__ import annotations

import json as json_module
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import topics
from specdec.cli.console import check_folder, command_record, console, print_json
from specdec.cli.distil import require_training
from specdec.cli.progress import Bar, continues, working
from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from specdec.core.writing import write_whole, writing
from targets.backend import backend_of
from targets.mini import checkpoint_path

if TYPE_CHECKING:
    from targets.arch import Arch
    from targets.jax.params import Params
    from training.eagle3 import Trainer
    from training.feature_cache import FeatureCache
    from training.packing import PackedRows
    from training.recipe import Recipe
    from training.teacher import TeacherOutput


def train_eagle3(
    recipe: Path,
    /,
    *,
    data: list[Path],
    run: Path,
    model: topics.Model = ModelConfig(),  # noqa: B008
    feature_cache: Path | None = None,
    data_parallel_size: int = 1,
    json: bool = False,
) -> None:
    """Train an EAGLE-3 head for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/eagle3-*.toml.
    data
        The folder that `specdec distil` made; repeat it to train on several.
    run
        Folder for checkpoints, log.jsonl and curve.png.
    feature_cache
        Folder for the target's states of the whole data: filled first, if it isn't yet, and then
        read, so that no step runs the target. It pays where the data is seen several times (or by
        several runs: the recipe's head, rates and steps are free, its data and length are not)
        and the target costs more than the head. A token takes 4 KiB with mini in float32, 20 with
        E4B and 42 with 31B in bfloat16.
    data_parallel_size
        Devices that share the rows of each batch; the target is on each of them.
    json
        End stdout with one JSON document.
    """
    require_training()
    from training.curves import plot_run
    from training.recipe import read_recipe

    chosen = read_recipe(recipe)
    if model.backend != "jax" or model.int8 or model.dtype in ("fp8", "fp8-w8a8") or model.tp != 1:
        raise UserError(
            "train-eagle3 runs with JAX on unquantised weights: leave --backend, "
            "--int8, --tp and --dtype fp8 out"
        )
    check_folder(run, "--run")
    if feature_cache is not None:
        check_folder(feature_cache, "--feature-cache")
    backend_of(model).prepare(model)
    trainer, covered = _make_trainer(chosen, data, run, model, feature_cache, data_parallel_size)
    console.print(f"the draft vocabulary covers {covered:.2%} of the generated tokens")
    record = command_record("train-eagle3", model=model, recipe=chosen) | {"coverage": covered}
    write_whole(run / "run.json", json_module.dumps(record, indent=1, default=str))
    found = _train(trainer, chosen)
    with writing(run / "curve.png", "the head is trained and saved"):
        plot_run(run)
    console.print(f"wrote {run / 'log.jsonl'} and {run / 'curve.png'}; next: specdec export-eagle3")
    if json:
        print_json(record | {"steps": chosen.steps, "heldout": found})


def _make_trainer(
    recipe: Recipe,
    data: list[Path],
    run: Path,
    model: ModelConfig,
    feature_cache: Path | None,
    devices: int,
) -> tuple[Trainer, float]:
    """Everything loaded and checked, and the draft vocabulary's coverage. Raises UserError."""
    from targets.tokenizer import load_tokenizer
    from training.distil import read_answers, split_answers, target_hash
    from training.eagle3 import Trainer, contract_of, sign
    from training.feature_cache import with_states
    from training.packing import pack
    from training.real_acceptance import Live, prompts_of
    from training.recipe import spec_for
    from training.teacher import load_teacher, teach
    from training.vocabulary import count_generated, coverage, draft_vocabulary

    path = checkpoint_path(model.model)
    read = [(folder, *read_answers(folder)) for folder in data]
    with working(console, "checking that this model wrote the data"):
        answers, kept, source = split_answers(read, target_hash(path), recipe.heldout_share)
    params, arch = load_teacher(path, model.dtype)
    tokenizer = load_tokenizer(path, arch.vocab)
    spec = spec_for(arch, recipe.head, tokenizer.stop_ids)
    rows, judged = pack(answers, recipe.length), pack(kept, recipe.length)
    counts = count_generated(rows, arch.vocab)
    ids = draft_vocabulary(counts, spec.draft_vocab, tokenizer.stop_ids)
    teacher, cache = (params, arch, spec.layers), None
    if feature_cache is not None:
        cache = _claim_cache(feature_cache, *teacher, source, (rows, judged))
    sign(run, contract_of(recipe, spec, source, cache is not None), ids)
    if cache is not None:
        _fill_cache(cache, *teacher, recipe.batch)
        rows, judged = with_states(cache, rows, judged)

    def lesson(params: Params, rows: PackedRows) -> TeacherOutput:
        return teach(params, arch, spec.layers, ids, tokenizer.suppress_ids, rows)

    prompts = prompts_of(kept, recipe.live_prompts, recipe.length)
    ends = tuple(tokenizer.stop_ids), tokenizer.suppress_ids
    live = Live(params, arch, spec, ids, prompts, recipe.unroll, *ends)
    trainer = Trainer(recipe, spec, run, params, lesson, rows, judged, ids, live, devices)
    return trainer, coverage(counts, ids)


def _claim_cache(
    folder: Path,
    params: Params,
    arch: Arch,
    layers: tuple[int, ...],
    source: dict[str, Any],
    parts: tuple[PackedRows, PackedRows],
) -> FeatureCache:
    """The folder for these rows, and whether it has room. Raises UserError."""
    from training.feature_cache import CacheLayout, FeatureCache, joined

    rows, dtype = joined(*parts), str(params.top["norm"].dtype)
    count, length = rows.tokens.shape
    layout = CacheLayout(count, length, len(layers) * arch.hidden, arch.hidden, dtype)
    facts = {"target": source["target"], "data": source, "layers": layers}
    cache = FeatureCache(folder, rows, layout, facts)
    missing, size = cache.check_room(), count * layout.row_bytes / 2**20
    console.print(f"{folder}: features of {count:,} rows, {size:,.0f} MiB, {missing:,} rows to do")
    return cache


def _fill_cache(
    cache: FeatureCache, params: Params, arch: Arch, layers: tuple[int, ...], batch: int
) -> None:
    """Let the target read what is missing, with a bar. Raises UserError."""
    import jax

    from training.teacher import read

    program = jax.jit(lambda params, *given: read(params, arch, layers, *given))
    total = len(cache.rows.tokens)
    done = total - cache.check_room()
    if done < total:
        continues(console, "row", done, total)
    with Bar(console, "features", total, done) as bar:
        cache.build(partial(program, params), batch, bar.advance)


def _train(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
    """Run to the end with a bar and a line per evaluation; the last evaluation."""
    last: dict[str, Any] = {}
    done = int(trainer.state.step)
    continues(console, "step", done, recipe.steps)
    with Bar(console, "training", recipe.steps, done) as bar:

        def tell(row: dict[str, Any]) -> None:
            if row["kind"] == "train":
                note = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s"
                bar.update(row["step"], note)
            else:
                last.update(row)
                console.print(_line(row))

        trainer.train(recipe.steps, tell)
    return last


def _line(row: dict[str, Any]) -> str:
    """One evaluation, for people."""
    hits = " ".join(f"{share:.2f}" for share in row["accuracy"])
    return (
        f"step {row['step']}: held-out loss {row['loss']:.3f}, accuracy by draft step {hits}, "
        f"tau {row['tau_t0']:.2f} (T=0) {row['tau_t1']:.2f} (T=1) simulated, "
        f"{row['real_tau_t0']:.2f} and {row['real_tau_t1']:.2f} real"
    )
