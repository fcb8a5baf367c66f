"""A request's `speculative` options: which drafter, how many tokens, or none."""

from __future__ import annotations

from serve.errors import ApiError
from serve.schema import GenerationRequest
from specdec.core.engine import DraftSetup
from specdec.core.types import Speculative

NOBODY = "none"


def speculative_of(request: GenerationRequest, drafting: DraftSetup) -> Speculative | None:
    """The engine's form of the request's `speculative`, None without one. Raises ApiError 400 for a
    drafter that is not loaded, or more tokens than the server drafts."""
    wish = request.speculative
    if wish is None:
        return None
    if wish.drafter is not None and wish.drafter not in (*drafting.names, NOBODY):
        loaded = ", ".join(drafting.names)
        message = f"the drafter {wish.drafter!r} is not loaded: this server has {loaded}"
        raise ApiError(400, message, param="speculative.drafter")
    if wish.k is not None and wish.k > drafting.k:
        message = f"this server drafts at most {drafting.k} tokens per cycle, not {wish.k}"
        raise ApiError(400, message, param="speculative.k")
    off = wish.enabled is False or wish.drafter == NOBODY
    return Speculative(wish.drafter, 0 if off else wish.k)


def effective_options(
    wish: Speculative | None, drafting: DraftSetup, predicted: bool = False
) -> dict[str, object] | None:
    """The effective options of a request, for the reply's `metrics`; None if it has neither
    `speculative` nor a `prediction`. They show, for example, that a server with `--drafter none`
    ignores predictions."""
    if wish is None and not predicted:
        return None
    wish = wish or Speculative()
    k = drafting.k if wish.k is None else wish.k
    drafter = drafting.drafter if wish.drafter is None else wish.drafter
    return {"drafter": drafter if k else NOBODY, "k": k, "enabled": k > 0}
