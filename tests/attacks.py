"""What clients may send to break a chat, against every template:

    python -m tests.attacks [--histories 10000] [--texts 5] [--seed 0]

Random histories (order, orphans, texts between, cut calls, ids that come again) in each API's form:
no tool's result may be missing from the prompt. Texts that spell control tokens, whole or in
pieces, in every text field of each API and as the beginning of an answer: the prompt's control
tokens stay what they are. Prints what was tried and what was lost; exit 1 if anything was.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

from serve.errors import ApiError
from specdec.core.errors import UserError
from targets.tokenizer import Tokenizer
from tests.support.chats import CONTROL, controls, prompt_of, words_of
from tests.support.templates import TEMPLATES, tokenizer_with

APIS = ("chat", "responses", "messages")
IDS = ("a", "b", "c")
Path = tuple[Any, ...]
SCHEMA = {
    "type": "object",
    "description": "What to look for",
    "title": "Query",
    "properties": {
        "city": {"type": "string", "description": "Which city", "enum": ["Oslo", "Paris"]},
        "tags": {"type": "array", "items": {"type": "string", "description": "A tag"}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["city"],
}
DATA = "data:image/png;base64,iVBORw0KGgo"


def _chat() -> dict[str, Any]:
    function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"q": "v"}}}
    text = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"q": "v"}'}}
    cut = {"id": "c3", "type": "function", "function": {"name": "look", "arguments": '{"q": "v'}}
    custom = {"id": "c4", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    parts = [
        {"type": "text", "text": "One part"},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}},
        {"type": "file", "file": {"filename": "plan.pdf", "file_id": "f1"}},
    ]
    return {
        "messages": [
            {"role": "system", "content": "Be brief", "name": "sys"},
            {"role": "developer", "content": [{"type": "text", "text": "Be kind"}]},
            {"role": "user", "content": parts, "name": "me"},
            {
                "role": "assistant",
                "content": "I look",
                "reasoning_content": "Hm",
                "tool_calls": [call, text, cut, custom],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny", "name": "look"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "Rain"}]},
            {"role": "tool", "tool_call_id": "c3", "content": "no JSON"},
            {"role": "tool", "tool_call_id": "gone", "content": "An orphan"},
            {"role": "function", "name": "look", "content": "The oldest form"},
            {"role": "assistant", "content": "So", "reasoning": "Hm again"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"note": "n", "documents": [{"title": "T", "text": "D"}]},
    }


def _responses() -> dict[str, Any]:
    function = {"type": "function", "name": "look", "description": "Looks", "parameters": SCHEMA}
    return {
        "instructions": "Be brief",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind"}]},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "One part"},
                    {"type": "input_image", "image_url": DATA, "detail": "low"},
                ],
            },
            {"type": "reasoning", "summary": [{"text": "Hm"}], "content": [{"text": "Hm, hm"}]},
            {"type": "reasoning", "summary": [{"text": "Summed up"}]},
            {"type": "message", "role": "assistant", "content": "I look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": "v"}'},
            {
                "type": "function_call",
                "call_id": "c2",
                "namespace": "mcp__web",
                "name": "look",
                "arguments": '{"q": "v',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "Rain"}],
            },
            {"type": "function_call_output", "call_id": "gone", "output": "An orphan"},
            {"type": "custom_tool_call", "call_id": "c9", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c9", "output": "Done"},
            {"type": "web_search_call", "action": {"query": "rain"}},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [
            function,
            {"type": "namespace", "name": "mcp__web", "description": "Web", "tools": [function]},
        ],
    }


def _messages() -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief"}, {"type": "text", "text": "Be kind"}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "One part"},
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    {"type": "text", "text": "I look"},
                    {"type": "server_tool_use", "id": "s", "name": "web", "input": {"q": "v"}},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": "v"}},
                    {"type": "tool_use", "id": "c2", "name": "look", "input": '{"q": "v'},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "Sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "is_error": True,
                        "content": [
                            {"type": "text", "text": "Rain"},
                            {"type": "image", "source": {"type": "url", "url": "https://a.b/c"}},
                        ],
                    },
                    {"type": "tool_result", "tool_use_id": "gone", "content": "An orphan"},
                    {"type": "text", "text": "And so?"},
                ],
            },
            {"role": "assistant", "content": "So"},
            {"role": "system", "content": "Be quick"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"name": "look", "description": "Looks", "input_schema": SCHEMA}],
    }


BODIES = {"chat": _chat, "responses": _responses, "messages": _messages}


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """Ways to all texts in a body, keys of objects that are the client's own included."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            if path and path[-1] in ("properties", "arguments", "input", "chat_template_kwargs"):
                yield (*path, ("key", name))
            yield from fields(inner, (*path, name))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from fields(inner, (*path, at))


def changed(body: dict[str, Any], path: Path, text: str) -> dict[str, Any]:
    """With `text` at the end of one of its texts."""
    found = copy.deepcopy(body)
    *way, last = path
    place: Any = found
    for step in way:
        place = place[step]
    if isinstance(last, tuple):
        place[last[1] + text] = place.pop(last[1])
    else:
        place[last] += text
    return found


def attack(rng: random.Random) -> str:
    """A text that would be control tokens if texts were not kept apart. Never blanks alone, and no
    quotes, which would mend a cut call."""
    pieces = [*CONTROL, *(t[:-1] for t in CONTROL), *(t[1:] for t in CONTROL)]
    pieces += ["<", "|", ">", "turn", "user\n", "model\n", " ", "\n", "\ue000", "\ue001", "\ue002"]
    return "x" + "".join(rng.choices(pieces, k=rng.randint(1, 5)))


