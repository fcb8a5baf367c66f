"""Whatever a client sends wrong is answered with its status code and one clear sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.serving import (
    CHAT,
    MODEL,
)

BAD = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": -1}, "temperature must be in"),
    ({"top_p": 0}, "top_p must be in"),
    ({"top_k": -2}, "top_k must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"presence_penalty": 3}, "presence_penalty must be"),
    ({"max_tokens": 0}, "max_tokens: 0 is allowed only with echo"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 0}, "n: "),
    ({"n": 100}, "at most 68"),
    ({"prompt": ""}, "prompt must not be empty"),
    ({"prompt": []}, "prompt must not be empty"),
    ({"prompt": [[]]}, "prompt must be"),
    ({"prompt": 7}, "prompt must be"),
    ({"prompt": None}, "prompt must be"),
    ({"prompt": [1, 999]}, "token id 999"),
    ({"prompt": [1, -1]}, "token id -1"),
    ({"prompt": [True]}, "prompt must be"),
    ({"prompt": "a" * 600}, "at least 600 tokens but the context is 512"),
    ({"prompt": [3] * 600}, "600 tokens but the context is 512"),
    ({"stop": ""}, "stop strings must have"),
    ({"stop": [1]}, "stop must be"),
    ({"stop": ["a"] * 17}, "stop takes at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias keys"),
    ({"logit_bias": {"61": 1}}, "logit_bias holds token id 61"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias keys"),
    ({"prompt": ["a"] * 2000, "n": 128}, "send fewer prompts or a smaller n"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids holds token id"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"suffix": "x"}, "suffix is not supported"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream: true"),
]
BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "chat template refuses"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "context is 512"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"top_logprobs": 3}, "top_logprobs needs"),
    ({"chat_template_kwargs": {"messages": []}}, "may not set messages"),
    ({"chat_template_kwargs": {"self": 1}}, "may not set self"),
]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [("completions", {"prompt": "a"} | body, words) for body, words in BAD]
    + [("chat/completions", {"messages": CHAT} | body, words) for body, words in BAD_CHAT],
)
def test_bad_input_is_one_clear_sentence(server, path, body, words):
    reply = server.post(path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "one JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "top_p": 1e999}', "top_p"),
        (b"{}", "prompt"),
    ],
)
def test_bodies_that_are_not_what_they_should_be(server, content, words):
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_status_codes_of_the_rest(server):
    def error(reply: httpx.Response) -> tuple[int, str | None]:
        body = reply.json()["error"]
        assert body["message"] and body["type"] == "invalid_request_error"
        return reply.status_code, body["code"]

    json_type = {"Content-Type": "application/json"}
    large = b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}'
    completions = f"{server.url}/v1/completions"

    def in_parts() -> Iterator[bytes]:
        yield from (large[i : i + 2**20] for i in range(0, len(large), 2**20))

    assert error(httpx.post(completions, content=large, headers=json_type)) == (413, None)
    assert error(httpx.post(completions, content=in_parts(), headers=json_type)) == (413, None)
    assert error(httpx.post(completions, content=b"a=1")) == (415, None)
    assert error(httpx.get(completions)) == (405, None)
    assert error(httpx.get(f"{server.url}/v2/completions")) == (404, None)
    unknown = (404, "model_not_found")
    assert error(server.post("completions", model="gpt", prompt="a")) == unknown
    assert error(httpx.get(f"{server.url}/v1/models/gpt")) == unknown
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.openai.completions.create(model=MODEL, prompt="a", temperature=-3)


def test_models_version_health(server):
    models = server.openai.models.list().data
    assert [m.id for m in models] == [MODEL] and models[0].model_extra["max_model_len"] == 512
    assert server.openai.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert re.match(r"\d+\.\d+", httpx.get(f"{server.url}/version").json()["version"])
