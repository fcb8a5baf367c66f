"""The page in a real browser: `pytest -m browser`, where Chromium and playwright are installed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.pictures import file_of, levels
from tests.support.seeing import serving_pictures
from tests.support.serving import LONG, SAID, ServedTarget, Server, scripted, serving
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
    page.get_by_label("Message", exact=True).fill(prompt)


def answered(page: Any) -> None:
    announced = playwright.expect(page.locator("#announce"))
    announced.to_contain_text("Answer complete", timeout=60_000)  # the first one compiles


def send(page: Any, message: str) -> list[dict[str, Any]]:
    """Send a message of a chat and wait for the answer. Returns the request's messages."""
    page.locator("#announce").evaluate("e => e.textContent = ''")
    page.get_by_label("Message", exact=True).fill(message)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    answered(page)
    return sent.value.post_data_json["messages"]


def options(page: Any, **values: str) -> None:
    """Fill fields of the closed panel, and close it again."""
    page.get_by_text("Options").click()
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_text("Options").click()


def test_an_answer_is_coloured_by_who_guessed_it(visit, mini_server: Server):
    page = visit(mini_server)
    complete(page)
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Send").click()
    answered(page)
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
    playwright.expect(page.locator(".note")).to_have_text(
        "Cut off: the limit of tokens is reached."
    )


def test_rejected_guesses_show_on_hover_and_by_keyboard(visit, mini_server: Server):
    page = visit(mini_server)
    complete(page, "x = [1, 2, 3]\ny = [1, 2, 4]\nz = [1, 2, ", 40)
    with page.expect_response("**/v1/completions") as replied:
        page.get_by_role("button", name="Send").click()
    answered(page)
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


def clocks(page: Any) -> list[str]:
    return page.locator(".clock").all_inner_texts()


def test_a_race_ends_in_equal_digests(visit, mini_server: Server):
    page = visit(mini_server, reduced_motion="reduce")
    complete(page)
    page.get_by_role("button", name="Race").click()
    page.get_by_text("The digests are equal").wait_for()
    on, off = (int(re.findall(r"(\d+) reads", text)[0]) for text in clocks(page))
    headline = page.locator("#race-state strong").inner_text()
    assert off == 59 and headline.startswith(f"{off / on:.2f} times fewer reads")
    assert headline.endswith(f"{on} against {off}")
    playwright.expect(page.locator("#race-state .beside")).to_contain_text("times the speed")
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
        page.get_by_label("Message", exact=True).fill(EVIL)
        page.keyboard.press("Enter")
        answered(page)
        assert EVIL in page.locator(".reads").evaluate("e => e.textContent")
        for read in page.locator(".read").all():
            read.hover()
        page.get_by_label("Show").select_option("text")
        playwright.expect(page.locator(".formatted")).to_contain_text(EVIL)
        assert page.locator("img, main script").count() == 0
        assert page.evaluate("window.pwned") is None


