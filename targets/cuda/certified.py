"""The head at half its bytes, with the same token: which words can be chosen at all.

The head is stored in two parts. The first, codes of 8 bits, gives every logit within a bound that
is proven when the head is packed. A word cannot be chosen if enough other words certainly have a
larger logit than its upper bound. The few words that are left, the candidates, are computed from
both parts, which together are the head itself, in the head's own order of sums.
Everything that choosing does to a logit before it compares is monotonic (the soft-cap, a bias, a
temperature, the same noise on both sides), so it is applied to both ends of a bound, by the same
operations.

Not certified, and computed by the whole head: penalties, top-p without a small top-k, rows with
more candidates than there is room for. int8.py makes the parts and their bounds; this module does
in plain torch what kernels/screen.cu does.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from targets.cuda.int8 import SAFETY
from targets.cuda.noise import gumbel
from targets.cuda.ops import Choosing, Rows
from targets.sampling_params import SamplingTable

MOST_ROWS = 16
"""Largest number of rows with which the head is bound by its bytes."""
TIES = 2.0**-18
"""Times the soft-cap: more than the error of the fast hyperbolic tangent."""
MORE = 0.25
"""Over the root of k, added to an input's length: see `length`."""
LONGEST = 3e4
"""Inputs of a larger norm are left to the whole head: half of what a float16 holds."""
MOST_TOP_K = 256
"""The number of CTAs in kernels/screen.cu."""


def length(x: Tensor) -> Tensor:
    """The factor of the bounds: |x|, plus what inputs [M, k] that are too small for a float16 lose.
    That is 2 ** -25 each at most; the bound's share for rounding of sums covers it k / 4 times."""
    return x.float().norm(dim=-1) * SAFETY + MORE / sqrt(x.shape[-1])


def candidates(ends: tuple[Tensor, Tensor], rows: Rows, choosing: Choosing) -> list[Tensor | None]:
    """ends [M, V]: the least and the largest that logits may be, soft-capped. -> for each row, the
    words that may be chosen [V] bool; None where that is not certified. Waits for the host."""
    (rules, needs_sampler), tokens = choosing, rows.tokens.shape[1]
    found: list[Tensor | None] = []
    for m, (low, high) in enumerate(zip(*ends, strict=True)):
        slot = int(rows.slot[m // tokens])
        rule = SamplingTable(*(leaf[max(slot, 0)] for leaf in rules.sampling_params))
        position = rows.start[m // tokens] + m % tokens
        found.append(_of_row(low, high, rules.bias[max(slot, 0)], rule, position, needs_sampler))
    return found


def _of_row(
    low: Tensor,
    high: Tensor,
    bias: Tensor,
    rule: SamplingTable,
    position: Tensor,
    needs_sampler: bool,
) -> Tensor | None:
    low, high, wanted = low + bias, high + bias, 1
    least = torch.tensor(-torch.inf)
    if needs_sampler:
        if rule.repetition != 1 or rule.presence != 0 or rule.frequency != 0:
            return None
        if rule.temperature > 0:
            low, high = low / rule.temperature, high / rule.temperature
            cut, top_k = bool(rule.min_p > 0), int(rule.top_k)
            if top_k > MOST_TOP_K or (rule.top_p < 1 and top_k <= 0):
                return None
            if cut:
                least = low.max() + rule.min_p.clamp(min=1e-30).log()
            if top_k <= 0 and not cut:  # noise comes after what cuts
                noise = gumbel(rule.seed, position + 1, len(low))
                low, high = low + noise, high + noise
            wanted = top_k if top_k > 0 else len(low) if cut else 1
    reached = low.topk(min(wanted, len(low))).values[-1] if wanted < len(low) else -torch.inf
    return ~(high < torch.maximum(torch.as_tensor(reached), least))
