"""Names of models and routes: several served names, each API's list, hints for a wrong base URL."""

from __future__ import annotations

import anthropic
import httpx
import pytest

from tests.support.serving import MODEL, ServedTarget, serving

NAMES = [MODEL, "gemma", "org/gemma"]


@pytest.fixture(scope="module")
def named():
    with serving(ServedTarget(), aliases=NAMES[1:]) as server:
        yield server


def test_any_of_several_names_may_be_sent_and_comes_back(named):
    assert [model.id for model in named.openai.models.list().data] == NAMES
    for name in NAMES:
        assert named.openai.models.retrieve(name).id == name
        reply = named.openai.completions.create(model=name, prompt="a", max_tokens=1)
        assert reply.model == name
    assert named.post("completions", prompt="a", max_tokens=1).json()["model"] == MODEL


def test_anthropics_list_is_in_its_form(named):
    with anthropic.Anthropic(base_url=named.url, api_key="none") as client:
        page = client.models.list()
        assert [model.id for model in page.data] == NAMES and not page.has_more
        assert page.data[0].type == "model" and page.data[0].created_at.year >= 2026
        assert client.models.retrieve("org/gemma").display_name == "org/gemma"


def test_a_long_unknown_name_is_not_repeated(named):
    reply = named.post("completions", model="x" * 7_000_000, prompt="a")
    assert reply.status_code == 404 and len(reply.content) < 1000
    assert reply.json()["error"]["param"] == "model"


def test_a_wrong_base_url_is_explained(named):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    for path, words in (
        ("/chat/completions", "ends in /v1"),
        ("/models", "ends in /v1"),
        ("/v1/v1/messages", "ends without /v1"),
        ("/v2/completions", "/docs lists"),
    ):
        method = httpx.get if path == "/models" else httpx.post
        reply = method(f"{named.url}{path}", **({} if path == "/models" else {"json": body}))
        assert reply.status_code == 404 and words in reply.json()["error"]["message"], path


def test_docs_need_nothing_from_elsewhere(named):
    page = httpx.get(f"{named.url}/docs")
    assert page.status_code == 200 and "/v1/chat/completions" in page.text
    assert "<script" not in page.text and "http://" not in page.text and "src=" not in page.text
    assert httpx.get(f"{named.url}/openapi.json").status_code == 200


def test_errors_of_sampling_name_their_parameter(named):
    for name, value in (("temperature", -1), ("top_p", 0), ("presence_penalty", 3)):
        reply = named.post("completions", model=MODEL, prompt="a", **{name: value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name
