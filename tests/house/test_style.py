"""Rules of style that ruff does not have, over every Python file of the repository."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.places import ROOT


def python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The line and the rule of each fault."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if _is_packed(node):
            yield node.lineno, "a literal is unpacked where its elements could stand"
        if _is_named_lambda(node):
            yield node.lineno, "a lambda is bound to a name: write a function"
        if _is_import_of_tests(node):
            yield node.lineno, "an import of a test module: what tests share lies in helpers"
    for node in tree.body:
        if _is_tuple_of_constants(node):
            yield node.lineno, "several constants in one assignment: one line each"


def _is_packed(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set)


def _is_named_lambda(node: ast.AST) -> bool:
    """An assignment of a lambda to a name. An annotated one may be a dataclass's default."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Lambda)
        and any(isinstance(target, ast.Name) for target in node.targets)
    )


def _is_import_of_tests(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(
        name.startswith("test_") for name in (node.module or "").split(".")
    )


def _is_tuple_of_constants(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Tuple)
        and sum(isinstance(name, ast.Name) and name.id.isupper() for name in target.elts) > 1
        for target in node.targets
    )


def test_sources_keep_the_rules():
    files = python_files()
    assert len(files) > 500, "git does not list the repository"
    found = [
        f"{file.relative_to(ROOT)}:{line}: {rule}"
        for file in files
        for line, rule in faults(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_a_fault_of_each_kind_is_found():
    bad = "\n".join(
        (
            "call(*(a, b), c)",
            "items = [*(a, b), *[c]]",
            "names = {*('a', 'b')}",
            "double = lambda x: 2 * x",
            "ROWS, COLUMNS = 3, 4",
            "from tests.serve.test_serve import TEXT",
        )
    )
    assert sorted(line for line, _ in faults(bad)) == [1, 2, 2, 3, 4, 5, 6]
    good = "\n".join(
        (
            "call(*names, *map(f, (a, b)), key=lambda x: x)",
            "first, *rest = items",
            "[*(f(x) for x in items)]",
            "hooks.key = lambda x: x",
            "rows, columns = SHAPE = 3, 4",
            "(ONLY,) = names",
            "from tests.support import tiny",
        )
    )
    assert not list(faults(good))
