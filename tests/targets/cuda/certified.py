"""Sampling parameters for tests of the certified head."""

from __future__ import annotations

from specdec.core.types import Sampling

FEW = {
    "greedy": Sampling(),
    "gumbel": Sampling(temperature=1.0, seed=3),
    "gemma": Sampling(temperature=1.0, top_k=64, top_p=0.95, seed=5),
    "one": Sampling(temperature=0.7, top_k=1, seed=5),
    "min-p": Sampling(temperature=1.3, min_p=0.05, seed=7),
    "min-p of few": Sampling(temperature=1.3, min_p=0.05, top_k=9, seed=7),
    "cold": Sampling(temperature=0.01, top_k=200, seed=1),
    "biased": Sampling(temperature=1.0, seed=2, logit_bias=((3, 9.0), (5, -100.0))),
}
"""Choices that candidates serve."""
WHOLE = {
    "nucleus alone": Sampling(temperature=1.0, top_p=0.9, seed=1),
    "penalised": Sampling(temperature=0.0, repetition_penalty=1.3),
    "many": Sampling(temperature=1.0, top_k=257, seed=1),
}
"""Choices that need the whole head."""
