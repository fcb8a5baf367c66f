"""Training-time test: the head drafts on from every position at once, and is judged at each step.

Row i of step n is fed the true token i + 1 + n and the head's own output of step n - 1, and is
compared with the target's distribution after that token. It counts where all of the tokens i + 1 to
i + 1 + n were generated (so i may be the prompt's last position, the first that is drafted from),
belong to i's document, and the last of them did not end it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from training.heads import AnySpec, Weights, head_of
from training.packing import PackedRows
from training.teacher import TeacherOutput

SHARE_LOST = 0.9
"""Weight of lost acceptance in "tv"."""
LK_ETA = 3.0
"""How early "lk" moves from divergence to acceptance: the paper's value for EAGLE-3 heads."""


@struct.dataclass
class Judged:
    """The draft steps compared with the target, float32 [K, B, T] each."""

    mask: Any
    """1 where the step counts at all."""
    has_next_token: Any
    """1 where the row also contains the answer's next token (the target's choice)."""
    known: Any
    """1 where the target's likeliest token is in the draft vocabulary: the loss counts only these
    places."""
    divergence: Any
    """KL divergence from the target over the draft vocabulary."""
    hit: Any
    """1 where both have the same argmax."""
    overlap: Any
    """Sum of min(p, q) over the whole vocabulary."""
    coupled: Any
    """Chance that the draft chooses the answer's token too, with the same noise as the target."""


def ahead(x: Any, n: int) -> Any:
    """x [B, T, ...] as seen from n positions earlier; zeros past the end."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2)))


def masks(rows: PackedRows, steps: int) -> list[Any]:
    """Where each step counts (see module): bool [B, T] each."""
    ends = jnp.asarray(rows.ends)
    return [made & ~ahead(ends, n) for n, made in enumerate(_generated(rows, steps), 1)]


def continued(rows: PackedRows, steps: int) -> list[Any]:
    """Where each step counts and the row also contains the answer's next token."""
    after = _generated(rows, steps + 1)[1:]
    return [mask & more for mask, more in zip(masks(rows, steps), after, strict=True)]


def _generated(rows: PackedRows, most: int) -> list[Any]:
    """For n = 1 .. most, where the tokens i + 1 to i + n were generated and are i's document's."""
    found, generated = [], jnp.ones(rows.tokens.shape, bool)
    documents = jnp.asarray(rows.documents) + 1  # padding is 0 now, as what `ahead` fills in
    for n in range(1, most + 1):
        same = (ahead(documents, n) == documents) & (documents > 0)
        generated = generated & ahead(jnp.asarray(rows.generated), n) & same
        found.append(generated)
    return found


def judge(
    weights: Weights,
    spec: AnySpec,
    table: Any,
    target_ids: Any,
    rows: PackedRows,
    lesson: TeacherOutput,
    steps: int,
) -> Judged:
    """Unroll `steps` steps. table: the target's embeddings."""
    head = head_of(spec)

    @jax.checkpoint  # a step's scores and logits are recomputed rather than kept
    def one(
        weights: Weights,
        before: Any,
        fed: Any,
        lent: Any,
        taught: TeacherOutput,
        chosen,
    ):
        handed, guessed = head.step(weights, before, table, fed, rows, lent)
        return handed, _compare(guessed, taught, target_ids, chosen)

    before, seen = head.begin(weights, lesson), []
    tokens, spoken = jnp.asarray(rows.tokens), lesson._replace(lent=None)
    for n, (mask, has_next_token) in enumerate(
        zip(masks(rows, steps), continued(rows, steps), strict=True)
    ):
        taught = jax.tree.map(lambda part, n=n: ahead(part, n + 1), spoken)
        fed, chosen = ahead(tokens, n + 1), ahead(tokens, n + 2)
        before, judged = one(weights, before, fed, lesson.lent, taught, chosen)
        seen.append(Judged(mask.astype(jnp.float32), has_next_token.astype(jnp.float32), *judged))
    return jax.tree.map(lambda *parts: jnp.stack(parts), *seen)


def _compare(guessed: Any, taught: TeacherOutput, target_ids: Any, chosen: Any) -> tuple[Any, ...]:
    """Judged's fields from `known` on; guessed [B, T, D], chosen [B, T]: the answer's tokens."""
    log_q = jax.nn.log_softmax(guessed, -1)
    log_p = taught.logits - taught.total[..., None]
    within = jax.nn.log_softmax(taught.logits, -1)
    share = jnp.exp(within)
    divergence = jnp.where(share > 0, share * (within - log_q), 0.0).sum(-1)
    favourite = target_ids[jnp.argmax(guessed, -1)]
    known = taught.best == target_ids[jnp.argmax(taught.logits, -1)]
    overlap = jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)
    log_q = jax.lax.stop_gradient(log_q)  # what follows is measured, not taught
    coupled = _coupled(log_p, log_q, target_ids == chosen[..., None])
    fields = known, divergence, favourite == taught.best, overlap, coupled
    return tuple(field.astype(jnp.float32) for field in fields)


