"""Names that users type or read by machine: options, wire names, metrics, spans, recipes, exports.

python -m tests.public_names    # writes tests/data/public_names.json anew: names may be added
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from drafters.eagle3 import config_json
from drafters.eagle3.spec import HeadSpec
from serve.anthropic.schema import MessagesRequest
from serve.chat_schema import ChatRequest
from serve.responses.schema import ResponsesRequest
from serve.schema import CompletionRequest
from specdec.cli import COMMANDS, app
from targets.backend import BACKENDS
from tests.support.places import ROOT
from tests.support.serving import ServedTarget, serving
from training.recipe import Recipe

FILE = ROOT / "tests" / "data" / "public_names.json"
BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)


def names() -> dict[str, list[str]]:
    """Kinds of names -> the names, sorted."""
    found: dict[str, Iterable[str]] = {"backends": BACKENDS, "metrics": metrics()}
    traces = (ROOT / "serve" / "traces.py").read_text()
    found["span attributes"] = re.findall(r'"([a-z_]+(?:\.[a-z_]+)+)"', traces)
    for command in COMMANDS:
        found[f"options of {command}"] = options(command)
    for body in BODIES:
        found[f"fields of {body.__name__}"] = wire_names(body)
    found["keys of recipes"] = [field.name for field in fields(Recipe)]
    for file in sorted((ROOT / "configs").glob("*.toml")):
        found[f"keys of {file.name}"] = keys(tomllib.loads(file.read_text()))
    spec = HeadSpec(16, 16, 2, 1, 8, 64, 32, (0, 2, 4), 128)
    found["keys of a flat head"] = keys(config_json.flat_config(spec, (1,)))
    speculators = config_json.speculators_config(spec, (1,), "org/name", ["X"], 3)
    found["keys of a speculators head"] = keys(speculators)
    return {kind: sorted(set(own)) for kind, own in sorted(found.items())}


def options(command: str) -> Iterator[str]:
    """Long options of a command."""
    for argument in app[command].assemble_argument_collection():
        yield from (name for name in argument.names if name.startswith("--"))


def wire_names(body: type[BaseModel]) -> Iterator[str]:
    for name, field in body.model_fields.items():
        yield field.alias or name


def metrics() -> list[str]:
    with serving(ServedTarget(slots=1)) as server:
        for _ in range(2):  # what the engine counts after a reply is there with the next one
            server.post("completions", model="fake", prompt="a", max_tokens=2)
        return [name.partition("{")[0] for name in server.metrics()]


def keys(value: Any) -> Iterator[str]:
    """Of a JSON document, those of all its objects."""
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from keys(inner)


if __name__ == "__main__":
    FILE.write_text(json.dumps(names(), indent=1) + "\n")
