"""The commands on the CUDA target's references, and their errors where the target can't run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from drafters.none.host import NoDrafter
from specdec.assembly.engine import warm_up
from specdec.core.config import ModelConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sampling
from targets.arch import released
from targets.cuda.backend import CudaBackend
from targets.cuda.device import Machine, bytes_per_cycle, refuse
from targets.cuda.launch import Variant, cached_binary
from targets.cuda.load import CudaOptions, make_plan
from targets.jax.backend import JaxBackend
from tests.support import cheap
from tests.support.commands import CUDA, PROMPT, refused, run
from tests.support.fakes import FakeTarget


@pytest.mark.usefixtures("few_samples")
def test_bench_of_the_cuda_target_with_a_synthetic_tau_and_a_peer(capsys, tmp_path, worded):
    receipt, plot = tmp_path / "receipt.json", tmp_path / "plot.png"
    arguments = ["bench", *CUDA, "--model", str(worded), "--batches", "1,2", "--contexts", "30"]
    arguments += [
        "--widths",
        "1,3",
        "--k",
        "2",
        "--ks",
        "1,2",
        "--prompt-lengths",
        "16",
        "--synthetic-tau",
        "2",
        "--max-len",
        "256",
    ]
    arguments += ["--max-tokens", "8", "--peer", "transformers", "--plot", str(plot)]
    assert "choose one with --drafter" in refused(capsys, *arguments)
    arguments += ["--drafter", "ngram"]
    out, err = run(capsys, *arguments, "--out", str(receipt), "--json")
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads(receipt.read_text()) and document["equal"]
    steps = document["steps"]
    assert {(s["batch"], s["width"]) for s in steps} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert all(len(s["samples"]) == len(s["forward"]["samples"]) == 2 for s in steps)
    cycles = document["cycles"]
    assert {(c["drafter"], c["k"]) for c in cycles} == {("none", 0), ("ngram", 1), ("ngram", 2)}
    assert [run["tau"] > 1 for run in document["synthetic"]] == [True, True]
    assert len(document["read_bandwidths"]) == 2 and plot.stat().st_size > 10_000
    assert all(run.get("tokens_per_second") for run in document["peer"]["runs"]), document["peer"]
    assert "transformers, prompt lookup, batch 1" in err


def test_cuda_references_say_the_same_whatever_the_drafter(capsys, tmp_path, worded):
    ours = ["--model", str(worded), "--max-len", "256", *CUDA]
    base = ["generate", PROMPT, "--max-tokens", "10", "--json", "--slots", "1", *ours]
    base += ["--temperature", "0.8", "--seed", "3"]
    variants = [["--drafter", "none"], [], ["--k", "7"]]
    texts = {json.loads(run(capsys, *base, *v)[0].splitlines()[-1])["text"] for v in variants}
    assert len(texts) == 1
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os\\nimport sys\\n"}\n')
    arguments = ["eval-acceptance", str(prompts), "--max-tokens", "12", "--slots", "2", *ours]
    document = json.loads(run(capsys, *arguments, "--json")[0].splitlines()[-1])
    assert document["equality"]["equal"] and list(document["speeds"]) == ["plain", "drafted"]
    assert document["device"] == "cpu: torch references"


@pytest.mark.usefixtures("cheap_programs")
def test_cuda_references_score_and_check_as_jax_does(capsys, tmp_path, worded):
    text = tmp_path / "text.py"
    text.write_text(PROMPT * 10)
    arguments = ["perplexity", str(text), "--window", "64", "--stride", "32", "--json"]
    arguments += ["--model", str(worded)]
    ours, theirs = (
        json.loads(run(capsys, *arguments, *backend)[0].splitlines()[-1]) for backend in (CUDA, [])
    )
    assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-4)
    assert ours["tokens"] == theirs["tokens"]
    out, _ = run(capsys, "doctor", *CUDA, "--json", "--slots", "2")
    assert json.loads(out.splitlines()[-1])["healthy"]


def test_cuda_without_a_gpu_is_one_line(capsys, monkeypatch):
    nothing = Machine("2.13.0", "13.0", None)
    monkeypatch.setattr("targets.cuda.device.find_machine", lambda: nothing)
    assert "no NVIDIA GPU" in refused(capsys, "serve", "--port", "0", "--backend", "cuda")


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_binaries_for_hopper_are_refused_elsewhere(capability):
    """Those of sm_90a run on nothing later either."""
    found = Machine("2.13.0", "13.0", "NVIDIA B200", capability)
    with pytest.raises(UserError, match=r"B200 has compute capability .* need 9\.0 \(Hopper\)"):
        refuse(found)


def test_a_gpu_that_does_not_tell_its_clocks_has_a_pace_too():
    """In kHz, as torch has them; HBM moves data twice a cycle."""
    h200 = {"memory_clock_rate": 3_201_000, "memory_bus_width": 6_144, "clock_rate": 1_980_000}
    assert bytes_per_cycle(SimpleNamespace(**h200)) == pytest.approx(2_483, rel=1e-3)
    for name in h200:
        silent = SimpleNamespace(**h200 | {name: 0})
        assert bytes_per_cycle(silent) == pytest.approx(2_483, rel=0.05)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    assert cached_binary(Variant("bandwidth"), folder / "kernels", 1).startswith(b"\x7fELF")


def test_fp8_files_for_many_rows_have_8_bit_inputs():
    arch = released("gemma-4-e2b")

    def dtype(stored: str = "fp8", arch=arch, **options) -> str:
        return make_plan(arch, CudaOptions(**options), stored).dtype

    assert [dtype(slots=8, k=k) for k in (0, 7, 8)] == ["fp8", "fp8", "fp8-w8a8"]
    assert dtype(slots=64, k=4, dtype="fp8") == "fp8"
    assert dtype("int4", slots=64) == "int4" and dtype("bfloat16", slots=64) == "bfloat16"
    assert dtype(slots=64, k=4, device="cpu") == "float32"
    wide = replace(arch, layers=(replace(arch.layers[0], ffw=24592),))
    assert dtype(arch=wide, slots=64, k=4) == "fp8"  # too wide for its kernels


def test_the_kernels_refuse_what_only_references_do():
    arch = released("gemma-4-e2b")
    with pytest.raises(UserError, match="--slots must be 1 to 512"):
        make_plan(arch, CudaOptions(slots=513), "bfloat16")
    with pytest.raises(UserError, match="cache no float32"):
        make_plan(arch, CudaOptions(kv_dtype="float32"), "bfloat16")
    with pytest.raises(UserError, match="pairs of row and expert"):
        make_plan(released("gemma-4-26b-a4b"), CudaOptions(slots=512, k=15), "bfloat16")
    make_plan(released("gemma-4-26b-a4b"), CudaOptions(slots=128, k=4), "fp8")
    with pytest.raises(UserError, match="K = 4 route 10240 pairs"):  # a launch would fail
        make_plan(released("gemma-4-26b-a4b"), CudaOptions(slots=256, k=4), "fp8")
    wide = replace(arch, layers=(replace(arch.layers[0], ffw=24584),))
    with pytest.raises(UserError, match="24584: choose --dtype fp8"):
        make_plan(wide, CudaOptions(dtype="fp8-w8a8"), "fp8")
    odd = replace(arch, layers=tuple(replace(layer, head_dim=192) for layer in arch.layers))
    for shape in (odd, replace(arch, hidden=10240)):
        with pytest.raises(UserError, match="--device cpu"):
            make_plan(shape, CudaOptions(), "bfloat16")
        make_plan(shape, CudaOptions(device="cpu"), "bfloat16")
    for options in (CudaOptions(dtype="float32"), CudaOptions(device="cpu")):
        assert make_plan(arch, replace(options, slots=513), "bfloat16").kv_dtype == "float32"


def test_sizes_that_the_kernels_do_not_take_name_tensor_and_size():
    """They would otherwise end in an assertion in the middle of a long prompt."""
    arch = released("gemma-4-26b-a4b")
    layer = arch.layers[0]
    assert layer.moe is not None
    experts = replace(layer, moe=replace(layer.moe, width=700))
    cases = [(experts, "bfloat16", r"experts.down_proj has shape \[128, 2816, 700\]")]
    cases += [(replace(layer, ffw=2104), "fp8", r"mlp.gate_proj has shape \[2104, 2816\]")]
    for odd, dtype, said in cases:
        shape = replace(arch, layers=(odd, *arch.layers[1:]))
        with pytest.raises(UserError, match=f"layers.0.{said}: with --dtype {dtype}"):
            make_plan(shape, CudaOptions(dtype=dtype), "bfloat16")
        make_plan(shape, CudaOptions(dtype=dtype, device="cpu"), "bfloat16")
    for name in ("31b", "12b", "26b-a4b", "e4b", "e2b"):
        for dtype in ("bfloat16", "fp8", "fp8-w8a8"):
            make_plan(released(f"gemma-4-{name}"), CudaOptions(dtype=dtype), "bfloat16")


def test_the_loop_is_the_faster_one(monkeypatch):
    one, four = (ModelConfig(slots=n) for n in (1, 4))
    references = ModelConfig(device="cpu"), ModelConfig(dtype="float32")
    assert [CudaBackend().loops(c) for c in references] == [("host",), ("host",)]
    assert CudaBackend().loops(one)[0] == "device"
    assert JaxBackend().loops(one)[0] == "host"  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [JaxBackend().loops(c)[0] for c in (one, four)] == ["device", "device"]


def test_float32_on_a_gpu_runs_references_which_are_not_captured(capsys):
    arguments = ["generate", PROMPT, "--backend", "cuda", "--dtype", "float32", "--loop", "device"]
    assert "--dtype float32 use --loop host" in refused(capsys, *arguments)


def test_cuda_refuses_what_will_not_fit_before_it_loads(capsys, monkeypatch):
    monkeypatch.setattr("targets.cuda.device.check_device", lambda: None)
    monkeypatch.setattr("targets.cuda.device.free_bytes", lambda: 40 * 2**30)
    arguments = ["bench", "--random", "gemma-4-31b", "--backend", "cuda", "--dtype", "fp8"]
    line = refused(capsys, *arguments, "--max-len", "8192", "--slots", "16")
    assert "40.0 GiB are free" in line and "--slots 6 would fit" in line


def test_neither_backend_needs_the_other_framework(worded):
    code = (
        "import sys; sys.modules[{absent!r}] = None\n"
        "from specdec.cli import main\n"
        "main(['generate', 'def f', '--max-tokens', '3', '--json', *{options!r}])"
    )
    small = ["--model", str(worded), "--max-len", "64", "--slots", "1"]
    env = os.environ | {"XLA_FLAGS": cheap.FLAGS}
    for absent, options in (("jax", CUDA), ("torch", [])):
        script = code.format(absent=absent, options=[*small, *options])
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_warming_up_meets_every_batch_and_leaves_no_trace():
    target, met = FakeTarget(slots=3), set()
    inner = host_cycle(target, NoDrafter(), 2)

    def watched(seqs, single):
        met.add(len(seqs))
        return inner(seqs, single)

    engine = Engine(target, NoDrafter(), watched)
    warm_up(engine, [Sampling()], (2, 3), ((1, 1), (2, 9)))
    assert met == {1, 2, 3} and engine.idle and engine.acceptance.cycles == 0


@pytest.mark.parametrize(
    "options",
    [["--dtype", "fp8"], ["--dtype", "fp8-w8a8"], ["--dtype", "bfloat16", "--kv-dtype", "fp8"]],
)
def test_narrow_weights_and_cache_run_on_the_references(capsys, worded, options):
    base = ["generate", PROMPT, "--model", str(worded), "--max-tokens", "6", "--slots", "1"]
    base += ["--max-len", "64", "--json", *CUDA, *options]
    texts = {
        json.loads(run(capsys, *base, "--drafter", drafter)[0].splitlines()[-1])["text"]
        for drafter in ("none", "ngram")
    }
    assert len(texts) == 1
