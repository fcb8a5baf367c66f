"""An MCP server over standard input and output with one tool, `search`, as agents start it."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "search",
    "description": "Searches the notes",
    "inputSchema": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        told = {"name": "notes", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": told}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = f"found: {params['arguments']['query']} lies under the mat"
        return {"content": [{"type": "text", "text": text}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:  # the others are notifications
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
