"""`import specdec`: an engine in five lines of Python, from any thread, equal to plain decoding."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import specdec
from specdec import llm as door
from specdec.core.errors import UserError
from tests.support.places import ROOT
from tests.support.until import until

PROMPT = "def quicksort(items):"


@pytest.fixture(scope="module")
def llm():
    with specdec.load("mini", drafter="ngram", k=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain():
    """Texts and ids of plain decoding."""
    with specdec.load("mini", drafter="none") as llm:
        yield {
            t: llm.generate(PROMPT, max_tokens=24, temperature=t, seed=3).token_ids
            for t in (0.0, 0.8)
        }


def test_the_readmes_lines_run_as_typed(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(import specdec\n.*?)```", readme, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 5
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout or "for" in done.stdout


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_plain_decodings(llm, plain, temperature):
    answer = llm.generate(PROMPT, max_tokens=24, temperature=temperature, seed=3)
    assert answer.token_ids == plain[temperature] and answer.finish_reason == "length"
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert answer.acceptance.drafted >= answer.acceptance.accepted
    assert answer.acceptance.tau >= 1


def test_a_prompt_that_begins_as_an_earlier_one_did_is_resumed(llm):
    prompt = list(range(100, 350))
    first = llm.generate(prompt, max_tokens=8, logprobs=1)
    longer = prompt + first.token_ids + [7, 8, 9]
    warm = llm.generate(longer, max_tokens=8, logprobs=1)
    with specdec.load("mini", drafter="none", prefix_cache=False) as cold:
        again = cold.generate(longer, max_tokens=8, logprobs=1)
    assert (first.cached_tokens, warm.cached_tokens, again.cached_tokens) == (0, 192, 0)
    assert (warm.token_ids, warm.logprobs) == (again.token_ids, again.logprobs)


def test_a_stream_is_the_same_answer_in_pieces(llm, plain):
    chunks = list(llm.stream(PROMPT, max_tokens=24, temperature=0.0))
    assert [t for chunk in chunks for t in chunk.token_ids] == plain[0.0]
    assert chunks[-1].finish_reason == "length" and len(chunks) > 5
    assert chunks[-1].drafted >= chunks[-1].accepted


def test_threads_share_the_engine(llm, plain):
    def ask(t):
        return llm.generate(PROMPT, max_tokens=24, temperature=t, seed=3).token_ids

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, [0.0, 0.8] * 3))
    assert answers == [plain[0.0], plain[0.8]] * 3


def test_it_works_where_an_event_loop_is_running_as_in_a_notebook(llm, plain):
    async def cell():
        return llm.generate(PROMPT, max_tokens=24, temperature=0.0).token_ids

    assert asyncio.run(cell()) == plain[0.0]


def test_prompts_of_every_kind(llm):
    ids = llm.tokenizer.encode(PROMPT)
    texts = llm.generate_all([PROMPT, ids, "class Stack:"], max_tokens=8, temperature=0.0)
    assert texts[0].token_ids == texts[1].token_ids != texts[2].token_ids
    assert texts[0].prompt_ids == ids
    chat = llm.chat([{"role": "user", "content": "Hi"}], max_tokens=4)
    assert len(chat.token_ids) == 4 and len(chat.prompt_ids) > 4


def test_stop_strings_and_log_probabilities(llm):
    whole = llm.generate(PROMPT, max_tokens=24, temperature=0.0, logprobs=2)
    assert whole.logprobs is not None and len(whole.logprobs) == 24
    assert all(len(one.top) == 2 for one in whole.logprobs)
    stop = whole.text[12:15]
    cut = llm.generate(PROMPT, max_tokens=24, temperature=0.0, stop=stop)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]


def places(llm, ids: list[int]) -> dict[int, str]:
    """How many of a text's first tokens complete a stop string -> such a string."""
    decode, text = llm.tokenizer.decode, llm.tokenizer.decode(ids)
    ends = {}
    for stop in (text[at : at + 3] for at in range(len(text) - 2)):
        ends[next(n for n in range(1, len(ids) + 1) if stop in decode(ids[:n]))] = stop
    return ends