def test_a_key_is_asked_for_and_kept_nowhere(visit):
    with scripted("Hello.", api_keys=["secret"]) as server:
        page = visit(server)
        playwright.expect(page.get_by_role("alert")).to_contain_text("API key")
        playwright.expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Message", exact=True).focus()
        playwright.expect(page.locator("#model")).to_have_text("mini")
        page.get_by_label("Message", exact=True).fill("Hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".reads")).to_contain_text("Hello.")
        answered(page)
        page.evaluate("window.dispatchEvent(new Event('pagehide'))")
        kept = "[localStorage.length, Object.values(sessionStorage).join(), document.cookie]"
        local, session, cookie = page.evaluate(kept)
        assert (local, cookie, page.context.cookies()) == (0, "", [])
        assert "Hello." in session and "secret" not in session


def test_seconds_are_counted_while_a_request_waits_for_a_slot(visit):
    with serving(ServedTarget(slots=1, pause=0.01, max_len=6000), k=0) as server:
        page = visit(server)
        wait = page.locator(".wait")
        options(page, tokens="5")
        body = {"prompt": "ab", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as other:
            lines = other.iter_lines()  # its end would close the connection
            next(lines)
            page.get_by_label("Message", exact=True).fill("ab")
            page.keyboard.press("Enter")
            playwright.expect(wait).to_have_text("Waiting for the first token: 1 s")
            playwright.expect(wait).to_have_text("Waiting for the first token: 2 s")
            assert page.locator(".token").count() == 0
        answered(page)
        playwright.expect(wait).to_be_hidden()
        assert page.locator(".token").count() > 0


def test_a_second_turn_sends_the_first_and_mistakes_are_told(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        for turn in ("One", "Two"):
            page.get_by_label("Message", exact=True).fill(turn)
            with page.expect_request("**/v1/chat/completions") as sent:
                page.keyboard.press("Enter")
            playwright.expect(page.get_by_role("button", name="Send")).to_be_enabled()
        said = [message["content"] for message in sent.value.post_data_json["messages"]]
        assert said == ["One", "Hello.", "Two"]
        page.get_by_text("Options").click()
        page.get_by_label("JSON schema").fill("{")
        page.get_by_label("Message", exact=True).fill("Three")
        page.get_by_role("button", name="Send").click()
        playwright.expect(page.get_by_role("alert")).to_contain_text("JSON schema is no JSON")


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
        page.get_by_label("Message", exact=True).fill("What is it?")
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


@pytest.mark.parametrize("button", ["Send", "Race"])
def test_invalid_options_are_named_and_their_panel_opens(visit, mini_server: Server, button):
    page = visit(mini_server)
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if r.method == "POST" else None)
    options(page, temperature="5", seed="1.5", tools="{}")
    page.get_by_label("Message", exact=True).fill("Hi")
    page.get_by_role("button", name=button).click()
    alert = page.get_by_role("alert")
    for words in (
        "Temperature must be at most 2, not 5.",
        "Seed must be a whole number, not 1.5.",
        "Tools must be a list in JSON",
    ):
        playwright.expect(alert).to_contain_text(words)
    temperature = page.get_by_label("Temperature")
    playwright.expect(temperature).to_be_focused()
    playwright.expect(temperature).to_have_attribute("aria-describedby", "trouble")
    playwright.expect(temperature).to_have_accessible_description(alert.inner_text())
    assert page.locator("[aria-invalid]").count() == 3 and asked == []
    for field, value in (("Temperature", "0"), ("Seed", ""), ("Tools", "")):
        page.get_by_label(field).fill(value)
    page.get_by_label("Most tokens").fill("4")
    page.get_by_role("button", name=button).click()
    playwright.expect(alert).to_be_hidden()
    playwright.expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert len(asked) == (1 if button == "Send" else 2)


def test_an_empty_message_and_a_refused_parameter_are_shown_at_their_fields(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        page.get_by_role("button", name="Send").click()
        playwright.expect(page.get_by_role("alert")).to_have_text("Message is empty.")
        playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()
        options(page, tools='[{"type": "function", "function": {}}]')
        page.get_by_label("Message", exact=True).fill("Hi")
        page.keyboard.press("Enter")
        playwright.expect(page.get_by_role("alert")).to_contain_text("tools[0].function.name")
        playwright.expect(page.get_by_label("Tools")).to_be_focused()
        playwright.expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
        assert page.locator("article").count() == 0


def test_a_chat_sends_system_prompt_and_thinking(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        options(page, system="Be short.")
        for thinks in (False, True):
            page.get_by_label("Think").set_checked(thinks)
            page.get_by_label("Message", exact=True).fill("Hi")
            with page.expect_request("**/v1/chat/completions") as sent:
                page.keyboard.press("Enter")
            playwright.expect(page.get_by_role("button", name="Send")).to_be_enabled()
            ask = sent.value.post_data_json
            assert ask["chat_template_kwargs"] == {"enable_thinking": thinks}
            assert ask["messages"][0] == {"role": "system", "content": "Be short."}


MARKDOWN = """# A plan
**Bold**, *soft*, `a*b*c`, snake_case_name, [link](https://example.org/a_(b)), \\*plain\\*.
[bad](javascript:alert(1)) [file](file:///etc/passwd) ![picture](http://example.org/p.png)
See https://example.org/x. <b>No</b> &lt;

1. One
   - nested

   ```python
   if a < b:
       pass
   ```
2. Two
> quoted

| name | value |
|---|---|
| a | `1` |

~~~
open to the end"""


def test_an_answer_is_formatted_markdown(visit):
    with scripted(MARKDOWN) as server:
        page = visit(server)
        page.get_by_label("Show").select_option("text")
        send(page, "Go")
        answer = page.locator(".formatted")
        assert answer.locator("strong").all_inner_texts() == ["Bold"]
        assert answer.locator("em").all_inner_texts() == ["soft"]
        assert answer.locator("p > code").inner_text() == "a*b*c"
        links = answer.locator("a").evaluate_all("all => all.map(e => [e.href, e.rel])")
        rel = "noopener noreferrer nofollow"
        addresses = [
            "https://example.org/a_(b)",
            "http://example.org/p.png",
            "https://example.org/x",
        ]
        assert links == [[address, rel] for address in addresses]
        for words in ("[bad](javascript:alert(1))", "snake_case_name", "*plain*", "<b>No</b> &lt;"):
            playwright.expect(answer).to_contain_text(words)
        assert answer.locator("ol > li").count() == 2 and answer.locator("ol ul > li").count() == 1
        code = [text.strip("\n") for text in answer.locator("pre").all_inner_texts()]
        assert code == ["if a < b:\n    pass", "open to the end"]
        assert answer.locator("td").all_inner_texts() == ["a", "1"]
        assert answer.locator("blockquote").inner_text().strip() == "quoted"
        assert answer.locator("img, b").count() == 0


def test_markdown_of_any_text_keeps_it_and_ends_soon(visit, mini_server: Server):
    page = visit(mini_server)
    parts = ["*a ", "[", "**", "`", "> ", "- ", "|-", "![](", "https://", "_x_", "\n", "```\n", "~"]
    texts = [part * (60_000 // len(part)) for part in parts]
    texts += ["http://a" + ")" * 60_000 + "x", "http://:" * 8_000]
    texts += ["*a " * 20_000 + "[b](" * 9_000, "> " * 500 + "- " * 500, "- a\n\n" * 3_000]
    slowest = page.evaluate(
        "async texts => { const { markdown } = await import('/ui/markdown.js');"
        " return Math.max(...texts.map(t => { const start = performance.now(); markdown(t);"
        " return performance.now() - start; })); }",
        texts,
    )
    assert slowest < 5_000


def test_a_reload_brings_conversation_and_options_back(visit):
    with scripted("Hello **you**.") as server:
        page = visit(server)
        options(page, system="Be short.", temperature="0.5")
        page.get_by_label("Show").select_option("text")
        send(page, "One")
        page.reload()
        playwright.expect(page.locator("#state")).to_have_text("ready")
        assert page.locator(".formatted strong").inner_text() == "you"
        assert page.locator(".token").count() > 0
        assert page.get_by_label("Show").input_value() == "text"
        said = [message["content"] for message in send(page, "Two")]
        assert said == ["Be short.", "One", "Hello **you**.", "Two"]
        page.get_by_role("button", name="New chat").click()
        page.reload()
        playwright.expect(page.get_by_text("which drafter guessed")).to_be_visible()
        assert page.locator("article").count() == 0


def test_what_is_too_large_for_the_session_s_storage_loses_its_reads_first(visit, mini_server):
    page = visit(mini_server)
    found = page.evaluate(
        """async () => {
          const { keep, kept } = await import("/ui/kept.js");
          const large = "x".repeat(6_000_000);
          const whole = keep({}, [{ text: "a", reads: ["b"] }]) && kept().turns;
          const bare = keep({}, [{ text: "a", reads: [large] }]) && kept().turns;
          return [whole, bare, keep({}, [{ text: large, reads: [] }]), kept().turns];
        }"""
    )
    without = [{"text": "a", "reads": []}]
    assert found == [[{"text": "a", "reads": ["b"]}], without, False, without]


def test_a_picture_comes_back_after_a_reload(visit, tmp_path):
    picture = list(file_of(levels(40, 60)))
    with serving_pictures(seeing_mini.write(tmp_path / "seeing")) as server:
        page = visit(server)
        page.evaluate(GIVE, [picture, "drop", "image/png"])
        playwright.expect(page.locator("#pictures img")).to_have_count(1)
        send(page, "What is it?")
        page.reload()
        playwright.expect(page.locator("#state")).to_have_text("ready")
        assert page.locator("article.user img").count() == 1
        page.get_by_role("button", name="Edit").click()
        playwright.expect(page.locator("#pictures img")).to_have_count(1)
        kinds = [part["type"] for part in send(page, "And now?")[0]["content"]]
        assert kinds == ["image_url", "text"]


@pytest.mark.parametrize("allowed", [True, False])
def test_copy_puts_the_text_into_the_clipboard(visit, allowed):
    with scripted("Hello **you**.\n\n```\na = 1\n```") as server:
        page = visit(server, permissions=["clipboard-read"])
        page.get_by_label("Show").select_option("text")
        if not allowed:  # as over plain http from another machine
            page.evaluate("navigator.clipboard.writeText = undefined")
        send(page, "One")
        for name, text in (
            ("Copy the message", "One"),
            ("Copy the answer", "Hello **you**.\n\n```\na = 1\n```"),
            ("Copy the code", "a = 1"),
        ):
            button = page.get_by_role("button", name=name)
            button.click()
            playwright.expect(button).to_have_text("Copied")
            playwright.expect(page.locator("#announce")).to_have_text("Copied")
            assert page.evaluate("navigator.clipboard.readText()") == text


def test_edit_and_regenerate_replace_what_follows(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        for turn in ("One", "Two"):
            send(page, turn)
        regenerate = page.get_by_role("button", name="Regenerate the answer").first
        with page.expect_request("**/v1/chat/completions") as sent:
            regenerate.click()
        answered(page)
        assert [m["content"] for m in sent.value.post_data_json["messages"]] == ["One"]
        playwright.expect(page.get_by_text("the answer is the same each time")).to_be_visible()
        assert page.locator(".turn").count() == 1
        page.get_by_role("button", name="Edit the message").click()
        playwright.expect(page.get_by_label("Message", exact=True)).to_have_value("One")
        playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.get_by_role("button", name="Leave it as it is").click()
        playwright.expect(page.get_by_label("Message", exact=True)).to_have_value("")
        assert page.locator(".replaced").count() == 0
        page.get_by_role("button", name="Edit the message").click()
        assert page.locator(".replaced").count() == 1
        assert [message["content"] for message in send(page, "Three")] == ["Three"]
        assert page.locator("article.user .words").all_inner_texts() == ["Three"]


def test_a_turn_that_is_refused_leaves_what_it_would_replace(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        send(page, "One")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body="no"))
        page.get_by_role("button", name="Regenerate the answer").click()
        playwright.expect(page.get_by_role("alert")).to_have_text("the server answered 500")
        assert page.locator("article.answer .reads").inner_text().startswith("Hello.")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_came(visit, how):
    with serving(ServedTarget(pause=0.2)) as server:
        page = visit(server)
        page.get_by_label("Mode").select_option("completion")
        options(page, seed=str(LONG), tokens="40", temperature="1")
        page.get_by_label("Message", exact=True).fill("abc")
        page.get_by_role("button", name="Send").click()
        stop = page.get_by_role("button", name="Stop")
        playwright.expect(stop).to_be_focused()
        page.locator(".read").nth(2).wait_for()
        if how == "button":
            stop.click()
        else:
            page.keyboard.press("Escape")
        playwright.expect(page.locator(".note")).to_have_text("Stopped.")
        playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()
        playwright.expect(page.locator("#announce")).to_have_text("Stopped")
        count = page.locator(".token").count()
        assert 2 < count < 40
        page.reload()
        playwright.expect(page.locator("#state")).to_have_text("ready")
        assert page.locator(".token").count() == count
        server.wait_until_idle()


def test_calls_of_tools_are_shown_and_their_results_sent(visit):
    tools = [{"type": "function", "function": {"name": name}} for name in ("edit", "run")]
    with scripted(SAID, then="Done.") as server:
        page = visit(server)
        options(page, tools=json.dumps(tools))
        page.get_by_label("Show").select_option("text")
        send(page, "Edit it")
        assert page.locator(".calls .code-head").all_inner_texts() == [
            "call of edit",
            "call of run",
        ]
        called = [json.loads(text) for text in page.locator(".calls pre").all_inner_texts()]
        assert called == [{"path": "a.py", "new": 'x = {"a": [1]}\n', "line": 4}, {}]
        page.get_by_text("Thought", exact=True).click()
        playwright.expect(page.locator(".thought")).to_contain_text("I must call")
        page.get_by_label("Result of edit").fill("edited")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send results").click()
        playwright.expect(page.locator(".formatted").last).to_have_text("Done.")
        _, said, *results = sent.value.post_data_json["messages"]
        ids = [call["id"] for call in said["tool_calls"]]
        assert [(r["tool_call_id"], r["content"]) for r in results] == [
            (ids[0], "edited"),
            (ids[1], ""),
        ]
        playwright.expect(page.get_by_role("button", name="Send results")).to_be_hidden()


LOOKS = """() => [...document.querySelectorAll("#welcome .swatch")].map(e => [
  e.parentElement.textContent, getComputedStyle(e, "::before").content.split(" ")[0],
  getComputedStyle(e).backgroundColor, getComputedStyle(e).color])"""


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_guesser_has_a_colour_and_a_shape_that_can_be_read(visit, mini_server: Server, scheme):
    page = visit(mini_server, color_scheme=scheme)
    *guessers, (paid, shape, back, _) = page.evaluate(LOOKS)
    assert (paid, shape, back) == ("paid: a read each", "none", "rgba(0, 0, 0, 0)")
    names, shapes, backs, _ = zip(*guessers, strict=True)
    assert len(guessers) == len(set(names)) == len(set(shapes)) == len(set(backs)) == 8
    for *_, colour, ink in guessers:
        low, high = sorted((luminance(colour), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    complete(page)
    page.keyboard.press("Enter")
    answered(page)
    legend = page.get_by_role("list", name="Legend: the tokens by guesser").inner_text()
    count = page.locator(".token.by-ngram").count()
    assert f"prompt lookup (ngram): {count} (" in legend
    first = page.locator(".token.by-ngram.lead").first
    assert first.evaluate("e => getComputedStyle(e, '::before').content").startswith('"▲"')


def test_a_chat_works_by_keyboard_alone(visit):
    with scripted("Hello.") as server:
        page = visit(server)
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("One")
        page.keyboard.press("Tab")
        playwright.expect(page.get_by_role("button", name="Send")).to_be_focused()
        page.keyboard.press("Enter")
        answered(page)
        playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()
        for name in ("Regenerate the answer", "Copy the answer"):
            page.keyboard.press("Shift+Tab")
            playwright.expect(page.get_by_role("button", name=name)).to_be_focused()
        page.keyboard.press("Shift+Tab")
        playwright.expect(page.locator(".read").first).to_be_focused()
        page.keyboard.press("End")
        playwright.expect(page.locator(".read").last).to_be_focused()
        assert page.locator("#announce").evaluate("e => e.role") == "status"
        for landmark in ("banner", "main", "form"):
            assert page.get_by_role(landmark).count() == 1
