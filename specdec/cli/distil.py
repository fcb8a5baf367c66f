"""`specdec distil`: the target's own answers, to train a drafter on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.registry import resolved
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model
from specdec.cli import topics
from specdec.cli.console import check_folder, command_record, console, print_json, say_model
from specdec.cli.progress import Bar, continues, working
from specdec.cli.start import check_max_tokens, loaded_model
from specdec.core.alone import hold_alone
from specdec.core.config import ModelConfig, SamplingConfig
from specdec.core.errors import UserError
from specdec.core.packages import missing
from targets.mini import checkpoint_path

if TYPE_CHECKING:
    from specdec.core.engine import Engine
    from specdec.core.types import Sampling
    from specdec.evaluation.prompts import Prompt
    from training.distil import Source


def distil(
    prompts: Path,
    /,
    *,
    out: Path,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    sampling: topics.Sampling = SamplingConfig(),  # noqa: B008
    max_tokens: int = 256,
    cut: int | None = None,
    limit: int | None = None,
    shard_rows: int = 64,
    json: topics.Json = False,
) -> None:
    """Let the target answer prompts, and keep the token ids. The same command continues.

    Parameters
    ----------
    prompts
        JSONL: {"prompt": ...}, {"messages": [...]}, or documents as {"text": ...} with --cut.
    out
        Folder for the Arrow shards.
    max_tokens
        Most tokens per answer.
    cut
        Cut plain texts into prompts of this many tokens.
    limit
        Use only so many prompts, spread evenly over all.
    shard_rows
        Answers per shard: what a kill can cost.
    """
    require_training()
    from specdec.evaluation.prompts import read_prompts

    questions = read_prompts(prompts)
    speculation = resolved(speculation, model)
    sampling.sampling({})  # refuse bad values before a model is loaded
    check_max_tokens(max_tokens)
    check_folder(out)
    hold_alone(out, "--out")
    if shard_rows < 1 or (cut is not None and cut < 2) or (limit is not None and limit < 1):
        raise UserError("--shard-rows and --limit must be 1 or more, --cut 2 or more")
    loaded = loaded_model(model, speculation)
    say_model(loaded)
    chosen = sampling.sampling(loaded.tokenizer.defaults)
    asked = _encode(questions, loaded, cut, limit)
    source = _source(model, loaded, asked, chosen, max_tokens, shard_rows)
    engine = make_engine(loaded, speculation, max_waiting=2 * model.slots)
    tokens = _answer(engine, asked, chosen, source, out)
    tau = engine.acceptance.tau
    console.print(f"{len(asked)} answers in {out}: {tokens:,} new tokens, tau {tau:.2f}")
    if json:
        record = command_record(
            "distil", model=loaded.config, speculation=speculation, sampling=sampling
        )
        print_json(record | {"rows": len(asked), "new_tokens": tokens, "tau": tau})


def _answer(
    engine: Engine, asked: list[list[int]], sampling: Sampling, source: Source, out: Path
) -> int:
    """Generate the answers that `out` lacks, with a progress bar. Returns the number of new
    tokens."""
    from training.distil import claim, distil

    done = claim(out, source)
    continues(console, "row", done, len(asked))
    with Bar(console, "distilling", len(asked), done) as bar:

        def tell(progress) -> None:
            pace = progress.tokens / max(progress.seconds, 1e-9)
            bar.update(progress.rows, f"{pace:,.0f} tokens/s")

        return distil(engine, asked, sampling, source, out, tell)


def require_training() -> None:
    """Raise UserError where the training libraries are not installed."""
    if lacking := missing(("datasets", "optax", "orbax", "matplotlib")):
        raise UserError(
            f"training needs {', '.join(lacking)}: pip install '.[train]' in specdec's clone"
        )


def _encode(
    questions: list[Prompt], loaded: Model, cut: int | None, limit: int | None
) -> list[list[int]]:
    """Token ids of the prompts that fit the context; prints how many don't. Raises UserError if
    none does."""
    from training.distil import cut_documents

    tokenizer = loaded.tokenizer
    encoded: list[list[int]] = []
    for question in questions:
        ids = question.encode(tokenizer.encode, tokenizer.encode_chat)
        if cut is None or question.kind == "chat":
            encoded.append(ids)
        else:
            encoded += cut_documents([ids], cut)
    fitting = [ids for ids in encoded if len(ids) < loaded.target.max_len]
    if len(fitting) < len(encoded):
        console.print(f"{len(encoded) - len(fitting)} prompts do not fit --max-len: left out")
    if not fitting:
        raise UserError("no prompt fits the context: shorten them, --cut them or raise --max-len")
    if limit is None or limit >= len(fitting):
        return fitting
    return [fitting[i * len(fitting) // limit] for i in range(limit)]


def _source(
    model: ModelConfig,
    loaded: Model,
    asked: list[list[int]],
    sampling: Sampling,
    max_tokens: int,
    shard_rows: int,
) -> Source:
    from specdec.report.identity import dtype_name
    from training.distil import Source, prompts_hash, target_hash

    with working(console, "hashing the target"):
        target = target_hash(checkpoint_path(model.model))
    return Source(
        target=target,
        tokenizer=loaded.tokenizer.fingerprint,
        template=loaded.tokenizer.template_fingerprint,
        prompts=prompts_hash(asked),
        sampling=asdict(sampling),
        max_tokens=max_tokens,
        max_len=loaded.target.max_len,
        stop_ids=tuple(loaded.tokenizer.stop_ids),
        shard_rows=shard_rows,
        rows=len(asked),
        backend=loaded.target.backend,
        dtype=dtype_name(loaded.target.dtype),
        kv_dtype=dtype_name(loaded.target.kv_dtype),
        int8=model.int8,
        tp=model.tp,
    )