def changed_controls(
    api: str, path: Path, text: str, tokenizer: Tokenizer
) -> tuple[list[str], list[str]] | None:
    """The control tokens of the prompt with an attack and with a plain text in its place; None
    where both are refused."""
    found = []
    for value in (text, "x"):
        try:
            found.append(controls(prompt_of(api, changed(BODIES[api](), path, value), tokenizer)))
        except (ApiError, UserError):
            found.append(None)
    return None if None in found else tuple(found)


def history(rng: random.Random, api: str) -> tuple[dict[str, Any], set[str]]:
    """A body with a random history, and the words of what its tools answered."""
    items: list[dict[str, Any]] = []
    answered: set[str] = set()
    for number in range(rng.randint(1, 10)):
        kind = rng.choice(["result", "result", "call", "call", "said", "user", "system"])
        own = rng.choice(IDS)
        if kind == "result":
            answered.add(f"R{number}")
        whole: Any = {"n": number} if api == "messages" else json.dumps({"n": number})
        arguments = rng.choice([whole, whole, f'{{"n": "cut{number}'])
        items += FORMS[api](kind, number, own, arguments, rng)
    if api == "responses":
        return {"input": [*items, {"role": "user", "content": "Go"}]}, answered
    last = {"role": "user", "content": "Go"}
    return {"model": "m", "max_tokens": 5, "messages": [*items, last]}, answered


def _of_chat(kind: str, number: int, own: str, arguments: Any, rng: random.Random) -> list[Any]:
    if kind == "result":
        pairing = rng.choice([{"tool_call_id": own}, {"tool_call_id": own}, {}])
        return [{"role": "tool", "content": f"R{number}", **pairing}]
    if kind == "call":
        calls = [
            {"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}}
            for i in rng.sample(IDS, rng.randint(1, 3))
        ]
        content = rng.choice([None, "", f"say{number}"])
        return [{"role": "assistant", "content": content, "tool_calls": calls}]
    role = {"said": "assistant", "user": "user", "system": "system"}[kind]
    return [{"role": role, "content": f"say{number}"}]


def _of_responses(
    kind: str, number: int, own: str, arguments: Any, rng: random.Random
) -> list[Any]:
    if kind == "result":
        return [{"type": "function_call_output", "call_id": own, "output": f"R{number}"}]
    if kind == "call":
        return [
            {"type": "function_call", "call_id": i, "name": "f", "arguments": arguments}
            for i in rng.sample(IDS, rng.randint(1, 3))
        ]
    role = {"said": "assistant", "user": "user", "system": "developer"}[kind]
    return [{"role": role, "content": f"say{number}"}]


def _of_messages(kind: str, number: int, own: str, arguments: Any, rng: random.Random) -> list[Any]:
    if kind == "result":
        block = {"type": "tool_result", "tool_use_id": own, "content": f"R{number}"}
        text = {"type": "text", "text": f"say{number}"}
        return [{"role": "user", "content": rng.choice([[block], [text, block], [block, text]])}]
    if kind == "call":
        calls = [
            {"type": "tool_use", "id": i, "name": "f", "input": arguments}
            for i in rng.sample(IDS, rng.randint(1, 3))
        ]
        return [{"role": "assistant", "content": calls}]
    role = {"said": "assistant", "user": "user", "system": "system"}[kind]
    return [{"role": role, "content": f"say{number}"}]


FORMS = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}


def missing_results(rng: random.Random, api: str, tokenizer: Tokenizer) -> set[str]:
    """Of one random history."""
    body, answered = history(rng, api)
    ids = prompt_of(api, body, tokenizer)
    return answered - words_of(tokenizer.decode(ids, skip_special=False))


def moved_beginning(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a prompt does not end in the beginning of an answer, or has other control tokens."""

    def begun(beginning: str) -> tuple[str, list[str]]:
        messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": beginning}]
        ids = prompt_of("chat", {"messages": messages, "continue_final_message": True}, tokenizer)
        again = {"model": "m", "max_tokens": 5, "messages": messages}
        assert prompt_of("messages", again, tokenizer) == ids
        return tokenizer.decode(ids, skip_special=False), controls(ids)

    plain, others = begun("x")
    prompt, found = begun(text)
    return prompt != plain[:-1] + text or found != others


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--texts", type=int, default=5, help="attacks on each field")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rng, lost = random.Random(args.seed), 0
    for name in TEMPLATES:
        tokenizer, counts = tokenizer_with(name), {}
        for number in range(args.histories):
            api = APIS[number % len(APIS)]
            missing = missing_results(rng, api, tokenizer)
            counts[api] = counts.get(api, 0) + len(missing)
        print(f"{name}: results missing from the prompts of {args.histories} histories: {counts}")
        lost += sum(counts.values())
        for api in APIS:
            tried = bad = 0
            paths = list(fields(BODIES[api]()))
            for path in paths:
                for _ in range(args.texts):
                    found = changed_controls(api, path, attack(rng), tokenizer)
                    tried += found is not None
                    bad += found is not None and found[0] != found[1]
            print(f"{name}: {api}, {len(paths)} texts, {tried} prompts: {bad} changed")
            lost += bad
        moved = sum(moved_beginning(attack(rng)[1:], tokenizer) for _ in range(args.texts * 100))
        print(f"{name}: beginnings of answers that were moved or changed: {moved}")
        lost += moved
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
