"""Names in backticks, in comments, docstrings and guides, are names of things that exist."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.prose import LINE_COMMENT, texts
from tests.support.places import ROOT

QUOTED = re.compile(r"(?<![`\w])`([^`\s]+)`(?!`)")
"""A single word; longer quotations are commands, formulas and examples."""
NAME = re.compile(r"-{0,2}[A-Za-z_][\w-]*([./][\w*-]+)*(\(\))?/?")
"""What may be a path, a module, an identifier or an option."""
WORD = re.compile(r"[A-Za-z_]\w*")
CODE = (".py", ".cu", ".cuh", ".h", ".toml", ".json", ".yml", ".js", ".html", ".jinja", "")
HISTORY = ("CHANGELOG.md", "docs/log/", "docs/results/", "docs/decisions/")
"""Documents about the past, with the names of their time."""
OTHERS = frozenset(
    {
        "ANTHROPIC_AUTH_TOKEN",  # of Claude Code
        "OTEL_EXPORTER_OTLP_HEADERS",  # of OpenTelemetry's SDK
        "OTEL_RESOURCE_ATTRIBUTES",
        "InferenceService",  # of KServe
        "ServingRuntime",
        "storageUri",
        "emptyDir",  # of Kubernetes
        "consistent_hash",  # of nginx and Envoy
        "ray.serve.Application",
        "numpy.intp",  # of pickles and checkpoints
        "DimDynamic",
        "ReductionKernel",
        "HMMA",  # of CUDA: instructions and tools
        "LDS.128",
        "PREFERRED_SHARED_MEMORY_CARVEOUT",
        "cudaMemGetInfo",
        "ncu",
        "nvdisasm",
        "llama_eagle3.py",  # files of SpecForge and transformers
        "models/gemma4",
        "models/gemma4_assistant",
        "models/gemma4/modeling_gemma4.py",
        "specdec-gemma",  # the package
        "mini-eagle3",
        "drafters/repeat/__init__.py",  # the example of a guide
        "drafters/repeat/kind.py",
        "heldout.jsonl",  # what a command writes
        "rollback",  # what there is not
        "metrics.speculative",  # fields of answers
        "metrics.speculative_decoding",
        "-fno-gnu-unique",  # of g++
        "FP8-Dynamic",  # of llm-compressor and compressed-tensors
        "pack-quantized",
        "--toy-shift",  # of the tests' toy drafter
        "org/name-assistant",
        "vllm-router",
        "x-session-id",
        "server.f",  # an example
    }
)
"""Names of other projects and of examples."""
PRODUCT = ("specdec/", "drafters/", "serve/", "targets/", "training/")


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return tuple(name for name in listed.stdout.split("\n") if name)


@cache
def words_by_stem() -> dict[str, frozenset[str]]:
    """Identifiers and words of string literals, by the stem of the files that they are in; those of
    all files under ""."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in tracked():
        file = ROOT / name
        if file.suffix not in CODE or name.startswith("docs/") or not file.is_file():
            continue
        if file == Path(__file__):  # its examples name what does not exist
            continue
        words = set(WORD.findall(_code(file)))
        found[file.stem] |= words
        found[file.parent.name] |= words
        found[""] |= words
    return {stem: frozenset(words) for stem, words in found.items()}


@cache
def _code(file: Path) -> str:
    """A source without its comments and docstrings."""
    try:
        source = file.read_text()
    except UnicodeDecodeError:
        return ""
    if file.suffix in (".cu", ".cuh", ".h"):
        return LINE_COMMENT.sub("", source)
    if file.suffix != ".py":
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None),):
            if isinstance(body, list):
                body[:] = [part for part in body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def quoted() -> Iterator[tuple[str, str]]:
    """Each name in backticks, and the file that it stands in."""
    for file, _, text in texts(ROOT):
        yield from ((name, str(file.relative_to(ROOT))) for name in QUOTED.findall(text))
    for name in tracked():
        if name.endswith(".md") and not name.startswith(HISTORY):
            yield from ((found, name) for found in QUOTED.findall((ROOT / name).read_text()))


def exists(name: str, beside: str) -> bool:
    """Whether `name`, which stands in the file `beside`, is a path or a name in code."""
    if not NAME.fullmatch(name) or name in OTHERS or is_path(name, beside):
        return True
    if "-" in name:
        return is_option(name)
    *before, last = WORD.findall(name) or [""]
    words = words_by_stem()
    modules = [words[part] for part in before[-1:] if part in words]
    known = modules[0] if modules else words[""]
    return (last in known or hasattr(builtins, last)) and all(
        part in words[""] or part in words for part in before
    )


def is_option(name: str) -> bool:
    """Whether it is an option, a command or another name with dashes."""
    return name.strip("-").replace("-", "_") in product_words() or name in dashed_words()


@cache
def product_words() -> frozenset[str]:
    names = (name for name in tracked() if name.startswith(PRODUCT) and name.endswith(".py"))
    return frozenset(word for name in names for word in WORD.findall(_code(ROOT / name)))


@cache
def dashed_words() -> frozenset[str]:
    files = (ROOT / name for name in tracked() if not name.startswith(("docs/", "tests/")))
    files = (file for file in files if file.suffix in CODE and file.is_file())
    return frozenset(word for file in files for word in re.findall(r"[\w-]+", _code(file)))


def is_path(name: str, beside: str) -> bool:
    if "/" not in name and "." not in name:
        return False
    module = ROOT / name.replace(".", "/")
    if module.is_dir() or module.with_suffix(".py").is_file():
        return True
    places = (ROOT, (ROOT / beside).parent)
    return any(any(place.glob(name)) for place in places if not name.startswith("/")) or any(
        file.endswith(f"/{name}") for file in tracked()
    )


def test_every_name_in_backticks_exists():
    missing = {(name, file) for name, file in quoted() if not exists(name, file)}
    assert not missing, "\n".join(f"{file}: `{name}`" for name, file in sorted(missing))


def test_a_name_that_does_not_exist_is_found():
    assert exists("targets.checkpoint.Checkpoint", "tests/x.py")
    assert exists("--max-len", "README.md") and exists("specdec/core/cycle.py", "README.md")
    for name in (
        "layers.Reference",
        "skinny.py",
        "training.distil.FEATURES",
        "--surprised",
        "prefix_cache_of_nothing",
    ):
        assert not exists(name, "targets/cuda/ops.py"), name
