"""Sentences of the repository: of comments, docstrings, `--help` and error texts, in Python and in
kernels."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("specdec", "drafters", "serve", "targets", "training", "recipes", "tools", "tests")
"""Python and CUDA sources, from the repository's root."""
END = re.compile(r"(?<=[.!?:;])\s+(?=[\"'`(A-Z0-9])|\n\s*\n|\n\s*[-*] ")
"""Between two sentences."""
WORDS = 3
"""A sentence has at least so many."""
NAMED = re.compile(r"`[^`]*`")
"""Names of code in a sentence, which count as a word each."""
LINE_COMMENT = re.compile(r"//(.*)$")


class Sentence(NamedTuple):
    file: Path
    line: int
    """Of the text that it stands in: where that begins."""
    text: str


def sentences(root: Path) -> Iterator[Sentence]:
    for file, line, text in texts(root):
        for part in END.split(text):
            plain = " ".join(NAMED.sub("X", part).split())
            if len(plain.split()) >= WORDS:
                yield Sentence(file, line, plain)


def texts(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Comments, docstrings and messages: file, line, and the text with its line breaks."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix == ".py":
                yield from ((file, *found) for found in _of_python(file.read_text()))
            elif file.suffix in (".cu", ".cuh", ".h"):
                yield from ((file, *found) for found in _of_cuda(file.read_text()))


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    """Comments, and all strings that are prose: docstrings, help, messages."""
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value
        elif isinstance(node, ast.Call):
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                text = _message(value)
                if text.count(" ") >= WORDS:
                    yield value.lineno, text


def _message(node: ast.expr) -> str:
    """The text of a string or an f-string; its values count as a word each."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            part if isinstance(part, ast.Constant) else ast.Constant("X") for part in node.values
        )
        return "".join(map(_message, parts))
    return ""


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Lines that follow one another as one text."""
    block, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if last is not None and token.start[0] != last + 1:
            yield last, "\n".join(block)
            block = []
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    if last is not None:
        yield last, "\n".join(block)


def _of_cuda(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        found = LINE_COMMENT.search(line)
        if found:
            block.append(found[1])
            if line.strip().startswith("//"):
                continue
        if block:
            yield number, "\n".join(block)
        block = []
