"""The page in a real browser: `pytest -m browser`, where Chromium and playwright are installed."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pictures import file_of, levels
from tests.support.seeing import serving_pictures
from tests.support.serving import Server, scripted
from tools import seeing_mini

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs Chromium (Debian: apt-get install chromium)", allow_module_level=True)

CODE = "def add_one(items):\n    return [item + 1 for item in items]\n\ndef add_two(items):\n"
EVIL = '<img src=x onerror="window.pwned = 1"><script>window.pwned = 1</script> &amp; done'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser) -> Iterator[Any]:
    """Opens a server's page. Whatever goes wrong in it, and any request to others, is an error."""
    wrong: list[str] = []
    contexts: list[Any] = []

    def open_page(server: Server, ready: str = "ready", **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if "Security Policy" in m.text else None)

        def elsewhere(r):
            return not r.url.startswith((server.url, "data:"))

        page.on("request", lambda r: wrong.append(r.url) if elsewhere(r) else None)
        page.goto(server.url)
        playwright.expect(page.locator("#state")).to_have_text(ready)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def complete(page: Any, prompt: str = CODE, tokens: int = 60) -> None:
    page.get_by_label("Mode").select_option("completion")
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_text("Options").click()
    page.get_by_label("Message").fill(prompt)


def test_an_answer_is_coloured_by_who_guessed_it(visit, mini_server: Server):
    page = visit(mini_server)
    complete(page)
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Send").click()
    page.get_by_text("Who guessed it").wait_for()
    ask = sent.value.post_data_json | {"stream": False}
    body = mini_server.post("completions", **ask).json()
    said = body["choices"][0]
    assert page.locator(".token").count() == body["usage"]["completion_tokens"]
    counts = body["metrics"]["speculative_decoding"]
    assert page.locator(".by-ngram.token").count() == counts["accepted_tokens"]
    reads = page.get_by_role("listbox").get_by_role("option")
    assert reads.count() == counts["verify_passes"] + 1
    assert page.locator(".reads").evaluate("e => e.textContent") == said["text"]
    assert f"tau {counts['tokens_per_pass']:.2f}" in page.locator(".facts").inner_text()


def test_rejected_guesses_show_on_hover_and_by_keyboard(visit, mini_server: Server):
    page = visit(mini_server)
    complete(page, "x = [1, 2, 3]\ny = [1, 2, 4]\nz = [1, 2, ", 40)
    with page.expect_response("**/v1/completions") as replied:
        page.get_by_role("button", name="Send").click()
    page.get_by_text("Who guessed it").wait_for()
    assert replied.value.ok
    labels = page.locator(".read").evaluate_all("all => all.map(e => e.ariaLabel)")
    (at, *_) = [i for i, label in enumerate(labels) if not label.endswith(" 0 rejected")]
    detail = page.locator(".detail")
    page.locator(".read").nth(at).hover()
    playwright.expect(detail).to_contain_text("Rejected:")
    assert detail.locator("del").count() == int(re.findall(r"(\d+) rejected", labels[at])[0])
    page.locator(".read").nth(at - 1 or 1).focus()
    page.keyboard.press("Home")
    playwright.expect(detail).to_contain_text("The prompt's read")
    for _ in range(at):
        page.keyboard.press("ArrowRight")
    playwright.expect(detail).to_contain_text(f"Read {at}:")
    playwright.expect(detail).to_contain_text("Rejected:")


def test_a_race_ends_in_equal_digests(visit, mini_server: Server):
    page = visit(mini_server, reduced_motion="reduce")
    complete(page)
    page.get_by_role("button", name="Race").click()
    page.get_by_text("The digests are equal").wait_for()
    digests = [text.split()[-1] for text in page.locator(".digest").all_inner_texts()]
    body = mini_server.post(
        "completions", prompt=CODE, max_tokens=60, temperature=0, include_speculation=True
    ).json()
    reads = body["choices"][0]["speculation"]
    ids = ",".join(str(token["id"]) for read in reads for token in read["tokens"])
    assert digests == [hashlib.sha256(ids.encode()).hexdigest()] * 2
    on, off = page.locator(".lanes .facts").all_inner_texts()
    assert "ngram" in on and "drafter none" in off and "tau 1.00" in off


