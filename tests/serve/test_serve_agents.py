"""What a coding agent needs of the server: tools, thoughts and schemas, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from serve.chat_schema import ChatRequest
from serve.schema import parse
from serve.structure import rules_for, thinking_at
from tests.support.agents import CLIENTS, SCHEMAS, TOOLS
from tests.support.constrained import mini_tokenizer, mini_vocabulary
from tests.support.fakes import Noise
from tests.support.serving import SAID, Server, scripted, serving_mini
from tests.support.templates import WITH_TOOLS

FREE: Any = [{"type": "function", "function": {"name": name}} for name in ("edit", "run")]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def server(mini_server: Server) -> Server:
    return mini_server


def gathered(stream: Any) -> tuple[str, str, list[Any], str | None, Any]:
    """A stream's content, reasoning, calls, finish reason and usage; each delta counts once."""
    content, thought, finish, usage = "", "", None, None
    calls: list[dict[str, Any]] = []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert finish is None, "something came after the end"
            delta = choice.delta
            content += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    assert call.function.arguments == ""
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    calls[call.index]["arguments"] += call.function.arguments
            finish = choice.finish_reason or finish
    return content, thought, calls, finish, usage


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "wish",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            }
        },
    ],
)
def test_demanded_calls_are_valid_whole_and_streamed(server, wish, seed):
    ask = {"model": "mini", "messages": ASK, "tools": TOOLS, "seed": seed, "max_tokens": 300}
    ask |= {"temperature": 1, **wish}
    reply = server.openai.chat.completions.create(**ask)
    (choice,) = reply.choices
    assert choice.message.content is None and choice.message.tool_calls
    for call in choice.message.tool_calls[: -1 if choice.finish_reason == "length" else None]:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    named = {"add"} if isinstance(wish["tool_choice"], dict) else set(SCHEMAS)
    named = {"get_weather"} if "allowed_tools" in wish["tool_choice"] else named
    assert {call.function.name for call in choice.message.tool_calls} <= named
    if wish.get("parallel_tool_calls") is False or named == {"add"}:
        assert len(choice.message.tool_calls) == 1
    stream = server.openai.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    content, _, calls, finish, usage = gathered(stream)
    assert (content, finish) == ("", choice.finish_reason)
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]
    assert len({call["id"] for call in calls}) == len(calls)
    assert usage.to_dict() == reply.usage.to_dict()


