"""Codex and Claude Code themselves: each reads a file through its own tool and reports its content.

Run where they are installed (`npm install @openai/codex @anthropic-ai/claude-code`), with their
commands on the PATH: pytest -m agents
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import scripted

pytestmark = pytest.mark.agents
CONTEXT = 65_536
"""Claude Code's own prompt has 26,000 of mini's tokens."""
MCP = str(Path(__file__).parent / "mcp_tool.py")
ASK = "Where is the key?"
FOUND = "It lies under the mat."
SEARCH = '{}{{query:<|"|>the key<|"|>}}'
LOOK = "Let me look.<|tool_call>call:{}<tool_call|><|tool_response>"


def agent(name: str, home: Path, *arguments: str, **variables: str) -> str:
    """Its output, from a home of its own: it finds no settings and leaves none."""
    command = shutil.which(name)
    if command is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [command, *arguments],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def note(tmp_path: Path) -> Path:
    file = tmp_path / "note.txt"
    file.write_text("hello from a file\n")
    return file


def test_claude_code_runs_a_turn_with_a_tool(note):
    call = LOOK.format(f'Read{{file_path:<|"|>{note}<|"|>}}')
    with scripted(call, then="It says hello.", max_len=CONTEXT) as server:
        said = agent(
            "claude",
            note.parent,
            "-p",
            "What does note.txt say?",
            "--output-format",
            "json",
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    result = json.loads(said)
    assert (result["is_error"], result["result"]) == (False, "It says hello.")
    assert result["num_turns"] == 2 and result["usage"]["output_tokens"] > 10
    assert result["permission_denials"] == []


def test_codex_runs_a_turn_with_a_tool(note):
    call = LOOK.format('exec_command{cmd:<|"|>cat note.txt<|"|>}')
    with scripted(call, then="It says hello.", max_len=CONTEXT) as server:
        provider = f'{{name="specdec",base_url="{server.url}/v1",wire_api="responses"}}'
        said = agent(
            "codex",
            note.parent,
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--sandbox",
            "read-only",
            "-m",
            "mini",
            "-c",
            "model_provider=specdec",
            "-c",
            f"model_providers.specdec={provider}",
            "What does note.txt say?",
        )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    told = [item["text"] for item in done if item["type"] == "agent_message"]
    assert told == ["Let me look.", "It says hello."]
    (ran,) = [item for item in done if item["type"] == "command_execution"]
    assert "hello from a file" in ran["aggregated_output"] and ran["exit_code"] == 0
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 10


def test_claude_code_calls_an_mcp_tool(tmp_path):
    config = tmp_path / "mcp.json"
    config.write_text(
        json.dumps({"mcpServers": {"notes": {"command": sys.executable, "args": [MCP]}}})
    )
    call = LOOK.format(SEARCH.format("mcp__notes__search"))
    with scripted(call, then=FOUND, template="forward_scan", max_len=CONTEXT) as server:
        said = agent(
            "claude",
            tmp_path,
            "-p",
            ASK,
            "--output-format",
            "json",
            "--strict-mcp-config",
            "--mcp-config",
            str(config),
            "--allowedTools",
            "mcp__notes__search",
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    result = json.loads(said)
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, FOUND, 2)


def test_codex_calls_an_mcp_tool_in_its_namespace(tmp_path):
    call = LOOK.format(SEARCH.format("mcp__notes.search"))
    with scripted(call, then=FOUND, template="forward_scan", max_len=CONTEXT) as server:
        provider = f'{{name="specdec",base_url="{server.url}/v1",wire_api="responses"}}'
        notes = f'{{command="{sys.executable}",args=["{MCP}"]}}'
        said = agent(
            "codex",
            tmp_path,
            "exec",
            "--json",
            "--skip-git-repo-check",
            "-m",
            "mini",
            "--dangerously-bypass-approvals-and-sandbox",  # so that it calls without confirmation
            "-c",
            "model_provider=specdec",
            "-c",
            f"model_providers.specdec={provider}",
            "-c",
            f"mcp_servers.notes={notes}",
            ASK,
        )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    (ran,) = [item for item in done if item["type"] == "mcp_tool_call"]
    assert (ran["server"], ran["tool"], ran["status"]) == ("notes", "search", "completed")
    assert ran["arguments"] == {"query": "the key"} and "under the mat" in json.dumps(ran["result"])
    assert [i["text"] for i in done if i["type"] == "agent_message"][-1] == FOUND
