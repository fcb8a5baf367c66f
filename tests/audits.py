"""Honest answers of many kinds and many forged ones, on mini: every honest one is verified, and a
forgery passes exactly where generating anew gives its claim.

python -m tests.audits --forgeries 3000 --seed 1
python -m tests.audits --makers none ngram/device --forgeries 100    # a part

Forgeries are drawn from the answers of all makers, about a third each: ids and ends, requests, and
the same requests with the log-probabilities and commitments of the honest answer. Prints counts,
and ends with code 1 at the first thing that is not so. A maker is DRAFTER, DRAFTER/device,
DRAFTER/cuda (the CUDA target's references, on the CPU), DRAFTER/card or DRAFTER/card-device (its
kernels). Answers of other weights and dtypes are made as the first maker's are.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seqs
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from drafters import registry
from drafters.none.host import NoDrafter
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, load_model
from specdec.audit.identity import identity_of
from specdec.audit.making import Identity
from specdec.audit.receipt import Arithmetic, Receipt
from specdec.audit.verdict import Verdict
from specdec.audit.verify import judged_by, model_for
from specdec.constraints.constraint import TextConstraint, TextRules, unpacked
from specdec.constraints.grammar import composed
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Reuse, Sampling, Sequence
from targets import mini
from tests.support.audits import answers, changed, relabelled

Found = TypeVar("Found")

MAKERS = (
    "none",
    "ngram",
    "suffix",
    "eagle3",
    "assistant",
    "auto",
    "none/device",
    "ngram/device",
    "eagle3/device",
    "ngram/cuda",
)
OTHER = {"int8": {"int8": True}, "bfloat16": {"dtype": "bfloat16"}, "K/V": {"kv_dtype": "int8"}}
"""Set-ups whose answers are claimed for JAX's default, float32."""
OTHER_ON_CARDS = {"fp8": {"dtype": "fp8"}, "int4": {"dtype": "int4"}, "K/V": {"kv_dtype": "fp8"}}
"""The same for CUDA's bfloat16."""
PLACES: dict[str, dict[str, Any]] = {
    "cuda": {"backend": "cuda", "device": "cpu", "dtype": "bfloat16"},
    "card": {"backend": "cuda", "dtype": "bfloat16"},
    "card-device": {"backend": "cuda", "dtype": "bfloat16"},
}
"""Options of what stands behind a maker's slash."""
TEXTS = (
    "def add(first, second):\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\n\nfor name in os.listdir(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, 3]\n",
)
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": ((30, -4.5), (31, 2.0))},
    {"temperature": 0.9, "seed": 2**64 - 1},
)
"""Sampling parameters, beside a seed."""
UNUSED = 4001
"""A token of mini that no answer here has."""
TOKENS = 32
BATCH = 4


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int = TOKENS
    stops: tuple[str, ...] = ()
    rules: TextRules | None = None
    predicted: tuple[int, ...] | None = None
    scope: str = ""

    def sequence(self, vocabulary: Vocabulary, stop_ids: Seqs[int]) -> Sequence:
        rules, predicted = self.rules, self.predicted
        return Sequence(
            list(self.prompt),
            self.sampling,
            max_tokens=self.max_tokens,
            stop_ids=frozenset(stop_ids),
            constraint=None if rules is None else TextConstraint(rules, vocabulary),
            prediction=None
            if predicted is None
            else Prediction(PredictedText(predicted), len(self.prompt)),
            reuse=Reuse(self.scope),
        )


def requests(model: Model, draw: random.Random) -> list[Asked]:
    encode, stops = model.tokenizer.encode, model.tokenizer.stop_ids
    found = []
    for i, shape in enumerate(SHAPES * 3):
        sampling = Sampling(**{"seed": draw.randrange(2**63), **shape}, logprobs=0)
        found.append(Asked(tuple(encode(TEXTS[i % 4])), sampling, draw.randint(4, TOKENS)))
    plain = found[1]
    found.append(replace(plain, stops=("\n", "self")))
    found.append(replace(found[0], stops=("return", "zzz")))
    found.append(replace(plain, predicted=tuple(encode(TEXTS[1])[1:])))
    long = tuple(encode("".join(TEXTS)) * 3)[:300]
    found += [replace(plain, prompt=long), replace(found[0], prompt=(*long[:280], 7))]
    for rules in (
        TextRules(grammar=composed('start: "a" /[0-9 ]{3,9}/ ("x" | "yy")\n', {})),
        TextRules(grammar=composed("start: /[a-z]+(, [a-z]+)*/\n", {})),
        TextRules(allowed=tuple(range(200, 400)), stop_ids=stops),
        TextRules(bad_words=((215,), (274, 376)), stop_ids=stops),
        TextRules(min_tokens=20, stop_ids=stops),
    ):
        found += [replace(plain, rules=rules), replace(found[0], rules=rules)]
    return found


