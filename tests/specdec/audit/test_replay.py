"""An honest answer is verified in the fewest reads; a forged one is named at its place. On a target
that can be calculated, so that every forgery is compared with what generating anew gives."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from serve.outputs import output_of
from serve.runner import Update
from serve.stream import ChoiceText
from specdec.audit.making import PLAIN
from specdec.audit.receipt import OutputPart, Receipt, packed_floats, read_receipt
from specdec.audit.replay import replayed
from specdec.audit.verdict import Verdict, exit_code
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, Proposal, Sampling, Sequence
from tests.support.audits import IDENTITY, answers, changed, text_of
from tests.support.fakes_text import ALPHABET, EOS, CharTokenizer
from tests.support.serving import ServedTarget

TOKENIZER = CharTokenizer()
PROMPTS = [[0, 5, 6], [0, 9], [0, *range(3, 30)], [0, 5, 6]]
STOPS = [(), ("a", "b", "cd"), (), ("Q",)]


def made(drafter=None, k: int = 4, seed: int = 3, tokens: int = 30, **target) -> list[Receipt]:
    served = ServedTarget(**target)
    drafter = drafter or NoDrafter()
    engine = Engine(served, drafter, host_cycle(served, drafter, k))
    seqs = [
        Sequence(
            list(prompt),
            Sampling(seed=seed + i, logprobs=0),
            max_tokens=tokens,
            stop_ids=frozenset({EOS}),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return answers(engine, seqs, TOKENIZER, stops=STOPS)


def judged(*receipts: Receipt, **target) -> list[Verdict]:
    served = ServedTarget(**target)
    return replayed(receipts, served, TOKENIZER, served.max_draft)


@pytest.fixture(scope="module")
def honest() -> list[Receipt]:
    return [r for seed in range(6) for r in made(seed=10 * seed)]


def test_every_end_is_among_the_honest_answers(honest):
    ends = {(r.answer.finish, bool(r.limits.stop), r.answer.ids[-1] == EOS) for r in honest}
    assert {("length", False, False), ("stop", False, True), ("stop", True, False)} <= ends


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("slots", [1, 3])
def test_honest_answers_are_verified_in_the_fewest_reads(honest, k, slots):
    verdicts = judged(*honest, max_draft=k, slots=slots)
    assert [v.kind for v in verdicts] == ["verified"] * len(honest)
    assert [v.reads for v in verdicts] == [-(-(len(r.answer.ids) - 1) // (k + 1)) for r in honest]
    assert exit_code(verdicts) == 0


def test_a_receipt_is_the_same_with_any_drafter(honest):
    assert made(NgramDrafter(), 7, seed=0) == honest[:4]


def test_each_changed_id_is_named_at_its_place(honest):
    forged = [
        (r, i, changed(r, "answer", "ids", i, value=(token + 1 + i) % len(ALPHABET)))
        for r in honest[:8]
        for i, token in enumerate(r.answer.ids)
    ]
    verdicts = judged(*(f for _, _, f in forged))
    for (r, i, f), verdict in zip(forged, verdicts, strict=True):
        assert (verdict.kind, verdict.at) == ("differs", i), verdict
        assert (verdict.claimed.id, verdict.right.id) == (f.answer.ids[i], r.answer.ids[i])
        assert verdict.reads <= 1 + i // 8
    assert exit_code(verdicts) == 1


def test_another_length_or_end_is_named(honest):
    for r in honest:
        ids, end = list(r.answer.ids), r.answer.finish
        other = "length" if end == "stop" else "stop"
        shorter = [changed(r, "answer", "ids", value=ids[:n]) for n in range(1, len(ids))]
        longer = changed(r, "answer", "ids", value=[*ids, 7])
        forged = [*shorter, longer, changed(r, "answer", "finish", value=other)]
        for verdict in judged(*forged):
            assert verdict.kind == "ends otherwise", verdict
        assert judged(longer)[0].at == len(ids)


def test_a_beginning_is_verified_as_such(honest):
    begun = [
        changed(changed(r, "answer", "finish", value=None), "answer", "ids", value=r.answer.ids[:n])
        for r in honest[:4]
        for n in range(1, len(r.answer.ids) + 1)
    ]
    assert {v.kind for v in judged(*begun)} == {"verified"}


PARAMETERS = {
    "seed": [("seed",), [str(s) for s in range(40)]],
    "prompt": [("prompt", "ids", 1), range(2, 40)],
    "max_tokens": [("limits", "max_tokens"), range(1, 40)],
    "stop": [("limits", "stop"), [[], *([c] for c in "abcdefghQ")]],
    "stop_ids": [("limits", "stop_ids"), [[], *([i] for i in range(30))]],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_forged_request_is_not_found_only_where_its_answer_is_true(honest, name):
    path, values = PARAMETERS[name]
    found = set()
    for r in honest[:4]:
        forged = [changed(r, *path, value=value) for value in values]
        anew = [_anew(f) for f in forged]
        for f, right, verdict in zip(forged, anew, judged(*forged), strict=True):
            true = (f.answer.ids, f.answer.finish) == (right.answer.ids, right.answer.finish)
            assert (verdict.kind == "verified") == true, (verdict, right.answer)
            found.add(true)
    assert found == {True, False}


def _anew(receipt: Receipt) -> Receipt:
    """What plain decoding gives this request."""
    target, limits = ServedTarget(slots=1), receipt.limits
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    seq = Sequence(
        list(receipt.prompt.ids),
        replace(receipt.sampling_of(), logprobs=None),
        max_tokens=limits.max_tokens,
        stop_ids=frozenset(limits.stop_ids),
    )
    return answers(engine, [seq], TOKENIZER, IDENTITY, [limits.stop])[0]


def test_text_and_log_probabilities_are_compared(honest):
    r = honest[0]
    document = r.to_json()
    document["answer"]["text"] += "x"
    (verdict,) = judged(read_receipt(text_of(document)))
    assert verdict.kind == "text differs" and verdict.false
    values = r.chosen_logprobs().copy()
    values[5] += 0.25
    lied = r.model_copy(update={"logprobs": packed_floats(values.tolist())})
    (verdict,) = judged(lied)
    assert (verdict.kind, verdict.at) == ("log-probability differs", 5)


class Marked(CharTokenizer):
    """Letters that begin and end a call, and its name by any other but b: so long texts have calls.
    Counts what is decoded."""

    MARKS: ClassVar = {"<|tool_call>": "c", "<tool_call|>": "d"}
    decoded = 0

    def token_id(self, token: str) -> int | None:
        return ALPHABET.index(self.MARKS[token]) if token in self.MARKS else None

    def decode(self, ids, skip_special: bool = True) -> str:
        Marked.decoded += 1
        return "".join("b" if ALPHABET[i] == "b" else "call:f{" for i in ids if i > EOS)


OUTPUTS = {
    "plain": PLAIN,
    "chat": OutputPart(form="chat", special=False, tools=None, in_thought=True),
    "tools": OutputPart(form="chat", special=False, tools=("f",), in_thought=False),
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("stop", ["", "b"])
def test_ends_are_those_of_the_text_where_it_is_not_read_either(honest, output, stop):
    """Each claim's ids with each end, by a text that is read to its end for every one."""
    claims = []
    for r in honest:
        document = r.to_json()
        del document["answer"]["text"]
        document["limits"] |= {
            "stop": [stop] if stop else [],
            "output": OUTPUTS[output].model_dump(mode="json"),
        }
        for finish in ("stop", "length", "tool_calls", None):
            document["answer"]["finish"] = finish
            claims.append(read_receipt(text_of(document)))
    Marked.decoded = 0
    found = replayed(claims, ServedTarget(), Marked(), 7)
    reads_text = bool(stop) or output == "tools"
    assert (Marked.decoded > 0) == reads_text
    for claim, verdict, right in zip(claims, found, map(_end_by_text, claims), strict=True):
        wrong = claim.answer.finish not in (None, right[0]) or right[1] < len(claim.answer.ids)
        assert verdict.kind == ("ends otherwise" if wrong else "verified"), (verdict, right)
    calls = "tool_calls" in {finish for finish, _ in map(_end_by_text, claims)}
    assert calls == (output == "tools")


