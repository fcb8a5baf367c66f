"""Without a GPU: every kernel compiles for Hopper, to the very machine code that was recorded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from targets.cuda import launch
from targets.cuda.launch import Variant, compile_variant
from tests import machine_code
from tests.targets.cuda.kernel_variants import FILES, changed, covering, needed, variants

SOURCE = """extern "C" __global__ void first(int* to, int v) { __shared__ int s[32]; *to = s[v]; }
extern "C" __global__ void second(float* to, float v) { *to = v * 3.0f; }"""


def check(made: list[Variant]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        binaries = list(pool.map(compile_variant, made))
    recorded = machine_code.table()
    if recorded["nvidia-cuda-nvrtc"] != machine_code.compiler():
        pytest.skip(f"compiled, but recorded by NVRTC {recorded['nvidia-cuda-nvrtc']}")
    keys = list(map(machine_code.key, made))
    ours = dict(zip(keys, map(machine_code.digest, binaries), strict=True))
    assert ours == {key: recorded["digests"].get(key) for key in keys}


@pytest.mark.parametrize("file", sorted(FILES))
def test_kernels_compile_to_what_was_recorded(file):
    """One variant, where the compiler is given what it was given for the table; else so many that
    each macro's value is among them. test_every_variant_compiles_to_what_was_recorded has all."""
    every = needed(file)
    made, known = covering(every), machine_code.table()
    same = known["nvidia-cuda-nvrtc"] == machine_code.compiler()
    same = same and known["inputs"].get(file) == machine_code.inputs(every)
    check(made[:1] if same else made)


def test_whatever_the_compiler_is_given_is_in_the_digest_of_inputs(tmp_path, monkeypatch):
    (tmp_path / "some.cu").write_text(SOURCE)
    (tmp_path / "shared.cuh").write_text("#define A 1\n")
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    one = Variant("some", (("A", 1),), tmp_path)
    found = [machine_code.inputs([one]), machine_code.inputs([one, Variant("some", (), tmp_path)])]
    monkeypatch.setattr(launch, "ARCHITECTURE", "sm_100a")
    found.append(machine_code.inputs([one]))
    (tmp_path / "shared.cuh").write_text("#define A 2\n")
    found.append(machine_code.inputs([one]))
    (tmp_path / "some.cu").write_text(SOURCE.replace("3.0f", "3.5f"))
    found += [machine_code.inputs([one])] * 2
    assert len(set(found)) == len(found) - 1


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(FILES))
def test_every_variant_compiles_to_what_was_recorded(file):
    check(needed(file))


def test_all_variants_are_recorded_and_no_others():
    made = {machine_code.key(variant) for file in FILES for variant in needed(file)}
    assert made == set(machine_code.table()["digests"])
    assert {variant.file for variant in variants()} <= set(FILES)


def compiled(folder, source: str) -> str:
    (folder / "some.cu").write_text(source)
    return machine_code.digest(compile_variant(Variant("some", folder=folder)))


def test_a_name_changes_no_digest_and_a_number_does(tmp_path):
    whole = compiled(tmp_path, SOURCE)
    renamed = SOURCE.replace("first", "the_third").replace("second", "a").replace("to", "where")
    assert compiled(tmp_path, renamed) == whole
    code, values = whole.split()
    assert compiled(tmp_path, SOURCE.replace("3.0f", "3.5f")) != whole
    assert compiled(tmp_path, SOURCE.replace("s[32]", "s[64]")).split()[0] != code
    named = compiled(tmp_path, "constexpr int kUnused = 7;\n" + SOURCE).split()
    assert named[0] == code and named[1] != values


def test_one_line_of_a_kernel_changes_its_digest(tmp_path, monkeypatch):
    variant, line = needed("attention_combine")[0], "  wait_for_previous();\n"
    without = changed(variant, "attention_combine.cu", line, "", tmp_path)
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    binary = compile_variant(without)
    recorded = machine_code.table()
    if recorded["nvidia-cuda-nvrtc"] == machine_code.compiler():
        assert machine_code.digest(binary) != recorded["digests"][machine_code.key(variant)]
