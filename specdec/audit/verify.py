"""Receipts judged: read, compared with a model, and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seqs
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from specdec.assembly.engine import require_exact
from specdec.assembly.model import Model, Status, load_model, quiet
from specdec.audit.identity import differing, identity_of
from specdec.audit.making import Identity
from specdec.audit.receipt import MOST_BYTES, Arithmetic, Receipt, read_receipt
from specdec.audit.replay import replayed
from specdec.audit.verdict import Verdict, conditions_of
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import TooLarge, UserError
from specdec.core.types import MAX_DRAFT
from targets.mini import checkpoint_path

KS = MAX_DRAFT, 15, 7, 3, 1, 0
"""Of a replay on CUDA, where no bit depends on K: the first for which there is room."""


class Shown(Protocol):
    """Progress: a context, advanced by the ids that were compared."""

    def advance(self, count: int) -> None: ...


class Hidden:
    """Progress that is not shown."""

    def advance(self, count: int) -> None:
        pass


class Bars(Protocol):
    """Makes the progress of a replay of so many ids."""

    def __call__(self, total: int, /) -> AbstractContextManager[Shown]: ...


def _hidden(total: int) -> AbstractContextManager[Shown]:
    return nullcontext(Hidden())


def verify(
    files: Iterable[str | Path],
    model: str = "mini",
    status: Status = quiet,
    bar: Bars = _hidden,
) -> list[Verdict]:
    """A verdict on each receipt, in the files' order.

    model: a checkpoint folder, a name on the Hugging Face hub, or an embedded model. It is loaded
    once, for the arithmetic of the first receipt with one that can be had here; what no option sets
    (versions, the device) is compared. status: shows what is done meanwhile. bar: shows the
    replay's progress.
    Raises UserError for a model that is not there.
    """
    names = [str(file) for file in files]
    read = [_read(name) for name in names]
    receipts = [one for one in read if isinstance(one, Receipt)]
    judged = iter(_judged(receipts, model, status, bar) if receipts else ())
    verdicts = [next(judged) if isinstance(one, Receipt) else one for one in read]
    return [replace(v, name=name) for v, name in zip(verdicts, names, strict=True)]


def model_for(
    arithmetic: Arithmetic, model: str, status: Status = quiet, cache: Path | None = None
) -> Model:
    """The model with a receipt's arithmetic, as far as options set it, and no drafter; its `k` is
    what a replay may guess. cache: as `ModelConfig` has it. Raises UserError."""
    if arithmetic.backend == "jax":
        return _loaded(arithmetic, arithmetic.width - 1, model, status, cache)
    for k in KS[:-1]:
        # a mixture routes so many rows at once, and memory holds so many rows' logits
        with suppress(TooLarge):
            return _loaded(arithmetic, k, model, status, cache)
    return _loaded(arithmetic, KS[-1], model, status, cache)


def _loaded(
    arithmetic: Arithmetic, k: int, model: str, status: Status, cache: Path | None
) -> Model:
    config = ModelConfig(
        model,
        backend=arithmetic.backend,
        dtype=arithmetic.dtype,
        kv_dtype=arithmetic.kv_dtype,
        device="cpu" if arithmetic.place == "cpu" else None,
        int8=arithmetic.int8,
        max_len=arithmetic.max_len,
        slots=arithmetic.slots,
        tp=arithmetic.tp,
        cache=cache,
        **_images(arithmetic.pictures),
    )
    speculation = SpeculationConfig("none", k=k)
    loaded = load_model(config, speculation, status, arithmetic.features)
    require_exact(loaded, speculation, status)
    return loaded


def _images(pictures: int | None) -> dict[str, Any]:
    """`ModelConfig`'s options for pictures of so many tokens; None: as the checkpoint has it."""
    if pictures is None:
        return {}
    return {"image_tokens": pictures} if pictures else {"images": "off"}


def judged_by(loaded: Model, receipts: Seqs[Receipt], bar: Bars = _hidden) -> list[Verdict]:
    """A verdict on each receipt by a loaded model: those of its identity are replayed as one
    batch."""
    own = identity_of(loaded)
    apart = [differing(Identity(r.model, r.arithmetic), own) for r in receipts]
    equal = [r for r, parts in zip(receipts, apart, strict=True) if not parts]
    with bar(sum(len(receipt.answer.ids) for receipt in equal)) as shown:
        found = iter(replayed(equal, loaded.target, loaded.tokenizer, loaded.k, shown.advance))
    pairs = zip(receipts, apart, strict=True)
    return [_incomparable(r, parts) if parts else next(found) for r, parts in pairs]


def _judged(receipts: Seqs[Receipt], model: str, status: Status, bar: Bars) -> list[Verdict]:
    """A receipt with an arithmetic that can't be had here is refused, and the next one's is
    tried."""
    checkpoint_path(model)  # a wrong name is no fault of a receipt
    refused: list[Verdict] = []
    for number, receipt in enumerate(receipts):
        try:
            loaded = model_for(receipt.arithmetic, model, status)
        except UserError as problem:
            refused.append(Verdict("refused", reason=str(problem)))
            continue
        return refused + judged_by(loaded, receipts[number:], bar)
    return refused


def _incomparable(receipt: Receipt, parts: Seqs[str]) -> Verdict:
    return Verdict(
        "cannot be compared",
        tokens=len(receipt.answer.ids),
        reason="; ".join(parts),
        conditions=conditions_of(receipt),
    )


def _read(name: str) -> Receipt | Verdict:
    try:
        return read_receipt(_bytes(name))
    except UserError as problem:
        return Verdict("refused", reason=str(problem))


def _bytes(name: str) -> bytes:
    """A file's bytes, one more than a receipt has at most. Raises UserError."""
    try:
        with Path(name).open("rb") as stream:
            return stream.read(MOST_BYTES + 1)
    except OSError as problem:
        raise UserError(f"it cannot be read: {problem.strerror}") from None


def report(verdicts: Seqs[Verdict]) -> dict[str, Any]:
    """Verdicts as JSON values, with counts."""
    counts = {kind: sum(v.kind == kind for v in verdicts) for kind in {v.kind for v in verdicts}}
    reads = sum(verdict.reads for verdict in verdicts)
    return {"counts": counts, "reads": reads, "verdicts": [v.to_json() for v in verdicts]}