def _end_by_text(claim: Receipt) -> tuple[str | None, int]:
    """None: it goes on."""
    ids, limits = claim.answer.ids, claim.limits
    text = ChoiceText(Marked(), limits.stop, output_of(limits.output, Marked()))
    at_limit = "length" if len(ids) == limits.max_tokens else None
    finish = "stop" if ids[-1] in limits.stop_ids else at_limit
    ended = text.feed(Update(0, ids, finish=finish)).finish
    return ended, text.token_count


def test_a_commitment_is_compared_block_by_block():
    r = next(r for r in made(tokens=80) if len(r.answer.ids) == 80)
    assert r.commitments is not None and len(r.commitments.logits) == 3
    digests = [*r.commitments.logits[:1], "0" * 16, *r.commitments.logits[2:]]
    part = r.commitments.model_copy(update={"logits": tuple(digests)})
    true, false = judged(r, r.model_copy(update={"commitments": part}))
    assert true.kind == "verified"
    assert (false.kind, false.at) == ("commitment differs", 1) and false.false
    assert "ids from 32 on" in str(false)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("allowed", [2**31 - 1]),
        ("bad_words", [[4, 2**31 - 1]]),
        ("stop_ids", [100]),
        ("budget", {"open_id": 4, "close_id": 2**31 - 1, "tokens": 0, "inside": True}),
    ],
)
def test_a_rule_on_ids_that_the_model_does_not_have_is_refused(honest, rule, value):
    rules = {"grammar": None, "allowed": None, "bad_words": [], "min_tokens": 1, "stop_ids": []}
    forged = changed(honest[0], "constraint", value={**rules, "budget": None, rule: value})
    strange, beside = judged(forged, honest[0])
    assert strange.kind == "refused" and "it names token" in strange.reason
    assert beside.kind == "verified"


