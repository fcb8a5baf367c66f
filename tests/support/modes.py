"""How the lossless tests sample: request i of a mode."""

from __future__ import annotations

from specdec.core.types import Sampling


def greedy(i: int) -> Sampling:
    return Sampling()


def nucleus(i: int) -> Sampling:
    return Sampling(temperature=0.8, top_p=0.9, seed=100 + i)


def everything(i: int) -> Sampling:
    return Sampling(
        temperature=1.0,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=((7, 2.0),),
        seed=i,
    )


MODES = {"greedy": greedy, "nucleus": nucleus, "everything": everything}
