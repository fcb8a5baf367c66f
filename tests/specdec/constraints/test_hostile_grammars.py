"""Grammars that would kill or hang the process that compiles them are refused, and nothing else
comes of it."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from serve.gemma.tool_grammar import tool_grammar
from specdec.constraints import compiled, trial
from specdec.constraints.compiled import GROWN_BYTES
from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.exclusive import exclusive
from specdec.constraints.grammar import composed
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.trial import (
    REFUSED_SECONDS,
    REMEMBERED,
    Cancellation,
    Cancelled,
    Trial,
    Trials,
    Untried,
    Verdicts,
    cancellable,
    remembered_only,
)
from specdec.constraints.vocabulary import CACHED, CACHED_BYTES, Vocabulary
from specdec.core.constraint import EVERYTHING, mask_words
from specdec.core.errors import UserError
from specdec.core.types import Sequence
from tests.support.constrained import mini_tokenizer, mini_vocabulary

PRIMES = 999983, 999979, 999961, 999959, 999953
DEEP = "nested too deeply"
LONG = "more than 3 seconds|too large"
"""Where time and memory run out at about the same time, either may come first."""


def chain(length: int, link) -> dict:
    """Definitions that refer to each other in a row."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "integer"}}}


SCHEMAS = {
    "references": (chain(20_000, lambda end: end), DEEP),
    "objects": (
        chain(5_000, lambda end: {"properties": {"x": end}, "required": ["x"], "type": "object"}),
        DEEP,
    ),
    "arrays": (chain(20_000, lambda end: {"items": end, "minItems": 1, "type": "array"}), DEEP),
    "ways": (chain(20_000, lambda end: {"anyOf": [end]}), DEEP),
    "multiples": (
        {"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES]},
        LONG,
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_would_end_the_process(name):
    schema, words = SCHEMAS[name]
    with pytest.raises(UserError, match=words) as refusal:
        json_grammar(schema)
    assert "\n" not in str(refusal.value)
    assert json_grammar({"type": "integer"})  # the next one is none the worse


def test_memory_ends_a_trial_before_its_time_and_large_schemas_have_enough():
    with pytest.raises(UserError, match="too large"):
        json_grammar({"type": "integer", "multipleOf": 9_999_991})
    names = [f"property{number}" for number in range(4000)]
    properties = {name: {"type": "string"} for name in names}
    assert json_grammar({"type": "object", "properties": properties, "required": names})


@pytest.mark.parametrize("kind", ["rule", "TERMINAL"])
def test_a_lark_grammar_that_would_end_the_process(kind):
    rows = "".join(f"{kind}{i}: {kind}{i + 1}\n" for i in range(50_000))
    grammar = composed(f'start: {kind}0\n{rows}{kind}50000: "a"\n', {})
    with pytest.raises(UserError, match=DEEP):
        mini_vocabulary().compiled(grammar)


def test_what_llguidance_cannot_read_is_refused():
    nested: dict = {"type": "integer"}
    for _ in range(150):
        nested = {"type": "array", "items": nested}
    for schema in (nested, {"const": float("inf")}, {"oneOf": [{"const": float("nan")}, {}]}):
        with pytest.raises(UserError):
            json_grammar(schema)


def test_the_process_comes_back_after_somebody_ended_it():
    alone = Trial()
    assert alone.complaint(composed('start: "a"\n', {})) == ""
    assert alone._process is not None
    os.kill(alone._process.pid, signal.SIGKILL)
    alone._process.wait()
    assert alone.complaint(composed('start: "a"\n', {})) == ""
    alone.close()


def test_trials_run_at_the_lowest_priority_from_their_start():
    alone = Trial()
    alone.start()
    assert alone._process is not None
    own = alone._process.pid
    assert os.getpriority(os.PRIO_PROCESS, own) == trial.NICE
    # Linux shares the CPU among sessions: in another one the priority would count for nothing
    assert os.getsid(own) == os.getsid(0) and os.getpgid(own) != os.getpgid(0)
    alone.close()


def test_a_cancelled_trial_ends_at_once_and_leaves_no_verdict():
    trials, cancellation = Trials(1), Cancellation()
    grammar = json.dumps({"grammars": [{"name": "start", "json_schema": SCHEMAS["multiples"][0]}]})

    def tried() -> str:
        with cancellable(cancellation):
            return trials.refusal(grammar)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tried)
        while cancellation._stop is None:
            time.sleep(0.01)
        (process,) = trials._all
        assert process._process is not None
        cancellation.cancel()
        with pytest.raises(Cancelled):
            running.result(trial.SECONDS)
    assert process._process is None
    with remembered_only(), pytest.raises(Untried):
        trials.refusal(grammar)
    assert trials.refusal(composed('start: "a"\n', {})) == ""
    with pytest.raises(Cancelled):  # cancelled before it began
        tried()
    trials.close()


def test_an_idle_process_ends_and_the_next_grammar_starts_another(monkeypatch):
    alone = Trial()
    monkeypatch.setattr(trial.subprocess, "Popen", _impatient(trial.subprocess.Popen))
    for _ in range(2):
        assert alone.complaint(composed('start: "a"\n', {})) == ""
        assert alone._process is not None
        assert alone._process.wait(60) == trial.IDLE_EXIT
    alone.close()


def _impatient(popen):
    """Starts trial processes that are idle for a tenth of a second at most."""
    script = f"import {trial.__name__} as trial; trial.IDLE_SECONDS = 0.1; trial._main()"
    return lambda command, **options: popen([command[0], "-c", script], **options)


def test_verdicts_are_remembered_and_bounded():
    now = [0.0]
    verdicts = Verdicts(lambda: now[0])
    verdicts.keep(b"good", "")
    verdicts.keep(b"bad", "x" * 10**6)
    assert verdicts.find(b"good") == "" and len(verdicts.find(b"bad") or "") == 2000
    assert verdicts.find(b"new") is None
    now[0] = REFUSED_SECONDS + 1
    assert verdicts.find(b"good") == "" and verdicts.find(b"bad") is None
    for number in range(REMEMBERED):
        verdicts.keep(b"%d" % number, "")
    assert verdicts.find(b"good") is None and verdicts.find(b"0") == ""


def test_a_refused_grammar_is_tried_once(monkeypatch):
    trials, tried = Trials(1), []
    monkeypatch.setattr(Trial, "complaint", lambda _, grammar: tried.append(grammar) or "too large")
    with remembered_only(), pytest.raises(Untried):
        trials.refusal("g")
    assert trials.refusal("g") == trials.refusal("g") == "too large" and tried == ["g"]
    with remembered_only():
        assert trials.refusal("g") == "too large"
    trials.close()


def test_a_trial_does_not_wait_for_another(monkeypatch):
    began = Barrier(2)
    trials = Trials(2)

    def slow(_, grammar: str) -> str:
        began.wait(timeout=60)  # passes only where both run at once
        return ""

    monkeypatch.setattr(Trial, "complaint", slow)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(trials.refusal, ("a", "b"))) == ["", ""]
    trials.close()


def test_control_tokens_are_known_there():
    grammar = composed('start: <|tool_call> <|"|> "a" <|"|> <tool_call|>\n', {})
    assert trial.CONTROL.findall(json.dumps('<|"|>')) == ['<|\\"|>']
    assert trial.TRIALS.refusal(grammar) == ""


def test_thousands_of_ways_are_compared_in_one_pass():
    assert exclusive({"const": i} for i in range(50_000))
    assert not exclusive([*({"const": i} for i in range(50_000)), {"enum": [7.0]}])
    assert exclusive([{"const": True}, {"const": 1}, {"const": [1]}, {"const": [True]}])
    assert not exclusive([{"const": {"a": [1]}}, {"const": {"a": [1.0]}}])
    assert not exclusive([{"type": "number"}, {"const": 3}])
    assert exclusive([False, {"type": ["string", "null"]}, {"enum": [3, 4.5]}, False])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": chain(2_000, lambda end: end)}}, "points at nothing"),
        ({**chain(2_000, lambda end: end), "type": "object"}, "in a row"),
        ({"properties": {"a": {"oneOf": [{"const": i} for i in range(99)]}}}, "more than 64"),
        ({"properties": {"a": {"pattern": "a" * 2**17}}}, "longer than"),
    ],
)
def test_a_strict_tool_that_would_hold_everybody_up(schema, words):
    function = {"name": "f", "strict": True, "parameters": schema}
    with pytest.raises(UserError, match=words):
        tool_grammar([{"type": "function", "function": function}], at_least=1, at_most=1)