def test_tools_that_are_not_to_be_called_are_not(server):
    ask = {"model": "mini", "messages": ASK, "seed": 3, "max_tokens": 30, "temperature": 1}
    without = server.openai.chat.completions.create(**ask).choices[0].message
    none = server.openai.chat.completions.create(**ask, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == without.content
    assert none.choices[0].message.tool_calls is None


class Sums(pydantic.BaseModel):
    kind: Literal["sum", "product"]
    left: int = pydantic.Field(ge=0, le=99)
    right: int = pydantic.Field(ge=0, le=99)


def test_parse_gives_a_pydantic_object(server):
    reply = server.openai.chat.completions.parse(
        model="mini", messages=ASK, response_format=Sums, seed=1, max_tokens=100
    )
    assert isinstance(reply.choices[0].message.parsed, Sums)
    with server.openai.chat.completions.stream(
        model="mini", messages=ASK, response_format=Sums, seed=1, max_tokens=100
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == reply.choices[0].message.parsed


@pytest.mark.parametrize(
    ("structure", "ok"),
    [
        ({"choice": ["yes", "no", "don't know"]}, lambda t: t in ("yes", "no", "don't know")),
        ({"regex": "[a-c]{3}/[0-9]{2}"}, lambda t: len(t) == 6 and t[3] == "/"),
        ({"json_object": True}, lambda t: isinstance(json.loads(t), dict)),
        ({"grammar": 'start: "a" "b"+ "c"'}, lambda t: t[0] == "a" and t[-1] == "c"),
        ({"grammar": 'root ::= "x" [0-9]'}, lambda t: t[0] == "x" and t[1:].isdigit()),
        ({"json": '{"type": "integer", "maximum": 5, "minimum": 1}'}, lambda t: 1 <= int(t) <= 5),
    ],
)
def test_vllms_structured_outputs(server, structure, ok):
    for older in (False, True):
        (name, value), *_ = structure.items()
        if older and name == "json_object":
            continue
        wish = {f"guided_{name}": value} if older else {"structured_outputs": structure}
        for path, said in (
            ("completions", {"prompt": "x ="}),
            ("chat/completions", {"messages": ASK}),
        ):
            body = {**said, **wish, "max_tokens": 400, "seed": 5, "temperature": 0.7}
            reply = server.post(path, **body)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert choice["finish_reason"] == "length" or ok(text), text


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_a_history_with_calls_and_results_goes_on(template):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    history: Any = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "42", "reasoning_content": "Easy.", "annotations": []},
        {"role": "user", "content": "Again", "cache_control": {"type": "ephemeral"}},
    ]
    with scripted("Nothing.", then="It is 42.", template=template) as server:
        reply = server.openai.chat.completions.create(model="mini", messages=history, tools=TOOLS)
    assert reply.choices[0].message.content == "It is 42."


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_thoughts_and_calls_are_taken_out_of_the_text(k):
    ask = {"model": "mini", "messages": ASK, "tools": FREE, "reasoning_effort": "low"}
    noise = Noise(4096)
    with scripted(SAID, noise if k == 7 else None, k) as server:
        reply = server.openai.chat.completions.create(**ask)
        stream = server.openai.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        content, thought, calls, finish, usage = gathered(stream)
    message = reply.choices[0].message
    assert message.content == content == "Let me see.\n"
    assert message.model_extra["reasoning_content"] == thought == "I must call {it}."
    assert message.model_extra["reasoning"] == thought
    assert [c.function.name for c in message.tool_calls] == ["edit", "run"]
    assert [c["arguments"] for c in calls] == [c.function.arguments for c in message.tool_calls]
    edit = {"path": "a.py", "new": 'x = {"a": [1]}\n', "line": 4}
    assert json.loads(calls[0]["arguments"]) == edit and json.loads(calls[1]["arguments"]) == {}
    assert reply.choices[0].finish_reason == finish == "tool_calls"
    details = reply.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < reply.usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens


def test_events_of_a_stream_are_all_there():
    """No event may be missing from a stream, nor come in another order."""
    body = {
        "messages": ASK,
        "tools": FREE,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with scripted(SAID) as server:
        reply = server.post("chat/completions", **body)
    *events, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["tool_calls"]
    kinds = [next(iter(c["choices"][0]["delta"]), "end") for c in chunks[1:-1]]
    order = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
    assert order in (
        ["reasoning_content", "content", "tool_calls"],
        ["reasoning_content", "content", "tool_calls", "end"],
    )


def test_a_stop_string_is_of_the_answer_and_not_of_the_thought():
    text = "<|channel>thought\nno STOP here\n<channel|>one STOP two"
    with scripted(text) as server:
        ask = {"model": "mini", "messages": ASK, "stop": "STOP"}
        reply = server.openai.chat.completions.create(**ask)
        kept = server.openai.chat.completions.create(
            **ask, extra_body={"include_stop_str_in_output": True}
        )
    assert reply.choices[0].message.content == "one "
    assert reply.choices[0].message.model_extra["reasoning"] == "no STOP here"
    assert kept.choices[0].message.content == "one STOP"


def test_special_tokens_are_shown_to_who_asks():
    with scripted("plan <|channel>it<channel|>answer") as server:
        body = {"messages": ASK, "skip_special_tokens": False}
        raw = server.post("chat/completions", **body).json()["choices"][0]["message"]
        text = server.post("completions", prompt="x", max_tokens=99).json()["choices"][0]["text"]
    assert raw["content"] == "plan <|channel>it<channel|>answer" and "reasoning" not in raw
    assert text == "plan itanswer"


def test_a_call_that_is_cut_says_length_and_ends_as_it_was_cut():
    with scripted(SAID) as server:
        ask = {"messages": ASK, "tools": FREE, "max_tokens": 40}
        choice = server.post("chat/completions", **ask).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"path"')


def _run(name: str, arguments: dict[str, Any]) -> str:
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    return json.dumps({"city": arguments["city"], "degrees": 7 * arguments["days"]})


def agent(client: openai.OpenAI, turns: int) -> list[Any]:
    """A scripted agent: in each turn the model calls a tool and gets its result. Returns the
    messages."""
    messages: list[Any] = [{"role": "system", "content": "You call tools."}]
    for turn in range(turns):
        if turn % 3 == 0:
            messages.append({"role": "user", "content": f"Step {turn}, please."})
        stream = client.chat.completions.create(
            model="mini",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=120,
            temperature=1,
            seed=turn,
            stream=True,
        )
        _, _, (call,), finish, _ = gathered(stream)
        assert finish == "tool_calls"
        given = {"name": call["name"], "arguments": call["arguments"]}
        said = {"id": f"call_{turn}", "type": "function", "function": given}
        messages.append({"role": "assistant", "content": None, "tool_calls": [said]})
        result = _run(call["name"], json.loads(call["arguments"]))
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": result})
    return messages


@pytest.mark.parametrize("turns", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_an_agent_of_many_turns_is_the_same_with_speculation_and_without(turns):
    """With reused prompts and drafts, or with neither."""
    with serving_mini(reuse=True) as server:
        drafted = agent(server.openai, turns)
        metrics = server.metrics()
    with serving_mini("none") as undrafted:
        assert agent(undrafted.openai, turns) == drafted
    assert sum(message["role"] == "tool" for message in drafted) == turns
    labels = '{engine="0",model_name="mini"}'
    assert metrics[f"vllm:prefix_cache_hits_total{labels}"] > 0
    assert metrics[f"vllm:spec_decode_num_accepted_tokens_total{labels}"] > 0


def described(text: str) -> dict[str, Any]:
    """A chat in which only a tool's description is long."""
    function = {"name": "f", "description": text, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    return {"messages": [{"role": "user", "content": "x"}], "tools": tools}


def test_prompts_that_cannot_fit_are_refused_before_they_are_encoded(server, monkeypatch):
    def never(*args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("was encoded")

    tokenizer = type(mini_tokenizer())
    monkeypatch.setattr(tokenizer, "encode_pieces", never)
    huge = "word " * 1_500_000
    for path, body in (
        ("completions", {"prompt": huge}),
        ("chat/completions", {"messages": [{"role": "user", "content": huge}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 4000}),
        ("chat/completions", described(huge)),
    ):
        reply = server.post(path, **body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_schema_that_would_kill_the_compiler_is_a_400(server):
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)}
    schema = {"$ref": "#/$defs/a0", "$defs": links | {"a20000": {"type": "integer"}}}
    reply = server.post("completions", prompt="x", structured_outputs={"json": schema})
    assert reply.status_code == 400 and "too deeply" in reply.json()["error"]["message"]
    assert server.post("completions", prompt="x", max_tokens=1).status_code == 200


def test_openapi_resolves_and_tells_all_forms(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document))
    assert found and all(ref.removeprefix("#/components/schemas/") in schemas for ref in found)
    completion = schemas["CompletionRequest"]["properties"]
    assert {"type": "string"} in completion["stop"]["anyOf"]
    assert len(completion["prompt"]["anyOf"]) == 4
    content = schemas["Message"]["properties"]["content"]["anyOf"]
    assert {"type": "null"} in content and {"type": "string"} in content
    errors = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"400", "401", "404", "413", "429", "503"} <= errors.keys()


def test_log_likelihoods_of_prompts(server):
    """In the form that lm-eval requests; they don't change what is generated."""
    prompt = "def add(a, b):\n    return a + b"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    choice = server.post("completions", **body).json()["choices"][0]
    ids = mini_tokenizer().encode(prompt)
    assert choice["text"] == prompt and len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
    both = server.post("completions", prompt=prompt, max_tokens=6, seed=1, prompt_logprobs=2)
    alone = server.post("completions", prompt=prompt, max_tokens=6, seed=1)
    told = both.json()["choices"][0]
    assert told["text"] == alone.json()["choices"][0]["text"]
    values = [
        entry[str(i)]["logprob"]
        for i, entry in zip(ids[1:], told["prompt_logprobs"][1:], strict=True)
    ]
    assert values == choice["logprobs"]["token_logprobs"][1:]
    chat = server.post("chat/completions", messages=ASK, max_tokens=1, prompt_logprobs=0).json()
    assert len(chat["choices"][0]["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_small_things_that_evaluators_need(server):
    def text(**body: Any) -> str:
        reply = server.post("completions", seed=4, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    assert text(prompt="ab", echo=True, max_tokens=3).startswith("ab")
    tokenizer = mini_tokenizer()
    few = text(prompt="x", allowed_token_ids=[40, 41], max_tokens=5, temperature=1)
    assert set(tokenizer.encode(few)[1:]) <= set(tokenizer.encode(tokenizer.decode([40, 41])))
    said = text(prompt="def f(x):\n    return", max_tokens=20)
    word = said.split()[0]
    assert word not in text(prompt="def f(x):\n    return", max_tokens=20, bad_words=[word])
    long_prompt = "a = 1\n" * 800
    assert server.post("completions", prompt=long_prompt).status_code == 400
    cut = server.post("completions", prompt=long_prompt, truncate_prompt_tokens=9, max_tokens=1)
    assert cut.json()["usage"]["prompt_tokens"] == 9
    go_on = [*ASK, {"role": "assistant", "content": "The weather in"}]
    chat = {"messages": go_on, "continue_final_message": True, "max_tokens": 1}
    sent = server.post("chat/completions", **chat).json()["usage"]["prompt_tokens"]
    counted = httpx.post(
        f"{server.url}/tokenize",
        json={"messages": go_on, "continue_final_message": True, "add_generation_prompt": False},
    ).json()
    assert counted["count"] == sent
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": counted["tokens"]}).json()
    assert back["prompt"].endswith("The weather in")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tempratur": 1}, "unknown parameter 'tempratur': did you mean 'temperature'?"),
        ({"grammar": "x"}, "grammar is not supported: use structured_outputs"),
        ({"n_predict": 5}, "use max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking is not supported: use reasoning_effort"),
        ({"prediction": "junk"}, "prediction"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "contradict",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two functions of one name"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "can't be followed exactly",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "no text satisfies"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "choose one"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "at most 65536 bytes"),
        ({"store": True}, "store is not supported"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"stream": True, "prompt_logprobs": 1}, "can't be streamed"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"continue_final_message": True}, "last message of the assistant"),
    ],
)
def test_what_is_not_honoured_is_a_400_that_names_it(server, body, words):
    reply = server.post("chat/completions", **{"messages": ASK} | body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"] and "\n" not in error["message"]


def test_null_is_absent_and_hints_are_accepted(server):
    body = {
        "messages": ASK,
        "max_tokens": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "grammar": None,
        "made_up": None,
        "stop": None,
        "tools": None,
        "response_format": {"type": "text"},
        "prediction": {"type": "content", "content": "x"},
    }
    assert server.post("chat/completions", **body).status_code == 200


@pytest.mark.parametrize("sent", CLIENTS, ids=[sent["client"] for sent in CLIENTS])
def test_what_clients_send_is_answered(server, sent):
    reply = server.post(sent["path"], **sent["body"])
    assert reply.status_code == 200, reply.text
    assert '"error"' not in reply.text


@pytest.mark.parametrize("prefix", ["", "<|channel>thought\n"])
def test_a_schema_begins_after_the_thought(prefix):
    """prefix: how the prompt ends."""
    tokenizer, vocabulary = mini_tokenizer(), mini_vocabulary()
    body = {"messages": ASK, "reasoning_effort": "high", "structured_outputs": {"choice": ["yes"]}}
    request = parse(ChatRequest, json.dumps(body).encode())
    prompt = [*tokenizer.encode_chat(ASK), *tokenizer.encode(prefix)[1:]]
    compiled = vocabulary.compiled(
        rules_for(request, tokenizer, thinking_at(request, tokenizer, prompt)).grammar
    )

    def follows(text: str) -> bool:
        ids = tokenizer.encode(text)[1:]
        alone = compiled.copy()
        return alone.try_consume_tokens(ids) == len(ids) and alone.is_accepting()

    thought = "I think {so}.\n<channel|>"
    if prefix:
        assert follows(f"{thought}yes") and not follows("yes")
    else:
        assert follows(f"<|channel>thought\n{thought}yes") and follows("yes")
        assert not follows(f"{thought}yes")
    assert not follows("no") and not follows(f"<|channel>thought\n{thought}no")
