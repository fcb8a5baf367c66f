"""What `soak.py` asks for: a table of requests, mistakes, and requests never sent before.

Every request of the table has a seed or no randomness, so its answer is a function of the request.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

DRESS = ("stream", "speculative", "prediction", "include_speculation")
"""What may not change an answer."""

CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])
"""
PROMPTS = (
    "def quicksort(items):",
    "import json\n\n\ndef load(path):\n",
    "class Stack:\n    def __init__(self):\n",
    CODE,
    "for name in sorted(names):",
    "def test_mean():\n    assert mean([1, 2, 3]) ==",
)
SYSTEM = "You are a careful programmer. Follow these rules.\n" + "".join(
    f"{number}. Write the function rule_{number}(x) so that it returns x + {number}, "
    "with a docstring and no imports.\n"
    for number in range(1, 9)
)
"""Longer than two prefill chunks: several requests begin with it."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["list", "tuple", "set"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Asked:
    route: str
    body: Json


def key(asked: Asked) -> str:
    """The request without what may not change its answer."""
    bare = {name: value for name, value in asked.body.items() if name not in DRESS}
    return json.dumps([asked.route, bare], sort_keys=True)


def dressed(asked: Asked, draw: random.Random, streamed: bool | None = None) -> Asked:
    """The same request: streamed or whole, and drafted for in some way."""
    stream = draw.random() < 0.5 if streamed is None else streamed
    body = asked.body | {"stream": stream and not asked.body.get("echo")}
    if asked.route in (CHAT, TEXT):
        if draw.random() < 0.4:
            body["speculative"] = draw.choice(WAYS)
        if draw.random() < 0.2:
            body["include_speculation"] = True
        if draw.random() < 0.2:
            body["prediction"] = {"type": "content", "content": draw.choice(PROMPTS)}
    return Asked(asked.route, body)


WAYS: tuple[Json, ...] = (
    {"enabled": False},
    {"k": 1},
    {"drafter": "ngram"},
    {"drafter": "suffix", "k": 3},
    {"drafter": "eagle3"},
    {"drafter": "eagle3", "k": 2},
)
"""To guess otherwise than the server does by default (`auto` with `eagle3`)."""


def table() -> list[Asked]:
    """Some sixty requests."""
    return [*_chats(), *_texts(), *_messages(), *_responses()]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def _function(strict: bool) -> Json:
    return {"name": "store", "description": "Stores it.", "parameters": SCHEMA, "strict": strict}


def _chats() -> list[Asked]:
    tool = [{"type": "function", "function": _function(True)}]
    free = [{"type": "function", "function": _function(False)}]
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    wishes: list[Json] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "temperature": 1.3, "top_p": 0.9},
        {"seed": 3, "n": 3, "max_tokens": 24},
        {"seed": 4, "logprobs": True, "top_logprobs": 3},
        {"seed": 5, "stop": ["\n\n", "return"]},
        {"seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"seed": 7, "logit_bias": {"285": 4.0, "310": -100.0}, "min_p": 0.05},
        {"seed": 8, "tools": free},
        {"seed": 9, "tools": tool, "tool_choice": "required", "max_tokens": 96},
        {"seed": 10, "tools": tool, "tool_choice": "required", "n": 2, "logprobs": True},
        {"seed": 11, "response_format": form, "max_tokens": 96},
        {"seed": 12, "response_format": {"type": "json_object"}},
        {"seed": 13, "structured_outputs": {"regex": "[a-f]{4,20}-[0-9]{2}"}},
        {"seed": 14, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        {"seed": 15, "reasoning_effort": "low", "thinking_token_budget": 12},
        {"seed": 16, "ignore_eos": True, "min_tokens": 20, "presence_penalty": 0.5},
        {"seed": 17, "bad_words": ["self", "return"], "cache_salt": "a"},
        {"seed": 18, "cache_prompt": False},
        {"seed": 19, "n": 4, "temperature": 1.0, "logprobs": True, "max_tokens": 12},
    ]
    asked = [
        {"messages": [user(PROMPTS[i % len(PROMPTS)])], "max_tokens": 48} | wish
        for i, wish in enumerate(wishes)
    ]
    history: list[Json] = [{"role": "system", "content": SYSTEM}]
    for turn in range(4):
        history = [*history, user(f"Write rule_{turn + 1}.")]
        asked.append({"messages": history, "max_tokens": 32, "seed": 30 + turn})
        answer = f"def rule_{turn + 1}(x):\n    return x + {turn + 1}"
        history = [*history, {"role": "assistant", "content": answer}]
    called: Json = {"id": "call_1", "type": "function"}
    called["function"] = {"name": "store", "arguments": '{"name":"a","size":1,"kind":"set"}'}
    loop = [user("Store a."), {"role": "assistant", "content": None, "tool_calls": [called]}]
    loop.append({"role": "tool", "tool_call_id": "call_1", "content": "stored"})
    asked.append({"messages": loop, "tools": tool, "seed": 40, "max_tokens": 40})
    begun = [user("Sort."), {"role": "assistant", "content": "def sort(items):\n    return"}]
    asked.append({"messages": begun, "continue_final_message": True, "max_tokens": 24, "seed": 41})
    asked[-1]["add_generation_prompt"] = False
    edit = {"messages": [user(f"Rename mean:\n{CODE}")], "max_tokens": 64, "seed": 42}
    asked.append(edit | {"prediction": {"type": "content", "content": CODE}})
    return [Asked(CHAT, body) for body in asked]


def _texts() -> list[Asked]:
    wishes: list[Json] = [
        {"temperature": 0},
        {"temperature": 0, "max_tokens": 160},
        {"seed": 1, "temperature": 1.0},
        {"seed": 2, "n": 3},
        {"seed": 3, "logprobs": 5},
        {"seed": 4, "prompt": ["import os", "def main():"]},
        {"seed": 5, "prompt": [336, 285, 310, 28]},
        {"seed": 6, "echo": True, "logprobs": 2, "max_tokens": 8},
        {"prompt": CODE, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0},
        {"seed": 7, "guided_regex": "(ab|cd){3,9}"},
        {"seed": 8, "structured_outputs": {"grammar": 'start: "x" ("," /[0-9]/)+ ";"'}},
        {"seed": 9, "guided_json": SCHEMA, "max_tokens": 80},
        {"seed": 10, "stop": ["def"], "include_stop_str_in_output": True},
        {"seed": 11, "prompt": CODE * 4, "temperature": 1.0, "top_k": 20},
    ]
    each = enumerate(wishes)
    bodies = ({"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 40} | wish for i, wish in each)
    return [Asked(TEXT, body) for body in bodies]


def _messages() -> list[Asked]:
    tool = {"name": "store", "description": "Stores it.", "input_schema": SCHEMA, "strict": True}
    wishes: list[Json] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "system": SYSTEM},
        {"seed": 3, "system": [{"type": "text", "text": SYSTEM}], "max_tokens": 64},
        {"seed": 4, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 96},
        {"seed": 5, "tools": [tool]},
        {"seed": 6, "thinking": {"type": "enabled", "budget_tokens": 16}},
        {"seed": 7, "stop_sequences": ["\n\n", ":"]},
        {"seed": 8, "output_format": {"type": "json_schema", "schema": SCHEMA}, "max_tokens": 96},
        {"seed": 9, "temperature": 1.0, "top_k": 40, "max_tokens": 100},
    ]
    model: Json = {"model": "claude-any"}
    return [
        Asked(MESSAGES, model | {"messages": [user(PROMPTS[i % 6])], "max_tokens": 40} | wish)
        for i, wish in enumerate(wishes)
    ]


def _responses() -> list[Asked]:
    tool = {"type": "function"} | _function(True)
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    wishes: list[Json] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "instructions": SYSTEM},
        {"seed": 3, "tools": [tool], "tool_choice": "required", "max_output_tokens": 96},
        {"seed": 4, "text": {"format": form}, "max_output_tokens": 96},
        {"seed": 5, "reasoning": {"effort": "high"}, "thinking_token_budget": 8},
        {
            "seed": 6,
            "input": [user("Sort."), {"role": "assistant", "content": "How?"}, user("Up.")],
        },
        {"seed": 7, "temperature": 1.1, "max_output_tokens": 90},
    ]
    return [
        Asked(RESPONSES, {"model": "mini", "input": PROMPTS[i % 6], "max_output_tokens": 40} | wish)
        for i, wish in enumerate(wishes)
    ]


def fresh(number: int) -> Asked:
    """A request that nobody sent before: a long prompt, and a grammar of its own."""
    name = f"field_{number:012x}"
    properties = {name: {"type": "integer"}, "done": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [name, "done"]}
    schema |= {"additionalProperties": False}
    prompt = f"# {name}\n{SYSTEM}\nWrite {name} down."
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"messages": [user(prompt)], "response_format": form, "max_tokens": 64}
    return Asked(CHAT, body | {"seed": number})


MISTAKES = (
    Asked(CHAT, {"messages": []}),
    Asked(CHAT, {"messages": [user("x")], "temperature": -1}),
    Asked(CHAT, {"messages": [user("x")], "surprise": True}),
    Asked(CHAT, {"messages": [user("x " * 5000)], "max_tokens": 8}),
    Asked(CHAT, {"messages": [user("x")], "tool_choice": "required"}),
    Asked(CHAT, {"messages": [user("x")], "speculative": {"drafter": "unknown"}}),
    Asked(CHAT, {"messages": [user("x")], "structured_outputs": {"regex": "(["}}),
    Asked(TEXT, {"prompt": ""}),
    Asked(TEXT, {"prompt": [10**9], "max_tokens": 4}),
    Asked(TEXT, {"prompt": "x", "guided_json": {"not": {"type": "string"}}}),
    Asked(MESSAGES, {"model": "x", "messages": [user("x")]}),
    Asked(MESSAGES, {"model": "x", "max_tokens": 4, "messages": [{"role": "x", "content": ""}]}),
    Asked(RESPONSES, {"model": "mini", "input": []}),
    Asked(RESPONSES, {"model": "mini", "input": "x", "previous_response_id": "resp_1"}),
    Asked("/v1/nothing", {}),
)