def loaded(maker: str, **options: Any) -> tuple[Model, Any]:
    """A model with a maker's drafter, and its speculation."""
    drafter, _, where = maker.partition("/")
    options = PLACES.get(where, {}) | options
    config = ModelConfig(options.pop("model", "mini"), max_len=512, slots=BATCH, **options)
    loop = "device" if where.endswith("device") else "host"
    own = registry.config_type()(drafter=drafter, k=4, loop=loop)
    speculation = registry.resolved(own, config)
    return load_model(config, speculation), speculation


def made(maker: str, draw: random.Random, **options: Any) -> tuple[list[Asked], list[Receipt]]:
    model, speculation = loaded(maker, **options)
    engine = make_engine(model, speculation, prefix=PrefixConfig(cache_ram=0.25))
    asked, vocabulary = requests(model, draw), Vocabulary(model.tokenizer)
    seqs = [one.sequence(vocabulary, model.tokenizer.stop_ids) for one in asked]
    stops = [one.stops for one in asked]
    return asked, answers(engine, seqs, model.tokenizer, identity_of(model), stops)


@cache
def model_of(arithmetic: str) -> Model:
    """mini with an arithmetic, given as JSON."""
    return model_for(Arithmetic.model_validate_json(arithmetic), "mini")


def by_arithmetic(
    work: Callable[[Model, list[Receipt]], list[Found]], receipts: Seqs[Receipt]
) -> list[Found]:
    """What work finds of each receipt, with one model for each arithmetic."""
    keyed = [(receipt.arithmetic.model_dump_json(), i) for i, receipt in enumerate(receipts)]
    found: dict[int, Found] = {}
    for arithmetic, pairs in groupby(sorted(keyed), key=itemgetter(0)):
        numbers = [i for _, i in pairs]
        results = work(model_of(arithmetic), [receipts[i] for i in numbers])
        found |= zip(numbers, results, strict=True)
    return [found[i] for i in range(len(receipts))]


def judged(receipts: Seqs[Receipt]) -> list[Verdict]:
    return by_arithmetic(judged_by, receipts)


