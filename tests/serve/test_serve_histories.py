"""Nothing that a client sends back is lost or refused for good: results behind a text, cut calls,
pictures and other providers' items, in each of the three APIs and with each template."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from openai.types.responses import Response

from serve.errors import ApiError
from serve.foreign import line_of
from specdec.core.errors import UserError
from targets.tokenizer import Tokenizer
from tests.support.chats import chat_of_body, prompt_of
from tests.support.places import DATA
from tests.support.serving import events_of, scripted
from tests.support.templates import TEMPLATES, WITH_TOOLS, tokenizer_with

USER = {"role": "user", "content": "Go on"}
PNG = "iVBORw0KGgo" * 200
PICTURE = f"data:image/png;base64,{PNG}"
FORMS = ("chat", "responses", "messages")
PARTS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
        {"type": "file", "file": {"file_data": PICTURE, "filename": "plan.pdf"}},
        {"type": "made_up", "of": "tomorrow"},
    ],
    "responses": [
        {"type": "input_image", "image_url": PICTURE},
        {"type": "input_file", "file_data": PICTURE, "filename": "plan.pdf"},
        {"type": "made_up", "of": "tomorrow"},
    ],
    "messages": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "document", "source": {"type": "text", "data": "Terms and conditions"}},
        {"type": "search_result", "title": "Weather", "content": [{"type": "text", "text": "x"}]},
        {"type": "made_up", "of": "tomorrow"},
    ],
}
FOREIGN_ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "rain"}},
    {"type": "custom_tool_call", "call_id": "c9", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c9", "output": "Done!"},
    {"type": "local_shell_call", "call_id": "c8", "action": {"command": ["ls"]}},
    {"type": "image_generation_call", "result": PNG},
    {"type": "mcp_call", "server_label": "files", "name": "read", "output": "text"},
    {"type": "compaction", "encrypted_content": PNG},
    {"type": "made_up", "of": "tomorrow"},
]


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_with(request.param)


def body_of(api: str, *messages: dict[str, Any]) -> dict[str, Any]:
    if api == "responses":
        return {"input": list(messages)}
    return {"model": "m", "max_tokens": 1, "messages": list(messages)}


def called(api: str, arguments: Any, result: Any) -> list[dict[str, Any]]:
    """A call of f and its result, as an API has them."""
    if api == "responses":
        return [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": result},
        ]
    if api == "messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        told = {"type": "tool_result", "tool_use_id": "c", "content": result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]


def prompt(api: str, tokenizer: Tokenizer, *messages: dict[str, Any]) -> str:
    ids = prompt_of(api, body_of(api, *messages), tokenizer)
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("api", FORMS)
def test_a_result_behind_a_text_is_in_the_prompt(api, tokenizer):
    call, result = called(api, "{}", "R1")
    said = {"role": "assistant", "content": "running"}
    for between in ([said], [said, USER], [said, USER, said]):
        text = prompt(api, tokenizer, USER, call, *between, result)
        assert "R1" in text and "running" in text


@pytest.mark.parametrize("arguments", ['{"a": "x', "{", '{"a":1', "[1", "5", '"x"', "{'a': 1}"])
@pytest.mark.parametrize("api", FORMS)
def test_a_cut_call_is_shown_as_it_was_written(api, arguments, tokenizer, caplog):
    caplog.set_level(logging.INFO, "specdec.chat")
    cut, result = called(api, arguments, "error: no JSON")
    text = prompt(api, tokenizer, USER, cut, result, USER)
    assert f"call:f{arguments}" in text and "error: no JSON" in text
    assert "<tool_call|>" not in text and "a call became text" in caplog.text


@pytest.mark.parametrize("api", FORMS)
@pytest.mark.parametrize("message", [None, "", []])
def test_a_tool_may_have_said_nothing(api, message, tokenizer):
    assert prompt(api, tokenizer, USER, *called(api, "{}", message), USER)


@pytest.mark.parametrize("arguments", [r'{"a": "\ud800"}', '{"a":' * 900 + "1" + "}" * 900])
def test_arguments_that_cannot_be_written_are_text(arguments, tokenizer):
    """Half of a character, and brackets deeper than a template can go."""
    text = prompt("chat", tokenizer, USER, *called("chat", arguments, "R1"))
    assert f"call:f{arguments}" in text and "R1" in text


def test_what_is_nested_too_deeply_is_refused(tokenizer):
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        tokenizer.chat_pieces([USER], note=deep)


@pytest.mark.parametrize("api", FORMS)
def test_a_cut_call_beside_a_whole_one(api, tokenizer):
    cut, result = called(api, '{"a": "x', "R1")
    whole, other = called(api, '{"b": "y"}', "R2")
    text = prompt(api, tokenizer, USER, cut, result, whole, other)
    assert 'call:f{"a": "x' in text and "R1" in text and "R2" in text


@pytest.mark.parametrize(("api", "part"), [(api, part) for api in FORMS for part in PARTS[api]])
def test_what_cannot_be_read_is_a_line_of_text_in_earlier_messages(api, part, tokenizer, caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    plain = {"type": "input_text" if api == "responses" else "text", "text": "Look"}
    seen = {"role": "user", "content": [plain, part]}
    text = prompt(api, tokenizer, seen, {"role": "assistant", "content": "Yes"}, USER)
    assert "Look" in text and part["type"] in text and PNG not in text
    for words in ("plan.pdf", "Terms and conditions", "https://example.org/a.png", "tomorrow"):
        assert words in text or words not in str(part)
    assert repr(part["type"]) in caplog.text and "Look" not in caplog.text


@pytest.mark.parametrize(("api", "part"), [(api, part) for api in FORMS for part in PARTS[api]])
def test_what_cannot_be_read_is_a_line_of_text_in_results(api, part, tokenizer):
    plain = {"type": "input_text" if api == "responses" else "text", "text": "R1"}
    arguments: Any = {} if api == "messages" else "{}"
    text = prompt(api, tokenizer, USER, *called(api, arguments, [plain, part]))
    assert "R1" in text and part["type"] in text and PNG not in text


LONG_TEXTS = [
    "東京は日本の首都である。" * 60,
    "도쿄는일본의수도이다" * 60,
    "กรุงเทพมหานครเป็นเมืองหลวง" * 40,
    ",".join(f"{i},error{i}" for i in range(300)),
    "var a=function(b){return b.c};" * 60,
    json.dumps({f"key{i}": i for i in range(300)}, separators=(",", ":")),
    "data: 3 errors, " * 60,
    "https://example.org/" + "a/b.c?" * 200,
]


@pytest.mark.parametrize("text", LONG_TEXTS, ids=lambda text: text[:9])
def test_a_long_text_without_blanks_is_no_data(text, tokenizer):
    found = {"type": "search_result", "title": "x", "content": [{"type": "text", "text": text}]}
    line = line_of(found)
    assert json.dumps(text, ensure_ascii=False) in line and "of data" not in line
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": text}
    assert text.replace('"', r"\"") in prompt("responses", tokenizer, USER, output, USER)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"3 errors in {PNG}, 2 warnings", f"3 errors in ({len(PNG)} characters of data), 2 warn"),
        (f"首都{PNG}東京", f"首都({len(PNG)} characters of data)東京"),
        (f"see {PICTURE} and {PICTURE}.", f"see ({len(PICTURE)} characters of data) and ("),
        (f"![{PICTURE}](東京)", f"![({len(PICTURE)} characters of data)](東京)"),
        ("data:image/png;base64,iVBORw0KGgo=", "(34 characters of data)"),
        ("data:;base64,iVBORw0KGgo= below", "(25 characters of data) below"),
        ("data:text/plain,a%20b", "(21 characters of data)"),
        ("a-b_c/" * 84, "(504 characters of data)"),
        ("a" * 500, "a" * 500),
    ],
)
def test_of_data_the_run_alone_is_left_out(text, shown):
    assert shown in line_of({"type": "made_up", "of": text})


def test_runs_are_found_in_one_pass():
    began = time.process_time()
    line_of({"type": "made_up", "of": ("a" * 499 + ".") * 8000 + "data:" * 10**5})
    assert time.process_time() - began < 2


@pytest.mark.parametrize("api", FORMS)
def test_a_picture_in_the_newest_message_is_refused_by_name(api):
    part = PARTS[api][0]
    said = {"role": "assistant", "content": "Yes"}
    body = body_of(api, USER, said, {"role": "user", "content": [part]})
    with pytest.raises(ApiError, match="images are not supported") as refused:
        prompt_of(api, body, tokenizer_with("mini"))
    assert refused.value.status == 400 and part["type"] in refused.value.message


def user_with(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


BRIEF = {"role": "system", "content": "Be brief"}
SAID = {"role": "assistant", "content": "Yes"}
BEHIND: list[list[dict[str, Any]]] = [[BRIEF], [USER], [USER, BRIEF, USER], [BRIEF, BRIEF]]


@pytest.mark.parametrize("behind", BEHIND, ids=lambda behind: "-".join(m["role"] for m in behind))
@pytest.mark.parametrize("before", [[], [USER], [USER, SAID], [USER, SAID, USER, BRIEF]])
@pytest.mark.parametrize(("api", "part"), [(api, part) for api in FORMS for part in PARTS[api]])
def test_what_cannot_be_read_is_refused_in_all_new_messages(api, part, before, behind):
    """Those behind the model's last one: clients send a picture and its question as two, or append
    a reminder."""
    messages = [*before, user_with(part), *behind]
    with pytest.raises(ApiError) as refused:
        prompt_of(api, body_of(api, *messages), tokenizer_with("mini"))
    assert refused.value.status == 400 and repr(part["type"]) in refused.value.message


@pytest.mark.parametrize("api", FORMS)
def test_new_messages_begin_behind_a_tools_result(api, tokenizer):
    """What stands directly behind it was attached by the agent, what follows is the user's own."""
    part, (call, result) = PARTS[api][-1], called(api, {} if api == "messages" else "{}", "R1")
    attached = [USER, call, result, user_with(part)]
    for behind in ([], [BRIEF], [USER], [BRIEF, USER]):
        text = prompt(api, tokenizer, *attached, *behind)
        assert "R1" in text and "tomorrow" in text
    assert "tomorrow" in prompt(api, tokenizer, USER, call, result, BRIEF, user_with(part))
    with pytest.raises(ApiError, match="made_up"):
        prompt(api, tokenizer, *attached, user_with(part))