def test_the_digest_is_sha256(visit, mini_server: Server):
    page = visit(mini_server)
    texts = ["", "abc", *("x" * n for n in (55, 56, 63, 64, 65, 1000)), "größer 你好"]
    made = page.evaluate(
        "async texts => { const { sha256 } = await import('/ui/sha256.js');"
        " return texts.map(sha256); }",
        texts,
    )
    assert made == [hashlib.sha256(text.encode()).hexdigest() for text in texts]


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_what_a_model_says_is_never_html(visit, mode):
    with scripted(EVIL) as server:
        page = visit(server)
        page.get_by_label("Mode").select_option(mode)
        page.get_by_label("Message").fill(EVIL)
        page.keyboard.press("Enter")
        page.get_by_text("Who guessed it").wait_for()
        assert EVIL in page.locator(".reads").evaluate("e => e.textContent")
        for read in page.locator(".read").all():
            read.hover()
        assert page.locator("img, main script").count() == 0
        assert page.evaluate("window.pwned") is None


def test_a_key_is_asked_for_and_kept_nowhere(visit):
    with scripted("Hello.", api_keys=["secret"]) as server:
        page = visit(server)
        playwright.expect(page.get_by_role("alert")).to_contain_text("API key")
        playwright.expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Message").focus()
        playwright.expect(page.locator("#model")).to_have_text("mini")
        page.get_by_label("Message").fill("Hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".reads")).to_contain_text("Hello.")
        kept = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert page.evaluate(kept) == [0, 0, ""] and page.context.cookies() == []


def test_a_second_turn_sends_the_first_and_mistakes_are_told(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        for turn in ("One", "Two"):
            page.get_by_label("Message").fill(turn)
            with page.expect_request("**/v1/chat/completions") as sent:
                page.keyboard.press("Enter")
            playwright.expect(page.get_by_role("button", name="Send")).to_be_enabled()
        said = [message["content"] for message in sent.value.post_data_json["messages"]]
        assert said == ["One", "Hello.", "Two"]
        page.get_by_text("Options").click()
        page.get_by_label("JSON schema").fill("{")
        page.get_by_label("Message").fill("Three")
        page.get_by_role("button", name="Send").click()
        playwright.expect(page.get_by_role("alert")).to_contain_text("the schema is no JSON")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_and_follows_the_reader_s_scheme(visit, mini_server: Server, width, scheme):
    size = {"width": width, "height": 740}
    page = visit(mini_server, viewport=size, color_scheme=scheme, reduced_motion="reduce")
    complete(page, tokens=30)
    page.get_by_role("button", name="Race").click()
    page.get_by_text("The digests are equal").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('main').scrollWidth") <= width
    ink, back = page.evaluate(
        "['color', 'backgroundColor'].map(n => getComputedStyle(document.body)[n])"
    )

    def light(colour):
        return sum(map(int, re.findall(r"\d+", colour)[:3])) > 382

    assert (light(back), light(ink)) == (scheme == "light", scheme == "dark")


GIVE = """([bytes, kind, type]) => {
  const file = new File([Uint8Array.from(bytes)], "waves.png", { type });
  const data = new DataTransfer();
  data.items.add(file);
  const options = { bubbles: true, cancelable: true };
  document.dispatchEvent(
    kind === "drop"
      ? new DragEvent("drop", { dataTransfer: data, ...options })
      : new ClipboardEvent("paste", { clipboardData: data, ...options }),
  );
}"""


def test_a_picture_is_dropped_pasted_and_removed(visit, tmp_path, mini_server: Server):
    picture, png = list(file_of(levels(40, 60))), "image/png"
    with serving_pictures(seeing_mini.write(tmp_path / "seeing")) as server:
        page = visit(server)
        page.evaluate(GIVE, [picture, "drop", png])
        page.evaluate(GIVE, [picture, "paste", png])
        shown = page.locator("#pictures img")
        playwright.expect(shown).to_have_count(2)
        page.get_by_role("button", name="Remove waves.png").first.click()
        playwright.expect(shown).to_have_count(1)
        page.get_by_label("Message").fill("What is it?")
        page.get_by_role("button", name="Send", exact=True).click()
        playwright.expect(page.locator("#announce")).to_contain_text("Answer complete")
        playwright.expect(page.locator("article.user img")).to_have_count(1)
        playwright.expect(shown).to_have_count(0)
        page.evaluate(GIVE, [picture, "drop", "image/tiff"])
        playwright.expect(page.get_by_role("alert")).to_contain_text("no PNG, JPEG, WebP or GIF")
    page = visit(mini_server)
    page.evaluate(GIVE, [picture, "drop", png])
    playwright.expect(page.get_by_role("alert")).to_contain_text("takes no pictures")


def test_every_control_has_a_name(visit, mini_server: Server):
    page = visit(mini_server)
    page.get_by_text("Options").click()
    nameless = page.locator("input, textarea, select").evaluate_all(
        "all => all.filter(e => !e.labels.length).map(e => e.id)"
    )
    assert nameless == []
    assert page.locator("button").evaluate_all("all => all.every(e => e.textContent.trim())")
