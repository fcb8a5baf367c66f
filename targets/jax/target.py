"""The JAX target: weights, cache and compiled programs behind `specdec.core.protocols.Target`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seqs
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.core.constraint import EVERYTHING, mask_rows
from specdec.core.errors import UserError
from specdec.core.pictures import PlacedPicture, SoftRows, sees_up_to, soft_rows, within
from specdec.core.protocols import OneByOne
from specdec.core.types import NO_GUESS, Array, LogprobRows, Sequence, Step
from targets.jax import programs, sampling
from targets.jax.cache import make_cache
from targets.jax.model import Merged
from targets.jax.params import Params, apart
from targets.jax.placing import by_vocabulary, put, read, replicated, zeros
from targets.jax.programs import Feed, Plan, bind
from targets.sampling_params import Rules, SamplingTable, blank_table, set_row
from targets.vision.rows import Encoder, SoftTokens, rows_of


class JaxTarget(OneByOne):
    """One model on one device or mesh, with `plan.slots` sequences of up to `plan.max_len`.

    Features are handed out as the programs make them: `prefill`'s [1, chunk, F], `verify`'s by
    slot [slots, width, F]. Cutting out what is real would be a program to compile for each length
    of a prompt and each number of rows, while requests wait.
    """

    backend, pages = "jax", None
    """Shapes are static: each slot has room for the longest text."""

    def __init__(
        self,
        plan: Plan,
        params: Params,
        dtype: Any,
        suppress: tuple[int, ...] = (),
        mesh: jax.sharding.Mesh | None = None,
        kv_dtype: Any = None,
        encoder: Encoder | None = None,
    ) -> None:
        """kv_dtype: dtype of cached keys and values, such as int8; None: as `dtype`. encoder: of
        pictures; None: it takes none."""
        self.plan, self.params, self.dtype = plan, params, dtype
        if plan.mapped and mesh is None:
            self.params = apart(params, plan.arch)
        self.slots, self.max_len, self.prefill_chunk = plan.slots, plan.max_len, plan.chunk
        self.arch, self.vocab, self.max_draft = plan.arch, plan.arch.vocab, plan.width - 1
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.suppress, self.mesh = suppress, mesh
        sizes = plan.slots, plan.max_len, plan.slack
        self.cache = make_cache(plan.arch, *sizes, self.kv_dtype, mesh)
        self._whole, split = replicated(mesh), by_vocabulary(mesh, 2, self.arch.vocab)
        self._unbiased = np.zeros(self.arch.vocab, np.float32)
        self._unbiased[list(suppress)] = -np.inf
        self.bias = zeros((plan.slots, self.arch.vocab), jnp.float32, split)
        self._put_row = jax.jit(_put_row, donate_argnums=0, out_shardings=split)
        for slot in range(plan.slots):
            self._set_bias(slot, self._unbiased)
        self._biased: set[int] = set()
        self._sampling_params = blank_table(plan.slots)
        self._device_params: SamplingTable | None = None
        self._verify = jax.jit(bind(programs.verify, plan), donate_argnums=1)
        self._prefill = jax.jit(bind(programs.prefill, plan), donate_argnums=1)
        self._prefill_pictures = jax.jit(bind(programs.prefill_pictures, plan), donate_argnums=1)
        self.soft_tokens = None if encoder is None else SoftTokens(encoder)
        self.vision = None if encoder is None else encoder.spec
        # the host reads what is chosen: each process all of it
        read_by_host: dict[str, Any] = {"out_shardings": self._whole}
        choose = bind(programs.choose, plan)
        self._choose = jax.jit(choose, static_argnums=0, **read_by_host)
        self._choose_one = jax.jit(_choose_one, static_argnums=0, **read_by_host)
        # a program of its own: rows that are not constrained then run the same one as ever
        self._masked = jax.jit(sampling.masked)
        self._logprobs = jax.jit(sampling.logprobs, **read_by_host)
        self._logprobs_one = jax.jit(_logprobs_one, **read_by_host)

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        *_, step = self.prefill_parts(seq, start, stop)
        assert step is not None
        return step

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        """Each picture that has to be encoded is a part."""
        if start == 0:
            self.seat(seq)
        pictures = within(start, stop, seq.pictures)
        rows = []
        for part in rows_of(self.soft_tokens, pictures, seq.reuse):
            if part is None:
                yield None
            else:
                rows.append(part)
        yield self._prefill_chunk(seq, start, stop, list(zip(pictures, rows, strict=True)))

    def _prefill_chunk(
        self, seq: Sequence, start: int, stop: int, pictures: list[tuple[PlacedPicture, Array]]
    ) -> Step:
        tokens = np.zeros((1, self.plan.widest if pictures else self.plan.chunk), np.int32)
        tokens[0, : stop - start] = seq.tokens[start:stop]
        feed = Feed(tokens, np.array([start], np.int32), np.array([stop - start], np.int32))
        slot, common = np.int32(seq.slot), (self.params, self.cache, feed)
        soft = soft_rows(start, pictures)
        if pictures:
            self.cache, out = self._prefill_pictures(*common, slot, *self._merged(start, pictures))
        else:
            self.cache, out = self._prefill(*common, slot)
        if stop < seq.prompt_len:  # no choice follows from here
            # A device's queue can't be reordered: a short prompt that comes now would wait for all
            # chunks in it. So there is one at most, for a pause of about a millisecond behind each.
            jax.block_until_ready(out.logits)
            return Step(np.full((1, 1), NO_GUESS, np.int32), out.features, pictures=soft)
        last = np.array([stop - 1], np.int32)
        masks = mask_rows([seq], np.empty((1, 0), np.int32), self.vocab)
        logits = out.logits if masks is None else self._masked(out.logits, masks)
        needs_sampler = seq.sampling.needs_sampler
        rules, details = self._rules(), None
        chosen = self._choose_one(needs_sampler, logits, rules, last, slot)
        if seq.sampling.logprobs is not None:
            details = self._logprobs_one(out.logits, chosen, rules, slot)
        return Step(np.asarray(chosen), out.features, details, pictures=soft)

    def _merged(
        self, start: int, pictures: list[tuple[PlacedPicture, Array]]
    ) -> tuple[Merged, np.ndarray]:
        """The pictures' rows in a call from `start`, and how far each of its positions sees."""
        widest = self.plan.widest
        merged = merge(soft_rows(start, pictures), (widest, self.arch.hidden), self.dtype)
        each_other = [placed for placed, _ in pictures] if self.arch.pictures_both_ways else []
        reach = np.array([sees_up_to(start, start + widest, each_other)], np.int32)
        return merged, reach

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        k = draft.shape[1]
        if k > self.max_draft:
            raise UserError(f"K is {k} but this target was compiled for at most {self.max_draft}")
        feed = self._feed(seqs, np.asarray(draft))
        self.cache, out = self._verify(self.params, self.cache, feed)
        needs_sampler = any(seq.sampling.needs_sampler for seq in seqs)
        rows = np.array([seq.slot for seq in seqs])
        # made while the device computes the forward
        masks = mask_rows(seqs, draft, self.vocab)
        logits = out.logits if masks is None else self._restricted(out.logits, masks, rows)
        rules, details = self._rules(), None
        chosen = self._choose(needs_sampler, logits, rules, feed)
        if any(seq.sampling.logprobs is not None for seq in seqs):
            details = self._logprobs(out.logits, chosen, rules.bias, rules.sampling_params)
        return Step(
            np.asarray(chosen)[rows, : k + 1],
            out.features,
            details and pick_rows(details, rows),
            by_slot=True,
        )

    @property
    def identity(self) -> str:
        """What fixes the bits that it computes, beside its weights."""
        mesh = None if self.mesh is None else dict(self.mesh.shape)
        sees = f" pictures {self.plan.pictures}" if self.plan.pictures else ""  # longer rings
        return f"{self.plan} {np.dtype(self.dtype)} {np.dtype(self.kv_dtype)} {mesh}{sees}"

    def _restricted(self, logits: Array, masks: np.ndarray, rows: np.ndarray) -> Array:
        """logits [slots, width, V] under the masks [B, k + 1, words] of these slots."""
        by_slot = np.full((*logits.shape[:2], masks.shape[-1]), EVERYTHING)
        by_slot[rows, : masks.shape[1]] = masks
        return self._masked(logits, by_slot)

    def logits(self, feed: Feed) -> np.ndarray:
        """Feed the slots and return raw logits [slots, width, V] (self-check, tests)."""
        self.cache, out = self._verify(self.params, self.cache, feed)
        return read(out.logits)

    def choices(self, logits: np.ndarray, feed: Feed) -> np.ndarray:
        """What the full sampler chooses from given logits [slots, width, V] (self-check)."""
        return np.asarray(self._choose(True, logits, self._rules(), feed))

    def seat(self, seq: Sequence) -> None:
        """Take over a new owner's sampling parameters for its slot. Raises UserError for token
        ids that this model does not have."""
        seq.check_ids(self.vocab)
        sampling_, slot = seq.sampling, seq.slot
        set_row(self._sampling_params, slot, sampling_, seq.prompt_len)
        self._device_params = None
        if sampling_.logit_bias or slot in self._biased:
            row = self._unbiased.copy()
            for token, bias in sampling_.logit_bias:
                row[token] += bias
            self._set_bias(slot, row)
            self._biased = self._biased | {slot} if sampling_.logit_bias else self._biased - {slot}

    def _set_bias(self, slot: int, row: np.ndarray) -> None:
        """One program, compiled at the start: no request's bias has to wait for the compiler."""
        self.bias = self._put_row(self.bias, np.int32(slot), row)

    def sampling_params(self) -> SamplingTable:
        """Every slot's sampling parameters on the device."""
        if self._device_params is None:
            self._device_params = SamplingTable(
                *(put(leaf.copy(), self._whole) for leaf in self._sampling_params)
            )
        return self._device_params

    def _rules(self) -> Rules:
        return Rules(self.bias, self.sampling_params(), self.cache.tokens)

    def _feed(self, seqs: Seqs[Sequence], draft: np.ndarray) -> Feed:
        plan = self.plan
        tokens = np.full((plan.slots, plan.width), NO_GUESS, np.int32)
        start, count = np.zeros(plan.slots, np.int32), np.zeros(plan.slots, np.int32)
        for b, seq in enumerate(seqs):
            tokens[seq.slot, 0] = seq.tokens[-1]
            tokens[seq.slot, 1 : 1 + draft.shape[1]] = draft[b]
            start[seq.slot] = len(seq.tokens) - 1
            count[seq.slot] = plan.width
        return Feed(tokens, start, count)


