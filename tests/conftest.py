"""Tiny checkpoints, written once per session, and how a session shares its machine."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import cheap
from tests.support.tiny import IDS, VARIANTS, oracle, random_tensors, write_tiny
from tests.support.worded import write_worded

settings.register_profile("shared", deadline=None)  # a busy machine is no fault of a test
settings.load_profile("shared")
LONGEST = (
    "warm",
    "lossless_mini",
    "simulated_tau",
    "lossless",
    "auto",
    "mesh",
    "cuda_emulated_attention",
    "long_cache",
    "eagle3_training",
    "cli_cuda",
    "examples",
    "door",
    "parity",
    "cuda_lossless",
    "pictures_lossless",
    "record",
    "pretrain",
    "serve_agents",
    "hostile_grammars",
    "sampling",
    "eagle3_drafter",
    "cli_drafting",
    "hosts",
    "compile",
    "random_mesh",
    "serve_drain",
    "cuda_parity",
    "assistant_drafter",
    "eagle3_cuda",
    "assistant_files",
    "four_bits",
    "cuda_machine_code",
    "dflash_drafter",
    "cycle_reports",
    "serve_ends",
    "constrained_drafts",
    "long_context",
    "script",
    "verify",
    "dflash_cuda",
    "found_checkpoints",
    "constraints",
    "door_requests",
    "assistant_head",
    "eagle3_loss",
    "speculation_off",
    "distil",
    "serve_reuse",
    "cuda_kernels",
    "eagle3_inputs",
    "serve_loading",
    "cli",
    "hub",
    "cli_lossless",
    "assistant_training",
    "eagle3_learning",
    "serve_mini",
    "cuda_emulated_sampling",
    "names",
    "serve_messages",
    "output",
    "cuda_emulated_experts",
    "model_drafter",
    "vision_parity",
    "cli_chat",
    "dflash_training",
    "serve_responses",
    "registry",
    "cli_bench",
    "memory",
    "serve_thoughts",
    "ngram",
    "report_command",
    "fairness",
)
"""Files that take longest, by CPU seconds. They go first, so that no worker is left with one at the
end. Those that compile the same programs of mini are apart: what one compiled, the other finds."""
PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
KEPT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}
"""However small: a program that one worker compiled no other one compiles, nor a process of its.
And operations do not tell from which lines they come: to lower them costs a sixth less."""
OTHER_END = "jax", "flax", "optax", "orbax.checkpoint", "fastapi", "openai"
"""What tests import last, and about half of what there is to import."""


def pytest_configure(config) -> None:
    """Before anything imports JAX. Workers, and the processes that tests start, inherit it."""
    number = os.environ.get("PYTEST_XDIST_WORKER")
    if number is None:
        os.environ |= KEPT | {PROGRAMS: tempfile.mkdtemp(prefix="programs-")}
        # packages are installed without bytecode (--no-compile): the first import writes it for all
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    else:
        _keep_to_own_cores(int(number[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
        if int(number[2:]) % 2:
            _import_from_the_other_end()


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it again and again; nor
    through what tracing allocates, hundreds of thousands of objects a program, at each 700."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item) -> None:
    """A card's tests share its memory: what the one before left goes first, cycles too."""
    if item.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items) -> None:
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def _keep_to_own_cores(worker: int, workers: int) -> None:
    """Where each worker has a thread for every core, they wait for each other's more than they
    work."""
    if not hasattr(os, "sched_setaffinity"):
        return  # not on every system
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    if share:
        os.sched_setaffinity(0, cores[worker * share : (worker + 1) * share])


def _import_from_the_other_end() -> None:
    """Where packages have no bytecode yet, two workers that import the same in the same order both
    write all of it."""
    jax = find_spec(OTHER_END[0])
    if jax is not None and jax.cached is not None and not Path(jax.cached).exists():
        for name in OTHER_END:
            import_module(name)


def pytest_unconfigure(config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ[PROGRAMS], ignore_errors=True)


def pytest_addoption(parser) -> None:
    """Options: another schedule of emulated kernels, and those of `pytest -m campaign` (see
    test_campaign.py)."""
    parser.addoption("--schedule", type=int, default=0, help="other orders of emulated threads")
    group = parser.getgroup("campaign", "a random campaign")
    group.addoption("--seconds", type=float, default=60.0, help="draw new cases for so long")
    group.addoption("--seed", type=int, default=0, help="of the cases that are drawn")
    group.addoption("--backend", choices=("jax", "cuda"), help="one of them; both by default")
    group.addoption("--case", type=json.loads, help="one case, as a failure printed it")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint folder per variant."""
    root = tmp_path_factory.mktemp("tiny")
    for variant in VARIANTS:
        write_tiny(root / variant, variant)
    return {variant: root / variant for variant in VARIANTS}


@pytest.fixture(scope="session")
def worded(tmp_path_factory) -> Path:
    """A tiny model of four layers with mini's tokenizer."""
    path = tmp_path_factory.mktemp("worded") / "tiny"
    write_worded(path)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A fake target of four slots behind HTTP: a `tests.support.serving.Server`. Modules
    that need another have one of their own by this name."""
    from tests.support.serving import ServedTarget, serving

    with serving(ServedTarget(slots=4)) as running:
        yield running


@pytest.fixture(scope="session")
def mini_server() -> Iterator[Any]:
    """The embedded model behind HTTP: a `tests.support.serving.Server`."""
    from tests.support.serving import serving_mini

    with serving_mini() as server:
        yield server


@pytest.fixture(scope="session")
def references() -> dict:
    """transformers' logits [2, LENGTH, V] of tiny's IDS and hidden states, per variant."""
    import torch

    made = {}
    for variant in VARIANTS:
        with torch.no_grad():
            out = oracle(variant, random_tensors(variant))(
                torch.tensor(IDS), output_hidden_states=True
            )
        made[variant] = out.logits.numpy(), [h.numpy() for h in out.hidden_states]
    return made


@pytest.fixture(scope="session", autouse=True)
def compiled_programs() -> None:
    """Commands keep their programs for this session only, not where the user's are."""
    from targets.jax import compile_cache

    compile_cache.PROGRAMS = Path(os.environ[PROGRAMS])


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Read TLS certificates once: httpx reads them for each client and each request without a
    client (20 ms of CPU), and no test sends an https request."""
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture(scope="module")
def cheap_programs() -> Iterator[None]:
    """See cheap.py. For whole modules, as results of two programs are bitwise equal only if both
    are compiled with the same options."""
    import jax
    from jax._src import compiler  # no option of jax.jit will do: the product's are what is tested

    honest = compiler.get_compile_options

    def options(*given, **named):
        made = honest(*given, **named)
        made.env_option_overrides = [*made.env_option_overrides, *cheap.OPTIONS.items()]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """For tests that patch traced functions: a process traces equal programs once, so JAX's caches
    are cleared before such a test and after it."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def few_samples(monkeypatch):
    """Few samples, for tests that run a bench but don't use its figures."""
    for name, value in {"STEPS": 3, "CYCLE_SAMPLES": 2, "FIRST_TOKENS": 2}.items():
        monkeypatch.setattr(f"specdec.bench.timing.{name}", value)
    monkeypatch.setattr("targets.cuda.roofline.GROUPS", 3)
