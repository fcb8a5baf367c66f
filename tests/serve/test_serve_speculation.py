"""A request's `speculative` options: accepted, capped, refused, echoed, and without effect on the
answer."""

from __future__ import annotations

import pytest

from drafters.auto.host import AutoDrafter, Weighted
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.suffix.host import SuffixDrafter
from serve.lockstep import _packed, _unpacked
from specdec.core.cycle import host_cycle
from specdec.core.engine import DraftSetup, Engine
from specdec.core.policy.choice import Menu, Policy
from specdec.core.policy.costs import CostTable, Work
from specdec.core.types import Sequence, Speculative
from tests.support.fakes import Noise
from tests.support.serving import TOKENIZER, ServedTarget, served

K = 4
ASK = {"prompt": "abcabcabc", "max_tokens": 16, "seed": 3, "temperature": 1.0}


class Alike(CostTable):
    """Each cycle costs the same, however busy the machine is."""

    def saw(self, work: Work, seconds: float) -> None:
        super().saw(work, 1.0)


def engine_of(auto=True):
    target = ServedTarget(slots=3, chunk=4)
    if not auto:
        drafter = NgramDrafter(1, 3)
        cycle = host_cycle(target, drafter, K)
        return Engine(target, drafter, cycle, drafting=DraftSetup("ngram", (), K))
    policy = Policy(K, Alike(), Menu.of([0, K], [0, K]), "model")
    texts = {"suffix": SuffixDrafter(1), "ngram": NgramDrafter(1, 3)}
    drafter = AutoDrafter(texts, Weighted("model", Noise(30)), policy)
    drafting = DraftSetup("auto", ("suffix", "ngram", "model"), K, policy)
    return Engine(target, drafter, host_cycle(target, drafter, K), drafting=drafting)


@pytest.fixture(scope="module")
def server():
    with served(engine_of(), "fake", tokenizer=TOKENIZER) as it:
        yield it


def asked(server, **wish):
    reply = server.post("completions", **ASK, **({"speculative": wish} if wish else {}))
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"enabled": False}, {"drafter": "none", "k": 0, "enabled": False}),
        ({"enabled": False, "k": 3}, {"drafter": "none", "k": 0, "enabled": False}),
        ({"k": 0}, {"drafter": "none", "k": 0, "enabled": False}),
        ({"drafter": "none"}, {"drafter": "none", "k": 0, "enabled": False}),
        ({"k": 2}, {"drafter": "auto", "k": 2, "enabled": True}),
        ({"enabled": True}, {"drafter": "auto", "k": K, "enabled": True}),
        ({"drafter": "ngram"}, {"drafter": "ngram", "k": K, "enabled": True}),
        ({"drafter": "model", "k": 1}, {"drafter": "model", "k": 1, "enabled": True}),
        ({"drafter": "auto"}, {"drafter": "auto", "k": K, "enabled": True}),
    ],
)
def test_a_wish_is_taken_told_and_changes_nothing(server, wish, expected):
    free, reply = asked(server), asked(server, **wish)
    assert reply["choices"] == free["choices"] and "speculative" not in free["metrics"]
    assert reply["metrics"]["speculative"] == expected
    counts = reply["metrics"]["speculative_decoding"]
    assert counts["draft_tokens"] <= expected["k"] * counts["verify_passes"]
    assert expected["k"] or counts["draft_tokens"] == 0
    if wish == {"drafter": "model", "k": 1}:
        assert counts["draft_tokens"] == counts["verify_passes"]


def test_it_holds_in_chats_streams_and_beside_predictions(server):
    wish = {"k": 1}
    text = asked(server)["choices"][0]["text"]
    prediction = {"type": "content", "content": text}
    reply = server.post("completions", **ASK, speculative=wish, prediction=prediction).json()
    counts = reply["metrics"]["speculative_decoding"]
    assert reply["choices"][0]["text"] == text
    assert counts["draft_tokens"] <= counts["verify_passes"] and counts["tokens_per_pass"] > 1.5
    messages = [{"role": "user", "content": "abc"}]
    chat = server.post("chat/completions", messages=messages, max_tokens=4, speculative=wish)
    assert chat.json()["metrics"]["speculative"]["k"] == 1
    stream = server.openai.completions.create(
        model="fake", **ASK, stream=True, extra_body={"speculative": {"enabled": False}}
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"drafter": "eagle3"}, "not loaded: this server has auto, suffix, ngram, model"),
        ({"drafter": ""}, "not loaded"),
        ({"k": 5}, "at most 4 tokens per cycle, not 5"),
        ({"k": 99}, "less than or equal to 31"),
        ({"k": -1}, "greater than or equal to 0"),
        ({"k": True}, "valid integer"),
        ({"enabled": "yes"}, "valid boolean"),
        ({"depth": 3}, "depth"),
        (7, "speculative"),
        ([], "speculative"),
    ],
)
def test_what_is_refused(server, wish, words):
    reply = server.post("completions", **ASK, speculative=wish)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"].startswith("speculative")


def test_metrics_tell_what_the_policy_knows(server):
    asked(server)
    found = server.metrics()
    labels = 'engine="0",model_name="fake"'
    assert (
        found[
            f'specdec:drafter_tokens_per_pass{{drafter="none",{labels[:10]},k="0",model_name="fake"}}'
        ]
        == 1
    )
    assert any(name.startswith("specdec:drafter_rows_total") for name in found)
    assert any(name.startswith("specdec:cycle_seconds") for name in found)


def test_a_server_of_one_drafter_has_that_one():
    with served(engine_of(auto=False), "fake", tokenizer=TOKENIZER) as server:
        free = asked(server)
        assert free["metrics"]["speculative_decoding"]["draft_tokens"] > 0
        for wish in ({"enabled": False}, {"drafter": "ngram", "k": 1}):
            assert asked(server, **wish)["choices"] == free["choices"]
        refusal = server.post("completions", **ASK, speculative={"drafter": "suffix"})
        assert "this server has ngram" in refusal.json()["error"]["message"]
        choices = "specdec:drafter_rows", "specdec:drafter_tokens_per_pass"
        assert not any(name.startswith(choices) for name in server.metrics())


def test_followers_are_told():
    for wish in (None, Speculative("suffix", 2), Speculative(k=0)):
        seq = Sequence([1, 2])
        seq.speculative = wish
        assert _unpacked(_packed(seq), lambda packed: None).speculative == wish


def test_nobody_drafts_where_there_is_nobody():
    target = ServedTarget(slots=1)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    with served(engine, "fake", tokenizer=TOKENIZER) as server:
        assert asked(server, enabled=True)["metrics"]["speculative"]["k"] == 0