def merge(soft: SoftRows, shape: tuple[int, int], dtype: Any) -> Merged:
    """For a call [1, T] of width H. shape: (T, H)."""
    rows, there = np.zeros((1, *shape), dtype), np.zeros((1, shape[0]), bool)
    for first, own in soft:
        at = slice(first, first + len(own))
        there[0, at], rows[0, at] = True, own
    return Merged(rows, there)


def _put_row(table: Array, slot: Array, row: Array) -> Array:
    return table.at[slot].set(row)


def _choose_one(
    needs_sampler: bool, logits: Array, rules: Rules, last: Array, slot: Array
) -> Array:
    """The token after a prompt's last position [1, 1], by the same rules as in `verify`."""
    own = _own_rules(rules, slot)
    if not needs_sampler:
        return sampling.choose_greedy(logits, own.bias)
    return sampling.choose(logits, *own, last)


def _logprobs_one(logits: Array, chosen: Array, rules: Rules, slot: Array) -> LogprobRows:
    """`sampling.logprobs` of what `_choose_one` chose."""
    own = _own_rules(rules, slot)
    return sampling.logprobs(logits, chosen, own.bias, own.sampling_params)


def _own_rules(rules: Rules, slot: Array) -> Rules:
    """One slot's, as a batch of one row."""
    return Rules(*jax.tree.map(lambda leaf: leaf[slot][None], rules))


def pick_rows(details: LogprobRows, rows: np.ndarray) -> LogprobRows:
    return details.each(lambda part: np.asarray(part)[rows])
