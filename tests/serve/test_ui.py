"""The page's files: how they are served. What the page does in a browser: test_ui_browser.py."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files

import httpx
import pytest

from drafters.registry import KINDS
from serve.lifecycle import Lifecycle
from serve.loading_app import LoadingApp
from tests.support.serving import ServedTarget, serving

STATIC = files("serve.ui").joinpath("static")
NAMES = sorted(entry.name for entry in STATIC.iterdir())


@pytest.fixture(scope="module")
def url():
    with serving(ServedTarget(), api_keys=["secret"]) as server:
        yield server.url


def test_the_page_is_small_and_whole(url):
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    parts = set(re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text))
    assert parts == {f"ui/{name}" for name in NAMES} - {"ui/index.html"}
    sizes = [len(httpx.get(f"{url}/{part}").raise_for_status().content) for part in parts]
    assert len(page.content) + sum(sizes) <= 80_000


def test_the_policy_forbids_all_but_own_files(url):
    policy = httpx.get(url).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    page = STATIC.joinpath("index.html").read_text()
    assert "<style" not in page and 'style="' not in page and not re.search(r"\son\w+=", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.S) == [""]


@pytest.mark.parametrize("name", NAMES)
def test_no_file_asks_another_host_or_writes_html(name):
    text = STATIC.joinpath(name).read_text()
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    assert not re.search(r"setHTML|DOMParser|ContextualFragment|srcdoc|\beval\(|new Function", text)
    assert not re.search(r"localStorage|indexedDB|\bcookie\b", text)
    assert ("sessionStorage" in text) == (name == "kept.js")


def test_every_guesser_has_a_name_a_colour_and_a_shape():
    names = STATIC.joinpath("tally.js").read_text()
    style = STATIC.joinpath("page.css").read_text()
    for guesser in KINDS.keys() - {"none", "auto"} | {"grammar", "prediction"}:
        assert re.search(rf"^  {guesser}: \"", names, re.M), guesser
        assert f".by-{guesser} {{ background: var(--{guesser}); }}" in style
        assert style.count(f"--{guesser}: #") == 2  # light and dark
        assert re.search(rf'\.lead\.by-{guesser}::before {{ content: "\S" / ""; }}', style)


@pytest.mark.parametrize("path", ["/", "/ui/page.js", "/ui/page.css"])
def test_a_kept_copy_is_asked_for_again_by_its_tag(url, path):
    first = httpx.get(url + path)
    again = httpx.get(url + path, headers={"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert httpx.head(url + path).status_code == 200


def test_other_paths_are_refused_as_ever(url):
    for path in ("/ui/", "/ui/nothing.js", "/ui/../routes.py", "/ui/%2e%2e/routes.py"):
        assert httpx.get(url + path).status_code == 404


def test_it_is_there_while_the_model_loads():
    transport = httpx.ASGITransport(LoadingApp(Lifecycle("loading mini")))

    async def fetched() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            paths = ("/", "/ui/page.js", "/ready", "/v1/models")
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(fetched()) == [200, 200, 503, 503]
