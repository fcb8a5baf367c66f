"""What coding agents send: their tools, and recorded requests of clients."""

from __future__ import annotations

import json
from typing import Any

from tests.support.places import DATA

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema, "strict": True},
    }
    for name, text, schema in (("get_weather", "Of a city", WEATHER), ("add", "Sums", ADD))
]
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
CLIENTS = json.loads((DATA / "clients.json").read_text())
