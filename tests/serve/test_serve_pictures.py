"""Pictures over HTTP: by each API's form and its own client, counted as they are used, and refused
in one line where they can't be read."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest

from serve import lockstep, picture_urls
from serve.api import create_app
from serve.errors import ApiError
from serve.pictures import MOST_PICTURES, PictureRoom
from serve.prompts import Sight, chat_prompt
from specdec.core.errors import UserError
from specdec.core.types import Sequence
from specdec.llm_pictures import chat_prompt as door_prompt
from targets.tokenizer import load_tokenizer
from targets.vision.spec import read_vision
from tests.support.chats import chat_of_body
from tests.support.constrained import mini_tokenizer
from tests.support.pictures import bomb, file_of, levels
from tests.support.seeing import serving_pictures
from tools import seeing_mini

ONE = file_of(levels(60, 97))
OTHER = file_of(levels(40, 24, seed=1), "WEBP", lossless=True)
URL = f"data:image/png;base64,{base64.b64encode(ONE).decode()}"
ELSE = f"data:image/webp;base64,{base64.b64encode(OTHER).decode()}"
ASK = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing_mini.write(tmp_path_factory.mktemp("served") / "seeing")


@pytest.fixture(scope="module")
def server(folder):
    with serving_pictures(folder) as running:
        yield running


@pytest.fixture(scope="module")
def sight(folder):
    return Sight(read_vision(folder))


def block(data: bytes, kind: str = "image/png") -> Any:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": encoded}}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": ASK}]}]


def chat(server, *parts, **more):
    return server.openai.chat.completions.create(
        model="seeing", messages=asked(*parts), max_tokens=8, temperature=0, **more
    )


def test_each_client_and_form_shows_the_same_picture(server):
    forms = [{"image_url": {"url": URL}}, {"image_url": {"url": URL, "detail": "auto"}}]
    answers = [chat(server, {"type": "image_url", **form}) for form in forms]
    said = {answer.choices[0].message.content for answer in answers}
    counts = {answer.usage.prompt_tokens for answer in answers}
    body = {"model": "seeing", "messages": asked({"type": "image_url", "image_url": URL})}
    plain = server.post("chat/completions", **body, max_tokens=8, temperature=0).json()
    said.add(plain["choices"][0]["message"]["content"])
    counts.add(plain["usage"]["prompt_tokens"])
    parts: Any = [{"type": "input_image", "image_url": URL, "detail": "auto"}]
    parts.append({"type": "input_text", "text": ASK})
    reply = server.openai.responses.create(
        model="seeing",
        input=[{"role": "user", "content": parts}],
        max_output_tokens=8,
        temperature=0,
    )
    said.add(reply.output_text)
    counts.add(reply.usage.input_tokens)
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(model="seeing", max_tokens=8, messages=asked(block(ONE)))
        counted = client.messages.count_tokens(model="seeing", messages=asked(block(ONE)))
    said.add("".join(part.text for part in message.content if part.type == "text"))
    assert message.usage.input_tokens == counted.input_tokens
    counts.add(message.usage.input_tokens)
    assert len(said) == 1 and len(counts) == 1, (said, counts)
    other = chat(server, {"type": "image_url", "image_url": {"url": ELSE}})
    assert other.choices[0].message.content not in said


def test_ids_are_counted_after_expansion(server, folder, sight):
    blind = chat(server).usage.prompt_tokens
    seen = chat(server, {"type": "image_url", "image_url": {"url": URL}}).usage.prompt_tokens
    prompt = prompt_of(folder, sight, asked({"type": "image_url", "image_url": URL}))
    (placed,) = prompt.files
    assert seen == len(prompt.ids) == blind + placed.tokens + 2
    ids = sight.vision.ids
    around = prompt.ids[placed.start - 1 : placed.stop + 1]
    assert around == [ids.begin, *[ids.image] * placed.tokens, ids.end]


def prompt_of(folder, sight, messages, api="chat", **more):
    body = {"model": "seeing", "messages": messages} | more
    if api == "messages":
        body["max_tokens"] = 5
    if api == "responses":
        body["input"] = body.pop("messages")
    tokenizer = load_tokenizer(folder)
    return chat_prompt(chat_of_body(api, body), tokenizer, 100_000, sight)


def test_what_a_user_types_is_text(folder, sight):
    typed = "Is <|image|> a picture? <|image><|image|><image|>"
    message = {"role": "user", "content": typed}
    prompt = prompt_of(folder, sight, [message])
    assert not prompt.files and not {*prompt.ids} & set(vars(sight.vision.ids).values())
    parts = [{"type": "image_url", "image_url": URL}, {"type": "text", "text": typed}]
    mixed = prompt_of(folder, sight, [{"role": "user", "content": parts}])
    assert len(mixed.files) == 1
    assert mixed.ids.count(sight.vision.ids.image) == mixed.files[0].tokens
    tokenizer = load_tokenizer(folder)
    assert typed in tokenizer.decode(mixed.ids, skip_special=False)


def test_texts_around_a_picture_are_trimmed_as_the_template_does(folder, sight):
    parts = [
        {"type": "text", "text": " Before \n"},
        {"type": "image_url", "image_url": URL},
        {"type": "text", "text": "\n after"},
    ]
    prompt = prompt_of(folder, sight, [{"role": "user", "content": parts}])
    text = load_tokenizer(folder).decode(prompt.ids, skip_special=False)
    assert "user\nBefore<|image><|image|>" in text and "<|image|><image|>after<turn|>" in text


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OF_A_TOOL = {
    "chat": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "user", "content": [{"type": "image_url", "image_url": ELSE}]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [
                {"type": "text", "text": "seen"},
                {"type": "image_url", "image_url": {"url": URL}},
            ],
        },
    ],
    "responses": [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_text", "text": "seen"},
                {"type": "input_image", "image_url": URL},
            ],
        },
    ],
    "messages": [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "seen"}, block(ONE)],
                },
                block(OTHER),
            ],
        },
    ],
}


@pytest.mark.parametrize("api", OF_A_TOOL)
def test_what_a_tool_shows_stands_behind_its_response(folder, sight, api):
    """Also where its message came late, and another picture before it."""
    prompt = prompt_of(folder, sight, OF_A_TOOL[api], api)
    text = load_tokenizer(folder).decode(prompt.ids, skip_special=False)
    response, _, rest = text.partition("<tool_response|>")
    assert "seen" in response and rest.startswith("<|image><|image|>")
    files = [placed.file.data for placed in prompt.files]
    assert files == ([ONE] if api == "responses" else [ONE, OTHER])


def test_detail_chooses_the_budget(folder, sight):
    def tokens(detail: str) -> int:
        part = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
        return prompt_of(folder, wide, asked(part)).files[0].tokens

    wide = Sight(read_vision(folder, budget=280))
    low, usual, high = tokens("low"), tokens("auto"), tokens("high")
    assert low == usual <= 70 < high <= 280


HEARD = ["input_audio", "audio_url", "video_url", "input_video"]
REFUSED: list[tuple[Any, list[str]]] = [
    *(({"type": kind, kind: {"data": "x"}}, ["not yet"]) for kind in HEARD),
    ({"type": "file", "file": {"file_id": "f"}}, ["no documents"]),
    ({"type": "image_url"}, ["image_url", "url"]),
    ({"type": "image_url", "image_url": {"url": 7}}, ["image_url"]),
    ({"type": "image_url", "image_url": "https://example.org/a.png"}, ["URL", "--image-hosts"]),
    ({"type": "image_url", "image_url": "file:///etc/passwd"}, ["URL"]),
    ({"type": "image_url", "image_url": "data:image/png,abc"}, ["base64"]),
    ({"type": "image_url", "image_url": "data:image/png;base64,@@@@"}, ["not base64"]),
    ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, ["PNG, JPEG, WebP or GIF"]),
    ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, ["detail", "huge"]),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ["source", "no file ids"]),
]


@pytest.mark.parametrize(("part", "words"), REFUSED)
def test_what_cannot_be_seen_is_one_line(server, part, words):
    reply = server.post("chat/completions", messages=asked(part), max_tokens=3)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert all(word in message for word in words) and len(message) < 300 and "\n" not in message


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_pictures(server, role):
    shown = {"role": role, "content": [{"type": "image_url", "image_url": URL}]}
    reply = server.post("chat/completions", messages=[shown, *asked()], max_tokens=3)
    assert reply.status_code == 400 and role in reply.json()["error"]["message"]


def test_anthropics_errors_have_its_form(server):
    body = {"model": "x", "max_tokens": 3, "messages": asked(block(b"GIF89a"))}
    for route in ("messages", "messages/count_tokens"):
        reply = server.post(route, **body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5}]
)
def test_what_cannot_go_with_pictures_is_refused_by_name(server, more):
    part = {"type": "image_url", "image_url": URL}
    reply = server.post("chat/completions", messages=asked(part), max_tokens=3, **more)
    assert reply.status_code == 400 and next(iter(more)) in reply.json()["error"]["message"]


def test_more_pictures_than_a_request_may_have(server):
    parts = [{"type": "image_url", "image_url": URL}] * (MOST_PICTURES + 1)
    reply = server.post("chat/completions", messages=asked(*parts), max_tokens=3)
    assert reply.status_code == 400 and str(MOST_PICTURES) in reply.text


def test_more_pixels_than_a_request_may_have(server):
    encoded = base64.b64encode(bomb(7000, 7000, 8000)).decode()
    part = {"type": "image_url", "image_url": f"data:image/png;base64,{encoded}"}
    reply = server.post("chat/completions", messages=asked(part, part, part), max_tokens=3)
    assert reply.status_code == 400 and "128 million" in reply.json()["error"]["message"]


def test_a_prompt_is_measured_before_its_pictures_are_decoded(server, monkeypatch):
    def decoded(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(PictureRoom, "decoded", decoded)
    parts = [{"type": "image_url", "image_url": URL}] * 20
    reply = server.post("chat/completions", messages=asked(*parts), max_tokens=3)
    assert reply.status_code == 400 and "context" in reply.json()["error"]["message"]


def test_pixels_in_memory_are_bounded(folder, sight):
    room = PictureRoom(most=3_000_000)
    prompt = prompt_of(folder, sight, asked({"type": "image_url", "image_url": URL}))
    held = [room.decoded(prompt, sight.vision)]
    while len(held) < 9 and room._held + held[0][0].picture.levels.nbytes <= 3_000_000:
        held.append(room.decoded(prompt, sight.vision))
    with pytest.raises(ApiError, match="too many pictures") as refused:
        room.decoded(prompt, sight.vision)
    assert refused.value.status == 429
    held.clear()
    assert room._held == 0 and room.decoded(prompt, sight.vision)


def test_a_stream_and_several_choices(server):
    part = {"type": "image_url", "image_url": {"url": URL}}
    whole = chat(server, part, n=2, seed=3)
    assert len(whole.choices) == 2
    pieces = chat(server, part, stream=True)
    said = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
    assert said == chat(server, part).choices[0].message.content


def test_models_say_whether_pictures_are_taken(server, mini_server):
    for running, takes in ((server, True), (mini_server, False)):
        (card,) = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert ("image" in card["input_modalities"]) == takes
        with anthropic.Anthropic(base_url=running.url, api_key="x") as client:
            (model,) = client.models.list().data
        assert model.capabilities.image_input.supported == takes


def test_tokenize_shows_the_ids(server, sight):
    url = server.url
    body = {"messages": asked({"type": "image_url", "image_url": URL})}
    tokens = httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
    assert sight.vision.ids.begin in tokens and min(tokens) >= 0


class _Reply:
    def __init__(self, status: int, data: bytes) -> None:
        self.status, self._data = status, data

    def read1(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece


class _Connection:
    """A connection that answers without a network."""

    sock = None

    def __init__(self, reply: _Reply) -> None:
        self._reply, self.asked = reply, []

    def request(self, method: str, path: str, headers: dict[str, str]) -> None:
        self.asked.append((method, path, headers["Host"]))

    def getresponse(self) -> _Reply:
        return self._reply

    def close(self) -> None:
        pass


def resolving(monkeypatch, address: str) -> None:
    found = [(2, 1, 6, "", (address, 443))]
    monkeypatch.setattr(picture_urls.socket, "getaddrinfo", lambda *_, **__: found)


def test_a_url_of_an_allowed_host_is_fetched(monkeypatch):
    resolving(monkeypatch, "93.184.216.34")
    made = _Connection(_Reply(200, ONE))
    addresses = []

    def connect(host: str, address: str) -> Any:
        addresses.append(address)
        return made

    fetch = picture_urls.fetcher(["pictures.example.org", ".example.net"], connect)
    assert fetch("https://pictures.example.org/a.png?x=1") == ONE
    assert addresses == ["93.184.216.34"]
    assert made.asked == [("GET", "/a.png?x=1", "pictures.example.org")]


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example.org/a.png",
        "https://pictures.example.org:8443/a.png",
        "https://user@pictures.example.org/a.png",
        "https://other.example.org/a.png",
        "https://pictures.example.org.evil.org/a.png",
        "https://evilexample.net/a.png",
        "https://pictures.example.org/a b.png",
        "https://[::1]/a.png",
        "ftp://pictures.example.org/a.png",
        "https://pictures.example.org@evil.org/",
    ],
)
def test_other_urls_are_refused(monkeypatch, url):
    resolving(monkeypatch, "93.184.216.34")
    fetch = picture_urls.fetcher(
        ["pictures.example.org", ".example.net"], lambda *_: pytest.fail("fetched")
    )
    with pytest.raises(ApiError) as refused:
        fetch(url)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.8", "169.254.169.254", "192.168.1.1", "0.0.0.0", "224.0.0.1", "::1"]
    + ["fe80::1", "fc00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "100.64.0.1", "240.0.0.1"],
)
def test_private_addresses_are_refused(monkeypatch, address):
    resolving(monkeypatch, address)
    fetch = picture_urls.fetcher(["pictures.example.org"], lambda *_: pytest.fail("fetched"))
    with pytest.raises(ApiError, match="no public address"):
        fetch("https://pictures.example.org/a.png")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (_Reply(302, b""), "302: no redirect"),
        (_Reply(404, b""), "404"),
        (_Reply(200, bytes(picture_urls.MOST_BYTES + 1)), "too large"),
    ],
)
def test_what_a_host_answers_is_judged(monkeypatch, reply, words):
    resolving(monkeypatch, "93.184.216.34")
    fetch = picture_urls.fetcher(["pictures.example.org"], lambda *_: _Connection(reply))
    with pytest.raises(ApiError, match=words):
        fetch("https://pictures.example.org/a.png")


def test_a_head_that_comes_byte_by_byte_is_cut(monkeypatch):
    """It is read as a whole, and each byte comes in time."""
    resolving(monkeypatch, "93.184.216.34")
    monkeypatch.setattr(picture_urls, "DEADLINE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def drip() -> None:
            with suppress(OSError), listening.accept()[0] as client:
                client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                for _ in range(100):
                    client.sendall(b"a")
                    time.sleep(0.05)
                client.sendall(b"\r\nContent-Length: 1\r\n\r\na")

        dripping = pool.submit(drip)
        connection = http.client.HTTPConnection("pictures.example.org")
        connection.sock = socket.socket()
        connection.sock.connect(listening.getsockname())
        fetch = picture_urls.fetcher(["pictures.example.org"], lambda *_: connection)
        with pytest.raises(ApiError, match="did not send the picture|comes too slowly"):
            fetch("https://pictures.example.org/a.png")
        dripping.result(30)


def test_hosts_are_names():
    for host in ("https://example.org", "example.org/path", "", ".", "a b", "*.example.org"):
        with pytest.raises(UserError, match="--image-hosts"):
            picture_urls.fetcher([host])


def test_other_processes_get_the_pictures_too(folder, sight):
    """Of a model that is split over several: each encodes them itself."""
    part = {"type": "image_url", "image_url": URL}
    prompt = prompt_of(folder, sight, asked(part, part))
    pictures = sight.room.decoded(prompt, sight.vision)
    seq = Sequence(prompt.tokens, pictures=pictures)
    again = lockstep._unpacked(json.loads(json.dumps(lockstep._packed(seq))), lambda _: None)
    assert again.tokens == seq.tokens and len(again.pictures) == 2
    for one, other in zip(seq.pictures, again.pictures, strict=True):
        assert (one.start, one.picture.digest) == (other.start, other.picture.digest)
        assert (one.picture.levels == other.picture.levels).all()
        assert (one.picture.positions == other.picture.positions).all()


def test_hosts_are_for_models_that_see(mini_server):
    with pytest.raises(UserError, match="--image-hosts is for models that take pictures"):
        create_app(mini_server.runner, mini_tokenizer(), "mini", image_hosts=["example.org"])


def test_the_python_door_reads_paths_and_bytes(folder, sight, tmp_path):
    tokenizer, vision = load_tokenizer(folder), sight.vision
    file = tmp_path / "picture.png"
    file.write_bytes(ONE)
    found = [
        door_prompt(
            [{"role": "user", "content": [{"image": image}, {"text": ASK}]}], tokenizer, vision
        )
        for image in (ONE, str(file), file)
    ]
    urls = [
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "input_image", "image_url": URL},
        block(ONE),
        {"type": "image", "image": ONE},
    ]
    found += [door_prompt(asked(part), tokenizer, vision) for part in urls]
    over_http = prompt_of(folder, sight, asked({"type": "image_url", "image_url": URL}))
    assert {prompt.files[0].file.data for prompt in found} == {ONE}
    assert {tuple(prompt.ids) for prompt in found} == {tuple(over_http.ids)}
    plain = door_prompt([{"role": "user", "content": ASK}], tokenizer, vision)
    assert not plain.files and plain.ids == tokenizer.encode_chat(asked())
    refusals = [
        (
            [{"role": "user", "content": [{"image": tmp_path / "none.png"}]}],
            vision,
            "can't be read",
        ),
        ([{"role": "user", "content": [{"image": 7}]}], vision, "path or its bytes"),
        ([{"role": "user", "content": [{"image": b"7"}]}], vision, "PNG, JPEG"),
        ([{"role": "system", "content": [{"image": ONE}]}], vision, "users and tools"),
        ([{"role": "user", "content": [{"image": ONE}]}], None, "takes no pictures"),
        (asked({"type": "image_url", "image_url": URL}), None, "takes no pictures"),
        (asked({"type": "image_url", "image_url": "https://a.org/b"}), vision, "fetches none"),
        (asked({"type": "image_url", "image_url": {"file": 1}}), vision, "no file ids"),
        (asked({"type": "image_url", "image_url": "data:image/png,x"}), vision, ";base64"),
        (asked({"type": "image_url", "image_url": URL, "detail": "best"}), vision, "auto, low"),
        (asked({"type": "input_audio"}), vision, "a part is a text"),
    ]
    for messages, own, words in refusals:
        with pytest.raises(UserError, match=words):
            door_prompt(messages, tokenizer, own)


def test_hostile_bodies_are_never_a_servers_fault(server):
    """Files that are cut or changed, through the whole server: a 400 or an answer."""
    random, statuses = np.random.default_rng(0), set()
    for number in range(24):
        data = bytearray([ONE, OTHER][number % 2])
        for _ in range(int(random.integers(0, 6))):
            data[int(random.integers(len(data)))] = int(random.integers(256))
        data = data[: int(random.integers(1, len(data) + 1))] if number % 3 else data
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        part = {"type": "image_url", "image_url": url}
        body = {"messages": asked(part), "max_tokens": 2}
        reply = server.post("chat/completions", **body)
        statuses.add(reply.status_code)
    assert statuses == {200, 400}
