"""Whether a checkpoint is wired soundly: scores of a plain text, in and out of order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.assembly.model import Model

PROBE = '''def add(first, second):
    """Return the sum of two numbers."""
    return first + second


def multiply(first, second):
    """Return the product of two numbers."""
    return first * second


for number in range(10):
    print(number, add(number, 1), multiply(number, 2))
'''


@dataclass(frozen=True)
class Wiring:
    """Mean nats per token of a plain text, of the same tokens shuffled, and of random tokens the
    first and the second time that they are read."""

    text: float
    shuffled: float
    first: float
    second: float
    uniform: float

    @property
    def verdict(self) -> str:
        """A sound model prefers order to disorder and reads a repetition more easily, however
        hard the text; a wiring fault takes away one or both, whatever the text."""
        if not np.isfinite([self.text, self.shuffled, self.first, self.second]).all():
            return "fault: scores are not finite (overflow, or damaged weights)"
        if self.text > 0.95 * self.uniform or self.text > 0.9 * self.shuffled:
            return "fault: word order makes no difference (positions, attention or embeddings)"
        if self.second > 0.95 * self.first:
            return "doubtful: a repetition is no easier to read (attention to earlier positions)"
        return "sound"


def probe(model: Model) -> Wiring:
    """Score the probe texts; see Wiring."""
    window_nll = model.backend.scorer(model.target)
    random = np.random.default_rng(0)
    ids = model.tokenizer.encode(PROBE)
    bos, body = ids[0], ids[1:]
    shuffled = [int(i) for i in random.permutation(body)]
    common = sorted(set(body))
    once = [int(i) for i in random.choice(common, 48)]
    repeated = window_nll([bos, *once, *once])
    return Wiring(
        text=float(window_nll(ids).mean()),
        shuffled=float(window_nll([bos, *shuffled]).mean()),
        first=float(repeated[:48].mean()),
        second=float(repeated[48:].mean()),
        uniform=float(np.log(model.target.vocab)),
    )
