"""Clients as their users have them, unmodified, against a started `specdec serve`:

    specdec serve --port 8123 --max-len 2048 &
    python3 docs/log/clients.py http://127.0.0.1:8123/v1     # with the clients installed

Each prints one line. Their versions are printed first.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = sys.argv[1]
os.environ["OPENAI_API_KEY"] = "none"
ROOT = URL.removesuffix("/v1")


def langchain() -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Sum(BaseModel):
        """Two numbers."""

        left: int = Field(ge=0, le=99)
        right: int = Field(ge=0, le=99)

    @tool
    def add(left: int, right: int) -> int:
        """Adds two numbers."""
        return left + right

    model = ChatOpenAI(model="mini", base_url=URL, max_tokens=200, seed=1, temperature=0)
    parsed = model.with_structured_output(Sum, method="json_schema").invoke("1 + 2")
    called = model.with_structured_output(Sum, method="function_calling").invoke("1 + 2")
    bound = model.bind_tools([add], tool_choice="required", strict=True).invoke("1 + 2")
    streamed = "".join(str(chunk.content) for chunk in model.stream("def f(x):"))
    assert isinstance(parsed, Sum) and isinstance(called, Sum) and streamed
    return f"{parsed!r}, {called!r}, calls {bound.tool_calls}"


def with_litellm() -> str:
    import litellm

    ask = {"model": "openai/mini", "api_base": URL, "messages": [{"role": "user", "content": "x"}]}
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    reply = litellm.completion(**ask, max_tokens=100, response_format=form)
    said = json.loads(reply.choices[0].message.content)
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    calls = litellm.completion(**ask, max_tokens=200, tools=tools, tool_choice="required")
    (call, *_) = calls.choices[0].message.tool_calls
    pieces = litellm.completion(**ask, max_tokens=20, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert said == {"a": "b"} and text
    return f"{said}, call {call.function.name}({call.function.arguments})"


def llm_command() -> str:
    with tempfile.TemporaryDirectory() as home:
        model = {"model_id": "mini", "api_base": URL, "supports_schema": True}
        listed = json.dumps([model | {"model_name": "mini", "supports_tools": True}])
        (Path(home) / "extra-openai-models.yaml").write_text(listed)
        environment = {**os.environ, "LLM_USER_PATH": home}
        base = [str(Path(sys.executable).parent / "llm"), "-m", "mini", "-o", "max_tokens", "60"]
        properties = {"a": {"enum": ["b"]}}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        schema = json.dumps(schema | {"required": ["a"]})
        said = []
        for more in (["--schema", schema], ["-T", "llm_time"], ["--no-stream"]):
            ran = subprocess.run(
                [*base, *more, "def f(x):"], env=environment, capture_output=True, text=True
            )
            assert ran.returncode == 0, ran.stderr
            said.append(ran.stdout.strip()[:60])
    assert json.loads(said[0]) == {"a": "b"}
    return repr(said)


def lm_eval() -> str:
    """A log-likelihood task of its own: which of two words ends a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"text": "def add(a, b):\n    return a", "choices": [" + b", " chair"], "gold": 0},
            {"text": "import", "choices": [" banana split", " os"], "gold": 1},
        ] * 4
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": "words",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "text",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
        (Path(folder) / "words.yaml").write_text(json.dumps(task))
        arguments = f"model=mini,base_url={URL}/completions,tokenizer_backend=remote,"
        arguments += f"num_concurrent=2,max_retries=1,base_url={URL}/completions"
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            arguments,
            "--tasks",
            "words",
            "--include_path",
            folder,
            "--output_path",
            folder,
        ]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
        (found,) = Path(folder).rglob("results*.json")
        accuracy = json.loads(found.read_text())["results"]["words"]["acc,none"]
    assert accuracy == 1.0
    return f"acc {accuracy} of {len(rows)}"


def main() -> None:
    names = ("openai", "langchain-openai", "litellm", "llm", "lm_eval")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    failed = 0
    for run in (langchain, with_litellm, llm_command, lm_eval):
        try:
            print(f"{run.__name__}: {run()}", flush=True)
        except Exception as problem:
            failed += 1
            print(f"{run.__name__}: FAILED {type(problem).__name__}: {problem}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
