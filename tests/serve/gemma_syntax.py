"""JSON values as Gemma 4's chat template writes them."""

from __future__ import annotations

import json


def gemma_value(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            keys = sorted(value, key=str.lower)
            return "{" + ",".join(f"{key}:{gemma_value(value[key])}" for key in keys) + "}"
        case list():
            return "[" + ",".join(map(gemma_value, value)) + "]"
        case _:
            return json.dumps(value)
