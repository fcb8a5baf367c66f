"""What Python hands to a kernel is what the kernel reads: every ctypes Structure has the fields of
the C struct that it mirrors, by name, kind and order. To see it needs no compiler and no GPU."""

from __future__ import annotations

import importlib
import pkgutil
import re
from ctypes import Array, Structure, c_float, c_int, c_void_p
from pathlib import Path

import pytest

import drafters.assistant.cuda
import drafters.eagle3.cuda
import drafters.lookup
import targets.cuda

PACKAGES = (targets.cuda, drafters.assistant.cuda, drafters.eagle3.cuda, drafters.lookup)
"""Packages that launch kernels."""
FOLDERS = [Path(p.__file__ or "").parent / n for p in PACKAGES for n in ("kernels", "sources")]
SOURCES = {file.name: file for folder in FOLDERS for file in folder.glob("*.cu*")}
MIRRORS = {
    "attention._AttentionJob": "attention.cuh Job",
    "sampler._SampleJob": "sample.cu Job",
    "candidates._ScreenJob": "screen.cu Job",
    "candidates._RescoreJob": "rescore.cu Job",
    "kernels._Pair": "inputs.cu Pair",
    "kernels._Beside": "steps.cu Beside",
    "kernels._Ordered": "ordered.cu Job",
    "experts._ExpertsJob": "experts.cuh Job",
    "experts._GroupedJob": "grouped.cu Job",
    "experts._Pick": "route.cu Pick",
    "experts._Router": "route.cu Router",
    "kernels.Embed": "hidden.cuh Embed",
    "norms._Mixture": "norm.cuh Mixture",
    "norms._Others": "norm.cuh Others",
    "norms._AddNorm": "norm.cuh AddNorm",
    "prefill_kernels._Place": "prefill_attention.cu Place",
    "exchange.Exchange": "exchange.cuh Exchange",
    "gemm._GemmJob": "linear.cuh Job",
    "untile._Job": "untile.cu Job",
    "w8a8.KGroups": "narrow.cuh Groups",
    "w8a8._W8A8Job": "w8a8.cu Job",
}
"""Each Structure, and where the struct that it mirrors is declared."""
KINDS = {c_void_p: "*", c_int: "int", c_float: "float"}
DECLARATION = re.compile(r"(?:const )?(?P<kind>(?:long )?\w+)\s*(?P<names>[\w\s*,\[\]]+);")


def structures() -> dict[str, type[Structure]]:
    """All that the CUDA target and the drafters define, by module and name."""
    names = [package.__name__ + "." for package in PACKAGES]
    for package, name in zip(PACKAGES, names, strict=True):
        for module in pkgutil.iter_modules(package.__path__, name):
            importlib.import_module(module.name)
    found = [c for c in Structure.__subclasses__() if c.__module__.startswith(tuple(names))]
    return {f"{c.__module__.rpartition('.')[2]}.{c.__name__}": c for c in found}


def declared(text: str, name: str) -> list[tuple[str, str]]:
    """(name, kind) of a struct's fields in order; every pointer is of kind `*`, an array has a
    bracket behind its kind."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    (body,) = re.findall(rf"^struct {name} {{ *\n(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    fields = []
    for line in body.partition("__device__")[0].splitlines():  # functions come after the fields
        if not line.strip() or line.startswith("#"):  # what not all variants have is the last
            continue
        found = DECLARATION.fullmatch(line.strip())
        assert found, f"{name}: what is {line!r}?"
        for word in found["names"].split(","):
            kind = "*" if "*" in word else found["kind"]
            field, many, _ = word.strip(" *").partition("[")
            fields.append((field, kind + many))
    return fields


def mirrored(structure: type[Structure]) -> list[tuple[str, str]]:
    fields = [field[:2] for field in structure._fields_]
    return [(name, kind_of(kind)) for name, kind in fields]


def kind_of(kind: type) -> str:
    """Of an array with a bracket behind it."""
    if issubclass(kind, Array):
        return kind_of(kind._type_) + "["
    return KINDS.get(kind, kind.__name__)


def test_every_structure_is_compared() -> None:
    assert structures().keys() == MIRRORS.keys()


@pytest.mark.parametrize("name", MIRRORS)
def test_a_structure_has_the_fields_of_its_struct(name) -> None:
    file, struct = MIRRORS[name].split()
    assert mirrored(structures()[name]) == declared(SOURCES[file].read_text(), struct)


def test_what_is_reordered_renamed_or_retyped_is_seen() -> None:
    text = "struct Job {\n  const float *a, *b;  // [n]\n  long long* c;\n  int d;\n};\n"
    assert declared(text, "Job") == [("a", "*"), ("b", "*"), ("c", "*"), ("d", "int")]
    assert declared(text.replace("int", "long long"), "Job")[-1] == ("d", "long long")
