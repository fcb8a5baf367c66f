"""Output items of a response, one per block."""

from __future__ import annotations

from serve.blocks import Block, Kind
from serve.replies import Json
from serve.responses.namespaces import Names
from serve.responses.thoughts import sealed as seal

PREFIXES: dict[Kind, str] = {"thought": "rs", "text": "msg", "call": "fc"}


def item_id(response_id: str, block: Block) -> str:
    return f"{PREFIXES[block.kind]}_{_own(response_id, block)}"


def item_of(response_id: str, block: Block, status: str, sealed: bool, names: Names) -> Json:
    """status: in_progress (an item that begins is empty), completed or incomplete. sealed: whether
    a thought comes as `encrypted_content`, too."""
    begins = status == "in_progress"
    item: Json = {"id": item_id(response_id, block), "status": status}
    parts = [] if begins else [part_of(block.kind, block.text)]
    match block.kind:
        case "thought":
            item |= {"type": "reasoning", "summary": [], "content": parts}
            return item | ({"encrypted_content": seal(block.text)} if sealed else {})
        case "text":
            return item | {"type": "message", "role": "assistant", "content": parts}
        case "call":
            call = {"type": "function_call", "arguments": block.text} | called(block, names)
            return item | call | {"call_id": f"call_{_own(response_id, block)}"}


def called(block: Block, names: Names) -> Json:
    """The name, and the namespace if any, of the called function."""
    namespace, name = names.own(block.name)
    return {"name": name} | ({} if namespace is None else {"namespace": namespace})


def part_of(kind: Kind, text: str) -> Json:
    """The content part of a thought or a text."""
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _own(response_id: str, block: Block) -> str:
    return f"{response_id.removeprefix('resp_')[:24]}{block.index:02d}"
