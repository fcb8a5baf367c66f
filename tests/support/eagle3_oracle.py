"""An EAGLE-3 head in plain torch, one anchor at a time, straight from the formulas of EAGLE-3
(arXiv 2503.01840). It shares no code with the head that it judges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from drafters.eagle3.spec import Head, HeadSpec, tensors
from specdec.core.types import Sequence

VOCAB = 96
DRAFT_VOCAB = 40
SPEC = HeadSpec(
    hidden=32,
    ffw=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=VOCAB,
    draft_vocab=DRAFT_VOCAB,
    layers=(1, 3, 5),
    max_position=512,
    theta=1e4,
)
TOKENS = 10
STEPS = 3
FLAGS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"fc_norm": True, "norm_output": True},
    {"window": 5},
]


def random_head(seed: int = 0, **flags) -> Head:
    """Norm weights that aren't 1, linears that keep the scale."""
    random, spec = np.random.default_rng(seed), replace(SPEC, **flags)
    weights = {}
    for name, shape in tensors(spec).items():
        noise = random.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    ids = np.sort(random.choice(spec.vocab, spec.draft_vocab, replace=False)).astype(np.int64)
    return Head(spec, {name: value.astype(np.float32) for name, value in weights.items()}, ids)


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Embedded next tokens [TOKENS + STEPS, H] and features [TOKENS, F]."""
    random = np.random.default_rng(seed)
    embedded = random.standard_normal((TOKENS + STEPS, SPEC.hidden)).astype(np.float32)
    return embedded, random.standard_normal((TOKENS, SPEC.features)).astype(np.float32)


def _norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotate(x, position, theta):
    """x [heads, D] at one position, Llama's halves."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Oracle:
    """The head in plain torch. grad: make the weights leaves with gradients."""

    def __init__(self, head: Head, grad: bool = False) -> None:
        self.spec = head.spec
        self.w = {n: torch.tensor(v).requires_grad_(grad) for n, v in head.weights.items()}

    def fuse(self, features):
        spec, w = self.spec, self.w
        if spec.norm_before_fc:
            features = _norm(features, w["input_norm"], spec.eps)
        if spec.fc_norm:
            parts = features.chunk(len(spec.layers), -1)
            features = torch.cat(
                [_norm(p, w[f"fc_norm.{i}"], spec.eps) for i, p in enumerate(parts)], -1
            )
        return features @ w["fc"].T

    def step(self, cache: list, embedded, hidden, position: int):
        """One token [H]: appends (position, k, v) to `cache`, returns the output [H]."""
        spec, w = self.spec, self.w
        normed = _norm(hidden, w["hidden_norm"], spec.eps)
        both = torch.cat([_norm(embedded, w["input_layernorm"], spec.eps), normed])
        q, k, v = (
            (w[f"self_attn.{n}_proj"] @ both).reshape(-1, spec.head_dim) for n in ("q", "k", "v")
        )
        q, k = _rotate(q, position, spec.theta), _rotate(k, position, spec.theta)
        cache.append((position, k, v))
        seen = [e for e in cache if spec.window is None or position - e[0] < spec.window]
        share = spec.heads // spec.kv_heads
        keys = torch.stack([e[1] for e in seen]).repeat_interleave(share, 1)
        values = torch.stack([e[2] for e in seen]).repeat_interleave(share, 1)
        scores = torch.einsum("nd,snd->ns", q, keys) * spec.head_dim**-0.5
        mixed = torch.einsum("ns,snd->nd", scores.softmax(-1), values).reshape(-1)
        out = (normed if spec.norm_before_residual else hidden) + w["self_attn.o_proj"] @ mixed
        x = _norm(out, w["post_attention_layernorm"], spec.eps)
        gate = torch.nn.functional.silu(w["mlp.gate_proj"] @ x)
        return out + w["mlp.down_proj"] @ (gate * (w["mlp.up_proj"] @ x))

    def logits(self, out):
        return self.w["lm_head"] @ _norm(out, self.w["norm"], self.spec.eps)

    def chain(self, embedded, features, anchor: int, steps: int):
        """Logits [steps, V] of a draft from `anchor`: prefill 0..anchor, then the head on its own,
        fed the true tokens. embedded [T + steps, H]: of the token after each position."""
        cache: list = []
        fused = self.fuse(features)
        for p in range(anchor + 1):
            out = self.step(cache, embedded[p], fused[p], p)
        rows = [self.logits(out)]
        for n in range(1, steps):
            fed = _norm(out, self.w["norm"], self.spec.eps) if self.spec.norm_output else out
            out = self.step(cache, embedded[anchor + n], fed, anchor + n)
            rows.append(self.logits(out))
        return torch.stack(rows)


class Judging:
    """Mixed into a drafter: compares guesses with the formulas on a fresh prefill of the text,
    chosen by argmax or with the target's noise: `by_the_formulas`, of each backend its own. Every
    third cycle has one guess: it makes no difference to what follows."""

    judged = cycles = 0

    def propose(self, seqs, k):
        self.cycles += 1
        proposal = super().propose(seqs, k if self.cycles % 3 else 1)
        for seq, guesses in zip(seqs, proposal.tokens, strict=True):
            if seq.emitted % 6 == 1:  # the formulas take a while
                expected = self.by_the_formulas(seq, guesses)
                assert guesses.tolist() == expected, (seq.request_id, seq.emitted)
                self.judged += 1
        return proposal

    @staticmethod
    def read_again(fresh, tokens):
        """The steps of a fresh target that reads all tokens but the last."""
        text, chunk, end = Sequence(tokens[:-1], slot=0), fresh.prefill_chunk, len(tokens) - 1
        return [fresh.prefill(text, s, min(end, s + chunk)) for s in range(0, end, chunk)]