def check_honest(receipts: list[Receipt]) -> None:
    began, reads, most = time.monotonic(), 0, 0
    for receipt, verdict in zip(receipts, judged(receipts), strict=True):
        k = receipt.arithmetic.width - 1
        most += len(receipt.answer.ids) - 1
        fewest = -(-(len(receipt.answer.ids) - 1) // (k + 1))
        assert verdict.kind == "verified", (verdict, receipt.to_text())
        assert verdict.reads == fewest, (verdict, receipt.to_text())
        reads += verdict.reads
    kinds = Counter(receipt.answer.finish for receipt in receipts)
    print(
        f"honest: {len(receipts)} verified {dict(kinds)}, {reads} reads for {most} of plain "
        f"decoding, {time.monotonic() - began:.0f} s",
        flush=True,
    )


def forged_answers(receipts: Seqs[Receipt], draw: random.Random) -> Iterator[tuple[Receipt, Any]]:
    """Forged ids and ends, with the honest receipt: the request is the same."""
    while True:
        honest = draw.choice(receipts)
        forged = forged_answer(honest, draw)
        if (forged.answer.ids, forged.answer.finish) != (honest.answer.ids, honest.answer.finish):
            yield forged, honest


def forged_answer(honest: Receipt, draw: random.Random) -> Receipt:
    ids, kind = list(honest.answer.ids), draw.randrange(5)
    at = draw.randrange(len(ids))
    if kind < 3:
        return changed(honest, "answer", "ids", at, value=draw.randrange(4096))
    if kind == 3:
        cut = [*ids[: at + 1], *([] if draw.random() < 0.5 else [draw.randrange(4096)])]
        return changed(honest, "answer", "ids", value=cut)
    finish = draw.choice(["stop", "length", "tool_calls"])
    return changed(honest, "answer", "finish", value=finish)


@dataclass(frozen=True)
class Forged:
    """A receipt of which one part was replaced."""

    part: str
    bare: Receipt | None
    """Without what speaks for the weights and parameters beside the ids; None where just that was
    forged."""
    whole: Receipt


def forged_requests(receipts: Seqs[Receipt], draw: random.Random) -> Iterator[Forged]:
    while True:
        honest = draw.choice(receipts)
        s = honest.sampling
        drawn: list[tuple[tuple[Any, ...], Any]] = [
            (("seed",), str(draw.randrange(2**64))),
            (("sampling", "temperature"), s.temperature + draw.choice((1e-5, 0.01, 0.1, 0.5))),
            (("sampling", "top_p"), draw.uniform(0.5, 1)),
            (("sampling", "top_k"), draw.choice((1, 2, 19, 21, 63, 64, 0))),
            (("sampling", "min_p"), draw.choice((0.001, 0.01, 0.1))),
            (("sampling", "repetition_penalty"), s.repetition_penalty + draw.choice((0.01, 0.5))),
            (("sampling", "presence_penalty"), draw.uniform(-1, 1)),
            (("sampling", "frequency_penalty"), draw.uniform(-1, 1)),
            (("sampling", "logit_bias"), [[draw.randrange(4096), draw.uniform(-50, 9)]]),
            (("prompt", "ids", draw.randrange(len(honest.prompt.ids))), draw.randrange(4096)),
            (("limits", "max_tokens"), draw.randint(1, 2 * TOKENS)),
            (("limits", "stop"), draw.choice(([], ["\n"], ["self"], [" "], ["return"]))),
            (("limits", "stop_ids"), draw.choice(([], [1], [9, 16], [215]))),
            (("constraint",), None),
            (("commitments", "logits", 0), f"{draw.randrange(2**64):016x}"),
            (("commitments", "sampling", 0), f"{draw.randrange(2**64):016x}"),
        ]
        path, value = draw.choice(drawn)
        part = ".".join(key for key in path if isinstance(key, str))
        whole = relabelled(honest, *path, value=value)
        bare = None if path[0] == "commitments" else changed(honest, *path, value=value)
        if whole != honest:
            yield Forged(part, bare, whole)


def anew(model: Model, forged: list[Receipt]) -> list[Receipt]:
    """What plain decoding gives these requests."""
    drafter, vocabulary = NoDrafter(), Vocabulary(model.tokenizer)
    cycle = host_cycle(model.target, drafter, 0)
    engine = Engine(model.target, drafter, cycle, max_waiting=len(forged))
    seqs = [
        Sequence(
            list(r.prompt.ids),
            r.sampling_of(),
            max_tokens=r.limits.max_tokens,
            stop_ids=frozenset(r.limits.stop_ids),
            constraint=r.constraint and unpacked(r.constraint.model_dump(), vocabulary),
            reuse=None,
        )
        for r in forged
    ]
    identity = Identity(forged[0].model, forged[0].arithmetic)
    return answers(engine, seqs, model.tokenizer, identity, [r.limits.stop for r in forged])


def check_answers(forged: Seqs[Receipt], honest: Seqs[Receipt]) -> None:
    verdicts = judged(forged)
    for claim, true, verdict in zip(forged, honest, verdicts, strict=True):
        check(claim, true, verdict)
    counts = dict(Counter(verdict.kind for verdict in verdicts))
    print(f"ids and ends: {len(forged)} {counts}, each as generating has it", flush=True)


def check_requests(forged: Seqs[Forged]) -> None:
    """Prints for each part how many were forged, and how many of them passed."""
    right = by_arithmetic(anew, [each.whole for each in forged])
    forms = {"ids": [each.bare for each in forged], "all": [each.whole for each in forged]}
    passed: Counter[tuple[str, str]] = Counter()
    for form, claims in forms.items():
        found = [(n, claim) for n, claim in enumerate(claims) if claim is not None]
        verdicts = judged([claim for _, claim in found])
        for (n, claim), verdict in zip(found, verdicts, strict=True):
            check(claim, right[n], verdict)
            passed[forged[n].part, form] += verdict.kind == "verified"
        counts = dict(Counter(verdict.kind for verdict in verdicts))
        print(f"requests by {form}: {len(found)} {counts}, each as generating anew has it")
    for part, count in sorted(Counter(each.part for each in forged).items()):
        by_ids, by_all = passed[part, "ids"], passed[part, "all"]
        print(f"  {part}: {count} forged, pass {by_ids} by ids, {by_all} with commitments")
    sys.stdout.flush()


def check(claim: Receipt, true: Receipt, verdict: Verdict) -> None:
    """It is verified exactly where the claim is what generating gives, and a wrong id is named at
    its place."""
    shown = verdict, claim.to_text(), true.to_text()
    assert (verdict.kind == "verified") == (claimed_of(claim) == given_for(claim, true)), shown
    pairs = zip(claim.answer.ids, true.answer.ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert verdict.kind != "differs" or verdict.at == first, shown


def claimed_of(claim: Receipt) -> tuple[Any, ...]:
    """All that is claimed of an answer."""
    return claim.answer, claim.logprobs, claim.commitments


def given_for(claim: Receipt, true: Receipt) -> tuple[Any, ...]:
    """The same of the right answer, without what is not claimed."""
    text = None if claim.answer.text is None else true.answer.text
    answer = true.answer.model_copy(update={"text": text})
    return answer, claim.logprobs and true.logprobs, claim.commitments and true.commitments


def one_bit_changed(folder: Path) -> Path:
    """A copy of mini with another last bit in the embedding of a token that no answer has."""
    model = Path(shutil.copytree(mini.path("mini"), folder / "mini"))
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:begin])
    found = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    first, end = found["data_offsets"]
    data[begin + first + UNUSED * (end - first) // found["shape"][0]] ^= 1
    file.write_bytes(data)
    return model


def check_others(maker: str, asked_seed: int) -> None:
    """Answers of other arithmetics and of other weights that are claimed for a maker's."""
    _, honest = made(maker, random.Random(asked_seed))
    others = OTHER_ON_CARDS if "/card" in maker else OTHER
    with TemporaryDirectory() as folder:
        weights = {"one bit of the weights": {"model": str(one_bit_changed(Path(folder)))}}
        _check_others(others | weights, maker, asked_seed, honest)


def _check_others(
    others: dict[str, dict[str, Any]], maker: str, asked_seed: int, honest: Seqs[Receipt]
) -> None:
    for name, options in others.items():
        _, receipts = made(maker, random.Random(asked_seed), **options)
        claimed = [
            r.model_copy(update={"model": h.model, "arithmetic": h.arithmetic})
            for r, h in zip(receipts, honest, strict=True)
        ]
        numbers = [r.model_copy(update={"commitments": None}) for r in claimed]
        alone = [r.model_copy(update={"logprobs": None}) for r in numbers]
        each = alone, numbers, claimed
        verdicts = [judged(some) for some in each]
        seen = [sum(verdict.false for verdict in some) for some in verdicts]
        for some, found in zip(each, verdicts, strict=True):
            for triple in zip(some, honest, found, strict=True):
                check(*triple)
        print(
            f"{name}, claimed for {maker}: seen in {seen[0]} of {len(claimed)} by ids, "
            f"in {seen[1]} with log-probabilities, in {seen[2]} with commitments",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--makers", nargs="+", default=list(MAKERS))
    parser.add_argument("--forgeries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    every: list[Receipt] = []
    for maker in options.makers:
        _, receipts = made(maker, random.Random(f"{options.seed} {maker}"))
        print(f"{maker}: {len(receipts)} answers", flush=True)
        every += receipts
    check_honest(every)
    draw, count = random.Random(options.seed), options.forgeries // 3
    requested = forged_requests(every, draw)
    forged = [next(requested) for _ in range(count)]
    rest = options.forgeries - count - sum(each.bare is not None for each in forged)
    drawn = forged_answers(every, draw)
    pairs = [next(drawn) for _ in range(rest)]
    check_answers([f for f, _ in pairs], [h for _, h in pairs])
    check_requests(forged)
    check_others(options.makers[0], options.seed)


if __name__ == "__main__":
    main()