def _coupled(log_p: Any, log_q: Any, chosen: Any) -> Any:
    """Chance that argmax(log q + g) is c, given that argmax(log p + g) was c, for Gumbel noise g:
    1 / sum_j max(p_j, q_j p_c / q_c), since both are c with the chance 1 / sum_j max(p_j / p_c,
    q_j / q_c) (arXiv 2408.07978). chosen [B, T, D]: one-hot of c, or nothing where it is no draft
    id. All tokens outside of the draft vocabulary together are one more j, with q_j = 0.
    """
    p = jnp.exp(log_p)
    handicap = jnp.where(chosen, log_p - log_q, -jnp.inf).max(-1)
    rivals = jnp.maximum(p, jnp.exp(log_q + handicap[..., None])).sum(-1)
    return chosen.any(-1) / (rivals + jnp.maximum(1 - p.sum(-1), 0))


def loss_of(judged: Judged, decay: float, kind: str = "kl") -> Any:
    """Sum over steps of decay ** n times the mean loss of what counts and is known. kind: "kl",
    the divergence; "lk", its hybrid with lost acceptance (arXiv 2602.23881, eq. 8); or "tv", lost
    acceptance and a tenth of the divergence (DSpark's, whose cross entropy has the same
    gradient)."""
    weight = judged.mask * judged.known
    lost = SHARE_LOST * (1 - judged.overlap) + (1 - SHARE_LOST) * judged.divergence
    each = {"kl": judged.divergence, "lk": _hybrid(judged), "tv": lost}[kind]
    means = (weight * each).sum((1, 2)) / jnp.maximum(weight.sum((1, 2)), 1)
    return (decay ** jnp.arange(len(means)) * means).sum()


def _hybrid(judged: Judged) -> Any:
    """Divergence while a guess is bad, 1 - overlap (total variation) once it is good: a head that
    can't match the target everywhere gives up rare tokens."""
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(judged.overlap))
    return share * judged.divergence + (1 - share) * (1 - judged.overlap)


def measures(judged: Judged) -> dict[str, Any]:
    """Means [K] per step over what counts."""
    return {
        "divergence": _mean(judged.divergence, judged.mask),
        "accuracy": _mean(judged.hit, judged.mask),
        "known": _mean(judged.known, judged.mask),
    }


def simulated(judged: Judged, key: Any) -> dict[str, Any]:
    """Overlap and chance of acceptance by step [K], and the tokens per cycle with which the rows
    would have been decoded: tau_t1 for answers that were drawn at T = 1, each guess accepted with
    its chance; tau_t0 for greedy ones. tau_t1_bound is the measure of other projects: as if cycles
    began at every position alike, and each guess were accepted with the chance min(p, q)."""
    accepted = jax.random.uniform(key, judged.coupled.shape) < judged.coupled
    chains = (jnp.cumprod(judged.overlap, 0) * judged.mask[-1]).sum((1, 2))
    return {
        "overlap": _mean(judged.overlap, judged.mask),
        "coupled": _mean(judged.coupled, judged.has_next_token),
        "tau_t0": walked_tau(judged.hit, judged.mask),
        "tau_t1": walked_tau(accepted, judged.has_next_token),
        "tau_t1_bound": 1 + (chains / jnp.maximum(judged.mask[-1].sum(), 1)).sum(),
    }


def _mean(field: Any, mask: Any) -> Any:
    return (mask * field).sum((1, 2)) / jnp.maximum(mask.sum((1, 2)), 1)


def walked_tau(hit: Any, mask: Any) -> Any:
    """Tokens per cycle of going through the rows as decoding does: a cycle begins after what the
    one before accepted and its free token, so hard places begin more cycles than easy ones.

    hit, mask [K, B, T]. Cycles that an answer's end cuts short are walked, but not counted.
    """
    accepted = jnp.cumprod(hit * mask, 0).sum(0).astype(jnp.int32)

    def visit(free: Any, at: Any) -> Any:
        place, count, begins = at
        begins = begins & (place >= free)
        return jnp.where(begins, place + count + 1, free), begins

    places = jnp.arange(mask.shape[2])
    steps = places, accepted.T, mask[0].T > 0
    begun = jax.lax.scan(visit, jnp.zeros(mask.shape[1], jnp.int32), steps)[1].T
    whole = begun & (mask[-1] > 0)
    return 1 + (accepted * whole).sum() / jnp.maximum(whole.sum(), 1)
