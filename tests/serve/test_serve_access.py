"""Access to a server: API keys, names in the Host header, and pages of other origins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import httpx
import openai
import pytest

from serve.policy import AccessPolicy, is_loopback
from specdec.cli.access import AccessConfig
from specdec.core.errors import UserError
from tests.support.commands import refused
from tests.support.serving import MODEL, ServedTarget, Server, serving

BODY = {"prompt": "abc", "max_tokens": 2}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    policy = AccessPolicy(cors_origins=(ORIGIN,))
    with serving(ServedTarget(slots=1), api_keys=["eins", "zwei"], policy=policy) as running:
        yield running


@pytest.fixture(scope="module")
def keyless() -> Iterator[Server]:
    policy = AccessPolicy(frozenset({"studio.lan"}))
    with serving(ServedTarget(slots=1), policy=policy) as running:
        yield running


@pytest.mark.parametrize("header", ["Bearer eins", "bearer zwei", "BEARER eins", "Bearer  zwei"])
def test_any_key_opens_and_bearer_may_be_in_any_case(keyed, header):
    url, headers = f"{keyed.url}/v1/completions", {"Authorization": header}
    assert httpx.post(url, json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer drei", "eins", "Basic eins", "Bearer eins zwei"]
)
def test_all_else_is_401(keyed, header):
    headers = {} if header is None else {"Authorization": header}
    for path in ("v1/completions", "tokenize"):
        answer = httpx.post(f"{keyed.url}/{path}", json=BODY, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{keyed.url}/health", headers=headers).status_code == 200


def test_openais_client_says_authentication(keyed):
    wrong = keyed.openai.with_options(api_key="drei")
    with pytest.raises(openai.AuthenticationError):
        wrong.completions.create(model=MODEL, prompt="a")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.8.9.1", "[::1]:8"]
)
def test_names_of_this_machine_are_answered(keyless, host):
    answer = httpx.post(f"{keyless.url}/v1/completions", json=BODY, headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["v1/models", "health", "metrics", "nowhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil", "10.0.0.1"]
)
def test_other_names_are_refused(keyless, host, path):
    answer = httpx.get(f"{keyless.url}/{path}", headers={"Host": host})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in answer.json()["error"]["message"]


def test_a_name_may_be_added_and_keys_need_none(keyless, keyed):
    headers = {"Host": "studio.lan:80"}
    assert httpx.get(f"{keyless.url}/v1/models", headers=headers).status_code == 200
    headers = {"Host": "evil.example", "Authorization": "Bearer eins"}
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200


def test_every_address_is_answered_where_all_are_listened_on():
    with serving(ServedTarget(slots=1), policy=AccessPolicy(frozenset(), "0.0.0.0")) as running:
        for host, status in (("10.0.0.1:8000", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            answer = httpx.get(f"{running.url}/v1/models", headers={"Host": host})
            assert answer.status_code == status


def test_pages_of_named_origins_may_ask_with_keys(keyed):
    url = f"{keyed.url}/v1/completions"
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    answer = httpx.options(url, headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert httpx.options(url, headers=asked | {"Origin": "https://x.y"}).status_code == 400
    for key, status in (("eins", 200), ("drei", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        answer = httpx.post(url, json=BODY, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_no_page_may_ask_by_default(keyless):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{keyless.url}/v1/completions", headers=asked)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_any_origin():
    with serving(ServedTarget(slots=1), policy=AccessPolicy(cors_origins=("*",))) as running:
        answer = httpx.get(f"{running.url}/v1/models", headers={"Origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_keys_come_from_every_source(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nzwei\n\n drei \n")
    monkeypatch.setenv("SPECDEC_API_KEY", "vier, fünf".replace("ü", "ue"))
    config = AccessConfig(api_key=("eins",), api_key_file=file)
    assert config.keys("0.0.0.0") == ("eins", "zwei", "drei", "vier", "fuenf")


UNSENDABLE = ["schlüssel", "a\tb", "gut, schlüssel"]


@pytest.mark.parametrize("keys", UNSENDABLE)
def test_keys_of_the_environment_are_checked_for_a_server(monkeypatch, keys):
    monkeypatch.setenv("SPECDEC_API_KEY", keys)
    with pytest.raises(UserError, match="visible ASCII"):
        AccessConfig().keys("127.0.0.1")


@pytest.mark.parametrize("keys", UNSENDABLE)
def test_keys_of_the_environment_are_checked_for_replicas(monkeypatch, keys):
    """Before Ray is used, which need not be installed here."""
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "specdec.replicas", raising=False)
    replicas = import_module("specdec.replicas")
    monkeypatch.setenv("SPECDEC_API_KEY", keys)
    with pytest.raises(UserError, match="visible ASCII"):
        replicas.app({"model": "mini"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["0.0.0.0", "--api-key", "--no-api-key"]),
        (["--host", "::"], ["::", "--no-api-key"]),
        (["--host", "192.0.2.7"], ["192.0.2.7", "SPECDEC_API_KEY"]),
        (["--api-key", ""], ["--api-key", "empty"]),
        (["--api-key", "schlüssel"], ["ASCII"]),
        (["--api-key", "a", "--no-api-key"], ["choose"]),
        (["--api-key-file", "/nowhere"], ["/nowhere"]),
        (["--api-key-file", "/dev/null"], ["/dev/null", "no key"]),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    line = refused(capsys, "serve", "--port", "0", "--model", "/nowhere", *arguments)
    assert all(word in line for word in words), line


def test_options_may_be_repeated_and_come_from_toml(capsys, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(AccessConfig, "policy", lambda *given: seen.append(given) or AccessPolicy())
    config = tmp_path / "serve.toml"
    config.write_text('api_key = ["a", "b"]\ncors_origin = "*"\n')
    more = ["--allowed-host", "x", "--allowed-host", "y", "--config", str(config)]
    refused(capsys, "serve", "--port", "0", "--model", "/nowhere", *more)
    ((access, _, keys),) = seen
    assert keys == ("a", "b") and access.cors_origin == ("*",) and access.allowed_host == ("x", "y")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback(host):
    assert is_loopback(host) and AccessConfig().keys(host) == ()


def test_not_loopback():
    assert not is_loopback("10.0.0.1") and AccessConfig(no_api_key=True).keys("10.0.0.1") == ()
    with pytest.raises(UserError):
        AccessConfig().keys("example.org")
