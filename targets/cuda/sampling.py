"""The target chooses: logits and a request's parameters to one token id per position.

The rules are those of `targets/jax/sampling.py`, in the same order. Each row is a computation of
its own over [V], so nothing about a row can depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec.core.constraint import WORD
from specdec.core.types import MAX_LOGPROBS, LogprobRows
from targets import sampling_params
from targets.cuda.noise import from_uniform, uniform
from targets.cuda.ops import Rows
from targets.sampling_params import FLOATS, SPREAD, Rules, SamplingTable


def blank_table(slots: int, device: str) -> SamplingTable:
    """Greedy everywhere, on the device; torch has no arithmetic on uint32, so seeds are int64."""

    def place(leaf: np.ndarray) -> torch.Tensor:
        wide = leaf.astype(np.int64) if leaf.dtype == np.uint32 else leaf
        return torch.from_numpy(wide).to(device)

    return SamplingTable(*map(place, sampling_params.blank_table(slots)))


def _row(leaf: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """The row of leaf [slots, ...] at slot [1]; the host does not wait for the index."""
    return leaf.index_select(0, slot)[0]


def choose_greedy(logits: torch.Tensor, bias: torch.Tensor, rows: Rows) -> torch.Tensor:
    """logits [B, T, V], bias [slots, V] -> [B, T] int32; ties go to the lowest id."""
    own = bias.index_select(0, rows.slot.clamp(min=0))
    return (logits + own[:, None]).argmax(-1).int()


def masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """logits [B, T, V] where masks [B, T, words] int32 have a bit, -inf elsewhere."""
    bits = (masks[..., None] >> torch.arange(WORD, device=masks.device)) & 1
    allowed = bits.flatten(-2)[..., : logits.shape[-1]]
    return torch.where(allowed == 1, logits, -torch.inf)


def choose(
    logits: torch.Tensor,
    bias: torch.Tensor,
    sampling_params: SamplingTable,
    history: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Any mixture of greedy and sampled rows.

    logits [B, T, V] float32: row t follows position start + t. bias [slots, V]. history [slots, S]
    int32: what was fed at each position, this call's tokens included. -> [B, T] int32.
    """
    batch, tokens = logits.shape[:2]
    chosen = []
    for b in range(batch):
        slot = rows.slot[b : b + 1].clamp(min=0)
        rule = SamplingTable(*(_row(leaf, slot) for leaf in sampling_params))
        own_bias, own_history = _row(bias, slot), _row(history, slot)
        positions = rows.start[b] + torch.arange(tokens, device=logits.device)
        noise = None
        if rule.temperature > 0:
            # drawn as integers, which do not depend on neighbouring rows: for all rows at once
            noise = uniform(rule.seed, positions + 1, logits.shape[-1])
        for t in range(tokens):
            row = penalise(logits[b, t] + own_bias, rule, own_history, positions[t])
            # each row's noise is cloned, because logs are taken of it row by row
            drawn = row if noise is None else _drawn(row, rule, noise[t].clone())
            chosen.append(drawn.argmax().int())
    return torch.stack(chosen).view(batch, tokens)


def _drawn(logits: torch.Tensor, rule: SamplingTable, noise: torch.Tensor) -> torch.Tensor:
    """-> values of which the argmax is a draw from logits [V]. noise [V] is uniform; every leaf of
    `rule` is one slot's."""
    return _filter(logits / rule.temperature, rule) + from_uniform(noise)


def penalise(
    logits: torch.Tensor, rule: SamplingTable, history: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Repetition over prompt and output, presence and frequency over the output (as in vLLM);
    counts are those up to `position`."""
    if rule.repetition == 1 and rule.presence == 0 and rule.frequency == 0:
        return logits
    vocab = len(logits)
    place = torch.arange(len(history), device=history.device)
    known = (history >= 0) & (history < vocab)
    ids = torch.where(known, history, vocab).long()  # out of range: counted apart

    def count(inside: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(vocab + 1, device=logits.device)
        return zeros.scatter_add(0, ids, inside.float())[:vocab]

    fed = place <= position
    everything, output = count(fed), count(fed & (place >= rule.prompt_len))
    factor = torch.where(everything > 0, rule.repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - rule.frequency * output - rule.presence * (output > 0)


def _filter(logits: torch.Tensor, rule: SamplingTable) -> torch.Tensor:
    """-inf where min-p, top-k or top-p cuts; ties at a threshold stay together."""
    best = logits.max()
    floor = torch.where(rule.min_p > 0, rule.min_p.clamp(min=1e-30).log(), -torch.inf)
    logits = torch.where(logits >= best + floor, logits, -torch.inf)
    off = rule.top_k <= 0
    wanted = torch.where(off, len(logits), rule.top_k).float()
    logits = _cut(logits, torch.ones_like(logits), wanted, off)
    mass = torch.exp(logits - best)
    return _cut(logits, mass, rule.top_p * mass.sum(), rule.top_p >= 1)


def _cut(
    logits: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, off: torch.Tensor
) -> torch.Tensor:
    """Keep the smallest set of largest logits with at least this total weight; all where `off`."""
    if off:
        return logits
    keys, least, threshold = _ordered(logits), float(wanted), 0
    for bit in range(31, -1, -1):
        trial = threshold | (1 << bit)
        total = float(torch.where(keys >= trial, weight, 0.0).sum())
        # the likeliest token always stays, however small the total is to be
        if total >= least and total > 0:
            threshold = trial
    return torch.where(keys >= threshold, logits, -torch.inf)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 to integers in [0, 2^32) with the same order."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >> 31 == 1, ~bits & 0xFFFFFFFF, bits | 0x80000000)


def logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, rules: Rules, slot: torch.Tensor
) -> LogprobRows:
    """Log-probabilities of the unshaped distribution (temperature 1, nothing cut): of the chosen
    tokens and the best 20. Tensors on the device of logits [B, T, V], chosen [B, T] and slot [B],
    whose `rules` they were chosen by."""
    log_p = logits.log_softmax(-1)
    values, ids = log_p.topk(min(MAX_LOGPROBS, log_p.shape[-1]), -1)
    picked = log_p.gather(-1, chosen[..., None].long())[..., 0]
    words = _sampling_words(rules, slot.clamp(min=0))
    return LogprobRows(picked, ids.int(), values, _checksums(logits), words)


def _sampling_words(rules: Rules, slot: torch.Tensor) -> torch.Tensor:
    """`LogprobRows.sampling`, int64."""
    table = rules.sampling_params
    floats = torch.stack([table._asdict()[name] for name in FLOATS], -1)
    bits = floats.view(torch.int32).long() & 0xFFFFFFFF
    words = torch.cat([bits, table.top_k.long()[:, None], table.seed], -1)
    return torch.cat(
        [words.index_select(0, slot), _checksums(rules.bias.index_select(0, slot))], -1
    )


def _checksums(logits: torch.Tensor) -> torch.Tensor:
    """`LogprobRows.checksums` of logits [..., V], int64. As in `targets.jax.sampling`; int32
    products wrap around."""
    bits = logits.float().view(torch.int32)
    word = torch.arange(logits.shape[-1], device=logits.device)
    factors = 2 * word + 1, word * SPREAD | 1
    sums = [(bits * factor.int()).sum(-1, dtype=torch.int64) for factor in factors]
    return torch.stack(sums, -1) & 0xFFFFFFFF


def on_host(rows: LogprobRows) -> LogprobRows:
    """As numpy."""
    return rows.each(lambda part: part.cpu().numpy())