COSTLY = json_grammar(
    {"type": "integer", "allOf": [{"multipleOf": 59_311}, {"multipleOf": 56_387}]}
)
"""Its tables take 12 MB, and some more with each text. With llguidance's own limit of steps its
first text would end at the third digit, and a later one would not."""
DIGITS = [str(7**power)[:12] for power in range(20, 60)]


def masks_of(vocabulary: Vocabulary, text: str, constraint: TextConstraint | None = None) -> bytes:
    """The masks of all places of a text under COSTLY."""
    constraint = constraint or TextConstraint(TextRules(grammar=COSTLY), vocabulary)
    seq, found = Sequence([2], prompt_len=1), []
    for token in vocabulary.load().tokenize_str(text):
        out = np.full((1, mask_words(vocabulary.size)), EVERYTHING, np.uint32)
        constraint.masks(seq, [], out)
        found.append(out.tobytes())
        seq.tokens.append(token)
    assert constraint.failure is None and constraint.ends_at is None
    return b"".join(found)


def test_masks_are_the_same_after_other_texts_and_tables_that_were_left(monkeypatch):
    cold, used, leaving = (Vocabulary(mini_tokenizer()) for _ in range(3))
    for digits in DIGITS:
        masks_of(used, digits)
    assert masks_of(used, DIGITS[0] * 4) == (expected := masks_of(cold, DIGITS[0] * 4))
    monkeypatch.setattr(compiled, "GROWN_BYTES", 1 << 20)
    first = leaving.compiled(COSTLY)
    assert masks_of(leaving, DIGITS[0] * 4) == expected
    assert leaving.compiled(COSTLY) is not first


def test_compiled_grammars_take_bounded_memory():
    vocabulary = Vocabulary(mini_tokenizer())
    for digits in DIGITS:
        masks_of(vocabulary, digits)
        held = sum(kept.measure() for kept in vocabulary._grammars.values())
        assert held <= CACHED_BYTES + GROWN_BYTES
    for number in range(1, 2 * CACHED):
        vocabulary.compiled(json_grammar({"const": number}))
    assert len(vocabulary._grammars) == CACHED
