"""Chats made from the source itself, so that the chat endpoint answers with code, and stops.

user: a request for one function of the file, by signature or docstring; model: that function.
"""

import ast
import hashlib
import random
import textwrap
import warnings

FUNCTION_LINES = (4, 60)
DOCSTRING_CHARACTERS = (20, 700)
MOST_TURNS = 3  # user-model pairs per chat

REQUESTS = (
    "Write a Python function `{signature}`. {summary}",
    "{summary}",
    "Implement `{name}` in Python: {summary}",
    "Complete this function.\n\n{header}",
    "{header}",
    "Write the Python function that this docstring describes.\n\n{docstring}",
)


def requests_and_answers(text: str) -> list[dict[str, str]]:
    """One {name, signature, summary, docstring, header, code} per documented function of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = text.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node)
        size = node.end_lineno - node.lineno + 1
        if docstring is None or not FUNCTION_LINES[0] <= size <= FUNCTION_LINES[1]:
            continue
        if not DOCSTRING_CHARACTERS[0] <= len(docstring) <= DOCSTRING_CHARACTERS[1]:
            continue
        if node.body[0].end_lineno == node.end_lineno:
            continue  # nothing but a docstring
        found.append(_describe(node, docstring, lines))
    return found


def _describe(node: ast.FunctionDef, docstring: str, lines: list[str]) -> dict[str, str]:
    code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    head_size = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
    summary = " ".join(docstring.split("\n\n")[0].split())
    return {
        "name": node.name,
        "signature": f"{node.name}({ast.unparse(node.args)})",
        "summary": summary,
        "docstring": docstring,
        "header": "\n".join(code.splitlines()[:head_size]),
        "code": code,
    }


def chats_of(text: str, seed: int) -> list[list[dict[str, str]]]:
    """Message lists made from one file; the same file and seed give the same chats."""
    digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
    chance = random.Random(int.from_bytes(digest[:8], "big"))
    functions = requests_and_answers(text)
    chance.shuffle(functions)
    chats = []
    while functions:
        turns = min(len(functions), chance.choice((1, 1, 1, 2, MOST_TURNS)))
        messages: list[dict[str, str]] = []
        for function in functions[:turns]:
            request = chance.choice(REQUESTS).format(**function)
            messages.append({"role": "user", "content": request})
            messages.append({"role": "assistant", "content": function["code"]})
        chats.append(messages)
        functions = functions[turns:]
    return chats