@pytest.mark.parametrize("part", PARTS["messages"], ids=lambda part: part["type"])
def test_a_part_before_an_answer_that_was_begun_is_refused(part):
    body = body_of("messages", user_with(part), SAID)
    with pytest.raises(ApiError, match=repr(part["type"])):
        prompt_of("messages", body, tokenizer_with("mini"))


@pytest.mark.parametrize("api", FORMS)
def test_a_picture_that_a_tool_shows_is_not_refused(api, tokenizer):
    """Agents send it as the user's message behind the result, and again with every later turn."""
    part, (call, result) = PARTS[api][0], called(api, "{}", "R1")
    shown = {"role": "user", "content": [part]}
    if api == "messages":
        shown, result = {"role": "user", "content": [*result["content"], part]}, USER
    text = prompt(api, tokenizer, USER, call, *([] if api == "messages" else [result]), shown)
    assert "R1" in text and part["type"] in text


NO = "I can't help with that."
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"role": "assistant", "content": None, "refusal": NO}),
    ("chat", {"role": "assistant", "refusal": NO}),
    ("chat", {"role": "assistant", "content": "", "refusal": NO, "tool_calls": None}),
    ("chat", {"role": "assistant", "content": [{"type": "refusal", "refusal": NO}]}),
    ("responses", {"role": "assistant", "content": [{"type": "refusal", "refusal": NO}]}),
]