def test_what_has_no_room_is_refused_and_the_others_are_judged(honest):
    r = honest[0]
    strange = changed(r, "answer", "ids", 2, value=len(ALPHABET))
    long = changed(r, "answer", "ids", value=[5] * 600)
    first, second, third = judged(strange, long, r)
    assert first.kind == second.kind == "refused" and third.kind == "verified"
    assert "token 61" in first.reason and "600" not in first.reason
    assert "context is 512" in second.reason
    assert exit_code([first, third]) == 2 and exit_code([first, judged(strange)[0]]) == 2


class Counting(NoDrafter):
    """Counts the columns that the replay verifies."""

    columns = 0

    def propose(self, seqs, k) -> Proposal:
        proposal = super().propose(seqs, k)
        assert (proposal.tokens == NO_GUESS).all()
        Counting.columns = max(Counting.columns, k)
        return proposal


def test_the_replay_drafts_nothing_and_verifies_k_rows(honest, monkeypatch):
    monkeypatch.setattr("specdec.audit.replay.NoDrafter", Counting)
    judged(honest[0], max_draft=5)
    assert Counting.columns == 5


def test_conditions_that_may_force_a_text_are_shown(honest):
    rules = {
        "grammar": None,
        "allowed": list(range(20)),
        "bad_words": [[4, 5]],
        "min_tokens": 3,
        "stop_ids": [EOS],
        "budget": None,
    }
    forced = changed(honest[0], "constraint", value=rules)
    forced = changed(forced, "sampling", "logit_bias", value=[[7, 100.0]])
    (verdict,) = judged(forced)
    shown = "\n".join(verdict.conditions)
    for part in ("logit_bias on 1 ids (7: 100)", "20 allowed ids (0, 1,", "1 bad words", "3 tok"):
        assert part in shown
    assert shown.splitlines()[0] in str(verdict)


def test_claims_go_on_together_once_all_are_read(honest, monkeypatch):
    """A cycle of few rows takes nearly as long as one of all."""
    batches: list[int] = []

    class Watched(NoDrafter):
        def propose(self, seqs, k) -> Proposal:
            batches.append(len(seqs))
            return super().propose(seqs, k)

    monkeypatch.setattr("specdec.audit.replay.NoDrafter", Watched)
    judged(*honest[:2], max_draft=1)
    assert batches[0] == 2