@pytest.mark.parametrize(
    ("drafter", "k"),
    [("none", 4), ("ngram", 4), pytest.param("assistant", 7, marks=pytest.mark.slow)],
)
def test_ids_end_with_a_stop_string_whatever_the_drafter(drafter, k, plain):
    """A cycle may emit more than the answer holds: what lies beyond its stop string is no part of
    it, whole or streamed, log-probabilities included."""
    with specdec.load("mini", drafter=drafter, k=k) as llm:
        for count, stop in places(llm, plain[0.0][:14]).items():
            ids = plain[0.0][:count]
            wish = {"max_tokens": 24, "temperature": 0.0, "stop": stop, "logprobs": 1}
            whole = llm.generate(PROMPT, **wish)
            assert whole.token_ids == ids and whole.logprobs is not None, stop
            assert [one.top[0][0] for one in whole.logprobs] == ids
            chunks = list(llm.stream(PROMPT, **wish))
            assert [t for chunk in chunks for t in chunk.token_ids] == ids
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert (whole.finish_reason, chunks[-1].finish_reason) == ("stop", "stop")


def test_leaving_a_stream_early_frees_its_slot(llm):
    for _ in range(6):
        for chunk in llm.stream(PROMPT, max_tokens=200, temperature=0.0):
            if chunk.token_ids:
                break
    assert llm.generate(PROMPT, max_tokens=4).finish_reason == "length"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter temprature"),
        ({"temperature": -1.0}, "temperature must be in"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
    ],
)
def test_bad_parameters_are_one_line(llm, overrides, message):
    with pytest.raises(UserError, match=message):
        llm.generate(PROMPT, **overrides)


def test_bad_prompts_and_options_are_one_line(llm):
    with pytest.raises(UserError, match="the prompt has 5000 tokens.*4096.*--max-len"):
        llm.generate([5] * 5000)
    with pytest.raises(UserError, match="this model's ids are 0 to"):
        llm.generate([10**6])
    with pytest.raises(UserError, match="unknown option slot:"):
        specdec.load("mini", slot=2)
    with pytest.raises(UserError, match="unknown drafter 'ngarm'"):
        specdec.load("mini", drafter="ngarm")


def test_a_closed_one_says_so():
    llm = specdec.load("mini", drafter="none", max_len=512)
    llm.close()
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate(PROMPT)


def test_more_prompts_than_the_engine_holds_all_end_at_a_stop_string(monkeypatch):
    """Each frees its place in the queue before the engine has dropped it."""
    monkeypatch.setattr(door, "WAITING", 2)
    with specdec.load("mini", drafter="none", slots=2, max_len=64) as llm:
        (letter,) = llm.tokenizer.encode("a")[-1:]
        wanted = {"allowed_token_ids": [letter], "stop": ["a"], "max_tokens": 3}
        answers = llm.generate_all([[5]] * 24, **wanted)
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_a_call_beside_a_close_is_refused():
    """Given to the event loop just before that ends, it would never be answered."""
    llm = specdec.load("mini", drafter="none", max_len=64)
    close, refused = llm._runner.close, []

    def closing():
        close()
        with pytest.raises(UserError, match="closed") as refusal:
            llm.generate("a", max_tokens=1)
        refused.append(refusal)

    llm._runner.close = closing
    llm.close()
    assert refused


def test_who_reads_a_stream_is_not_left_waiting_when_it_is_closed():
    llm = specdec.load("mini", drafter="none", max_len=512)
    llm._room = asyncio.Semaphore(0)  # as behind more requests than there is room for
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, llm.stream(PROMPT))
        until(lambda: len(asyncio.all_tasks(llm._loop)) == 1)
        llm.close()
        with pytest.raises(UserError, match="closed"):
            reading.result(30)


def test_leaving_python_in_the_middle_of_an_answer_is_quiet():
    """The LLM is not closed and its engine is decoding: this used to end the process by a
    signal."""
    lines = (
        "import specdec",
        "llm = specdec.load('mini', drafter='ngram', max_len=2048)",
        "chunks = llm.stream('def quicksort(items):', max_tokens=2000, ignore_eos=True)",
        "next(chunks)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