@pytest.mark.parametrize(("api", "said"), REFUSED)
def test_what_the_model_refused_with_is_kept(api, said, tokenizer):
    text = prompt(api, tokenizer, USER, said, USER)
    assert text.count(NO) == 1 and "refusal" not in text


def test_a_refusal_follows_the_text_that_was_said_before_it(tokenizer):
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": NO}]
    for said in ({"content": "Well.", "refusal": NO}, {"content": parts}):
        assert f"Well.\n{NO}" in prompt(
            "chat", tokenizer, USER, {"role": "assistant", **said}, USER
        )
    both = {"role": "assistant", "content": parts, "refusal": NO}
    assert prompt("chat", tokenizer, USER, both, USER).count(NO) == 1


def test_a_refusal_is_the_models_alone(tokenizer):
    assert NO not in prompt("chat", tokenizer, {**USER, "refusal": NO})
    silent = {"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}
    assert prompt("chat", tokenizer, USER, silent, USER)
    assert prompt(
        "chat", tokenizer, USER, {"role": "assistant", "content": "Yes", "refusal": 5}, USER
    )


THOUGHT = {"type": "thinking", "thinking": "I weigh.", "signature": "c2VjcmV0"}


@pytest.mark.parametrize(
    "parts",
    [
        [THOUGHT, {"type": "text", "text": "Yes."}],
        [{"type": "redacted_thinking", "data": PNG}, THOUGHT, {"type": "text", "text": "Yes."}],
        [THOUGHT],
    ],
)
def test_parts_with_thoughts_are_thoughts(parts, tokenizer):
    """As blocks of Anthropic's API are: the same prompt."""
    said = {"role": "assistant", "content": parts}
    request = chat_of_body("chat", body_of("chat", USER, said, USER))
    assert request.messages[1].reasoning_content == "I weigh."
    assert prompt("chat", tokenizer, USER, said, USER) == prompt(
        "messages", tokenizer, USER, said, USER
    )
    call, result = called("chat", "{}", "R1")
    thought = called("chat", "{}", "R1")[0] | {"content": parts}
    same = call | {"content": [p for p in parts if p["type"] == "text"]}
    same["reasoning_content"] = "I weigh."
    text = prompt("chat", tokenizer, USER, thought, result)
    assert text == prompt("chat", tokenizer, USER, same, result) and "secret" not in text


def test_thoughts_in_parts_come_behind_those_beside_them(tokenizer):
    said = {"role": "assistant", "content": [THOUGHT, THOUGHT], "reasoning_content": "First."}
    (_, message, _) = chat_of_body("chat", body_of("chat", USER, said, USER)).messages
    assert message.reasoning_content == "First.\nI weigh.\nI weigh." and not message.text
    again = {"role": "assistant", "content": [THOUGHT], "reasoning_content": "I weigh."}
    (_, message, _) = chat_of_body("chat", body_of("chat", USER, again, USER)).messages
    assert message.reasoning_content == "I weigh."


@pytest.mark.parametrize("item", FOREIGN_ITEMS, ids=lambda item: item["type"])
def test_items_of_other_providers_are_lines_of_text(item, tokenizer, caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    text = prompt("responses", tokenizer, USER, item, USER)
    assert item["type"] in text and PNG not in text and repr(item["type"]) in caplog.text
    for words in ("rain", "*** Begin", "Done!", "ls", "files", "tomorrow"):
        assert words in text or words not in str(item)


def test_a_reference_to_an_item_says_what_to_send():
    body = body_of("responses", USER, {"type": "item_reference", "id": "msg_1"})
    with pytest.raises(ApiError, match="keeps no items: send the item itself"):
        prompt_of("responses", body, tokenizer_with("mini"))


@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "rain"}]},
        {"type": "mcp_tool_use", "id": "s", "name": "rain", "server_name": "m", "input": {}},
    ],
)
def test_blocks_of_anthropics_own_tools_are_lines_of_text(block, tokenizer):
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "So"}]}
    text = prompt("messages", tokenizer, USER, said, USER)
    assert block["type"] in text and "rain" in text and "So" in text


def test_calls_of_other_kinds_and_the_oldest_forms_are_read(tokenizer):
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": "x1"}'}}
    text = prompt(
        "chat",
        tokenizer,
        USER,
        {"role": "assistant", "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c", "content": "R1"},
        USER,
        old,
        {"role": "function", "name": "f", "content": "R2"},
    )
    assert "*** Begin" in text and "R1" in text and "R2" in text


FILES = {"type": "namespace", "name": "mcp__files", "description": "Files"}
WEB = {"type": "namespace", "name": "mcp__web", "description": "The web"}


def function(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


SPACES = [
    function("search", "of no server"),
    FILES | {"tools": [function("search", "in files"), function("read", "a file")]},
    WEB | {"tools": [function("search", "the web"), {"type": "custom", "name": "inner"}]},
    {"type": "custom", "name": "apply_patch"},
    {"type": "web_search"},
]


def space_chat(**more: Any) -> Any:
    return chat_of_body("responses", {"input": "Go on", "tools": SPACES, **more})


def test_functions_in_namespaces_are_declared(caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    told = {t.function.name: t.function.description for t in space_chat().tools}
    assert told == {
        "search": "of no server",
        "mcp__files.search": "in files",
        "mcp__files.read": "a file",
        "mcp__web.search": "the web",
    }
    for left_out in ("'apply_patch', of type 'custom'", "'inner'", "of type 'web_search'"):
        assert left_out in caplog.text


def test_names_that_would_be_one_are_kept_apart():
    tools = [
        function("a.b", "1"),
        {"type": "namespace", "name": "a", "tools": [function("b", "2")]},
        {"type": "namespace", "name": "a/b", "tools": [function("c", "3")]},
        {"type": "namespace", "name": "a_b", "tools": [function("c", "4")]},
        {
            "type": "namespace",
            "name": "n" * 100,
            "tools": [function("f" * 60 + x, x) for x in "xy"],
        },
    ]
    names = [t.function.name for t in space_chat(tools=tools).tools]
    assert len(set(names)) == 6 and all(len(name) <= 128 for name in names)
    again = [t.function.name for t in space_chat(tools=tools).tools]
    assert names == again


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, ["mcp__files.read"]),
        ({"type": "function", "name": "search", "namespace": "mcp__web"}, ["mcp__web.search"]),
        ({"type": "function", "name": "search"}, ["search"]),
        ({"type": "function", "name": "read"}, ["mcp__files.read"]),
        ({"type": "function", "name": "mcp__files.read"}, ["mcp__files.read"]),
        ({"type": "namespace", "name": "mcp__files"}, ["mcp__files.search", "mcp__files.read"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "namespace", "name": "mcp__web"},
                    {"type": "function", "name": "search"},
                    {"type": "web_search"},
                ],
            },
            ["mcp__web.search", "search"],
        ),
    ],
)
def test_a_choice_may_name_a_function_in_a_namespace(choice, names):
    chat = space_chat(tool_choice=choice)
    assert (chat.chosen_tools, chat.calls) == (names, "required")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "read", "namespace": "mcp__web"},
        {"type": "namespace", "name": "mcp__none"},
        {"type": "function"},
        {"type": "function", "name": "read", "namespace": 5},
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice):
    with pytest.raises(ApiError, match="tool_choice"):
        space_chat(tool_choice=choice)


@pytest.mark.parametrize(
    ("own", "spoken"),
    [
        ({"name": "search", "namespace": "mcp__web"}, "mcp__web.search"),
        ({"name": "search"}, "search"),
        ({"name": "read"}, "mcp__files.read"),
        ({"name": "gone", "namespace": "mcp__old"}, "mcp__old.gone"),
    ],
)
def test_a_call_in_the_history_has_the_name_that_the_model_wrote(own, spoken, tokenizer):
    call = {"type": "function_call", "call_id": "c", "arguments": "{}", **own}
    result = {"type": "function_call_output", "call_id": "c", "output": "R1"}
    items = [{"role": "user", "content": "Go on"}, call, result]
    ids = prompt_of("responses", {"input": items, "tools": SPACES}, tokenizer)
    text = tokenizer.decode(ids, skip_special=False)
    assert f"call:{spoken}{{" in text and "R1" in text


def test_an_answer_names_the_namespace_whole_and_in_each_event():
    call = '<|tool_call>call:mcp__web.search{q:<|"|>x<|"|>}<tool_call|>'
    body = {"input": "Go on", "tools": SPACES}
    with scripted(f"{call}<|tool_call>call:search{{}}<tool_call|><|tool_response>") as server:
        whole = server.post("responses", **body).json()
        events = events_of(server.post("responses", **body, stream=True))
    inner, outer = whole["output"]
    assert (inner["namespace"], inner["name"]) == ("mcp__web", "search")
    assert outer["name"] == "search" and "namespace" not in outer
    named = [held.get("item", held) for _, held in events]
    told = [(held.get("namespace"), held["name"]) for held in named if "name" in held]
    assert told == [("mcp__web", "search")] * 3 + [(None, "search")] * 3
    kept = [tool["type"] for tool in whole["tools"]]
    assert kept == ["function", "namespace", "namespace"]
    Response.model_validate(whole, strict=False)


AGENTS = json.loads((DATA / "agents.json").read_text())
"""Both requests of a turn with one MCP tool, as Codex and Claude Code sent them to a forward-scan
template. Long texts are cut short, and most of their own tools left out."""
SEARCH = 'Let me look.<|tool_call>call:{}{{query:<|"|>the key<|"|>}}<tool_call|><|tool_response>'


@pytest.mark.parametrize("template", WITH_TOOLS)
@pytest.mark.parametrize("name", ["Codex 0.171.0", "Claude Code 2.1.197"])
def test_an_agents_turn_with_an_mcp_tool(name, template):
    first, second = (sent for sent in AGENTS if sent["agent"] == name)
    called = "mcp__notes.search" if name.startswith("Codex") else "mcp__notes__search"
    found = "It lies under the mat."
    with scripted(SEARCH.format(called), then=found, template=template, max_len=16_384) as server:
        asked, told = (server.post(sent["path"], **sent["body"]).text for sent in (first, second))
    own = '"name":"search","namespace":"mcp__notes"' if name.startswith("Codex") else called
    assert own in asked and " mat" in told and "Let me look" not in told
    text = tokenizer_with(template).decode(
        prompt_of(second["path"], second["body"], tokenizer_with(template)), skip_special=False
    )
    assert f"call:{called}{{" in text and "the key lies under the mat" in text
