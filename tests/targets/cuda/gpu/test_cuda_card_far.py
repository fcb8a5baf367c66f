"""On the card, at up to 262,144 positions: attention is near float64, a row's bits depend on no
width, neighbour or kernel, a prompt resumes at 98,304 with the bits of a cold one, and no drafter
changes an id.

Layers have the released models' true shapes; K/V is random where no prompt is read. Queries are
scaled down: at full size a random one finds one key of 100,000, and a lost chunk would be noticed
only where that key lies in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.protocols import Cycle, Drafter
from specdec.core.types import Reuse, Sampling, Sequence
from targets.arch import Arch, LayerSpec, released
from targets.backend import snapshots_of
from targets.cuda import attention
from targets.cuda.cache import entries, read
from targets.cuda.kernels import Kernels
from targets.cuda.launch import Launcher, Library, Variant, pointer
from targets.cuda.load import LONGEST, SHORT, CudaOptions, random_target
from targets.cuda.model import decode
from targets.cuda.ops import AttentionLayer
from targets.cuda.params import Weights, random_params
from targets.cuda.prefill import prefill
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_steps import PrefillChunk
from targets.cuda.reference import Reference
from targets.cuda.target import CudaTarget
from tests.support.fakes import Oracle
from tests.support.modes import MODES
from tests.targets.cuda.attention_cases import Case, one_layer_of
from tests.targets.cuda.card import error, randn
from tests.targets.cuda.gpu.card_targets import stored

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB = 8192
JOINING = [6_141, 12_285, 24_573]
"""Where further lanes of heads of 512 begin, and from where all of 32 and of 64 go on alike."""
TOKENS = 1, 5, 8
"""Rows of a sequence: plain decoding, and a verify of K = 4 and 7."""
PLACES = [
    (name, positions)
    for name in ("gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-e4b")
    for positions in (32_768, 131_072)
]
PLACES += [("gemma-4-31b", 262_144)]
LAYERS = [(*place, sliding) for place in PLACES for sliding in (True, False)]
LAYERS += [("gemma-4-31b", LONGEST, True), ("gemma-4-e4b", LONGEST, True)]
KV = {
    "gemma-4-31b": "fp8",
    "gemma-4-12b": "bfloat16",
    "gemma-4-26b-a4b": "fp8",
    "gemma-4-e4b": "bfloat16",
}
"""Caches of whole models."""
OWNERS = 7
"""Layers of whole models with K/V of their own: behind the first global one another, so that
prompts run all their rows through both."""
CASE_QUERIES = 0.1
MODEL_QUERIES = 0.05
"""Factors of queries' norms: scores of random keys deviate by 2.3 and by 1.1, not by 23. Through
several layers a peaked softmax would make any difference in rounding a large one."""
NEAR = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-3}
"""Queries and shares have 8 bits beside a bf16 cache, 11 beside an FP8 one."""
STORED = 5e-3
"""New keys and values beside the same in torch."""
PROMPTS = 0.025
"""A prompt's attention: its queries, shares and outputs are bf16."""
WHOLE = 0.05
"""Several layers beside the references, or a prompt's chunk beside the same in decoding's calls."""
ROUTED = 0.4
"""The same where a router may pick another expert now and then."""
PROMPT_ROWS = 40
"""Rows of a prompt's attention: blocks of 16 queries and a part of one."""
CHUNK = 512
"""Tokens of a chunk that the library multiplies."""
COMMON = 100_000
"""Tokens that two prompts begin with."""
ROOM = 16 << 30
"""Bytes for snapshots."""
FULL = 131_072
"""The longest context of E4B."""


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Other processes test on the same card."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def layers_of(name: str) -> Arch:
    """The first global layer with what is around it, and layers that share its K/V and a sliding
    one's where the model has such."""
    whole = released(name)
    sharing = {layer.sliding: layer for layer in whole.layers if layer.kv_from is not None}
    donors = {True: OWNERS - 1, False: OWNERS - 2}
    shared = [replace(layer, kv_from=donors[sliding]) for sliding, layer in sharing.items()]
    layers = (*whole.layers[:OWNERS], *shared)
    table = min(whole.per_layer_vocab, VOCAB)
    return replace(whole, layers=layers, vocab=VOCAB, per_layer_vocab=table)


def case_of(
    name: str, positions: int, sliding: bool, kv: torch.dtype, starts: list[int] | None = None
) -> Case:
    """A model's first layer of a kind. starts: by default one in the middle and the last, and of a
    ring also around the last place where it turns."""
    layer = next(layer for layer in released(name).layers if layer.sliding == sliding)
    layer = replace(layer, moe=None)  # experts are not attention's
    if starts is None:
        ends = positions - max(TOKENS)
        turn = ends // (ring := entries(layer, positions, SHORT)) * ring
        starts = [positions // 2 - 3, *([turn - 3, turn - 1] if sliding else []), ends]
    case = Case(layer, kv, starts, attend_of(layer, positions, kv), DEVICE, positions)
    case.q_norm = CASE_QUERIES * case.q_norm
    return case


def attend_of(layer: LayerSpec, positions: int, kv: torch.dtype) -> Callable:
    return Kernels(one_layer_of(layer), positions, kv, {"fp8"}).attention


def only(patch: pytest.MonkeyPatch, kernel: str) -> None:
    """Attention by `split` alone or by `fused` alone."""
    patch.setattr(attention, "LONG", 10**9)
    patch.setattr(attention, "FUSED_FROM_CTAS", 1 if kernel == "fused" else 10**9)


def held(case: Case) -> list[int]:
    """Sums of all bits of a cache: a copy to compare with would take gigabytes."""
    parts = case.cache.k, case.cache.v
    return [int(part.view(torch.int32).sum(dtype=torch.int64)) for part in parts]


def newest(case: Case, tokens: int) -> torch.Tensor:
    """Keys and values of a call's rows."""
    slots = enumerate(case.starts)
    parts = [read(case.cache, slot, start, start + tokens) for slot, start in slots]
    return torch.stack([part.float() for pair in parts for part in pair])


def stored_by_reference(case: Case, tokens: int) -> torch.Tensor:
    """What `newest` is where plain torch has stored them."""
    layer = AttentionLayer(case.layer, case.cache, case.q_norm, case.k_norm)
    rows = case.rows(tokens, case.starts, list(range(len(case.starts))))
    Reference(one_layer_of(case.layer)).store(case.qkv(tokens), layer, rows)
    return newest(case, tokens)


@pytest.mark.parametrize("kv", NEAR)
@pytest.mark.parametrize(("name", "positions", "sliding"), LAYERS)
def test_attention_is_near_float64_and_the_same_by_any_kernel(
    name, positions, sliding, kv, monkeypatch
):
    """Its output, and what it stores."""
    case = case_of(name, positions, sliding, kv)
    for tokens in TOKENS:
        together, kept = case.all_together(tokens), held(case)
        assert error(together, case.exact(tokens)) <= NEAR[kv], tokens
        for row in range(len(together)):
            assert torch.equal(case.alone(row, tokens), together[row : row + 1]), (tokens, row)
        assert held(case) == kept, tokens
        for kernel in ("split", "fused"):
            case.fill()
            with monkeypatch.context() as patch:
                only(patch, kernel)
                assert torch.equal(case.all_together(tokens), together), (tokens, kernel)
            assert held(case) == kept, (tokens, kernel)
        ours = newest(case, tokens)
        assert error(ours, stored_by_reference(case, tokens).double()) <= STORED, tokens


@pytest.mark.parametrize("kv", NEAR)
@pytest.mark.parametrize("name", ["gemma-4-12b", "gemma-4-26b-a4b"])
def test_where_lanes_join_sums_have_one_order(name, kv, monkeypatch):
    """By either kernel, and however a column's lanes and rows are dealt to CTAs."""
    case = case_of(name, 32_768, False, kv, JOINING)
    for tokens in TOKENS:
        together, kept = case.all_together(tokens), held(case)
        assert error(together, case.exact(tokens)) <= NEAR[kv], tokens
        for row in range(len(together)):
            assert torch.equal(case.alone(row, tokens), together[row : row + 1]), (tokens, row)
        for kernel, *way in (("fused", 1, 1), ("split", 1, 1), ("split", 2, 2), ("split", 4, 1)):
            case.fill()
            with monkeypatch.context() as patch:
                only(patch, kernel)
                patch.setattr(attention, "_spread", lambda *_, way=tuple(way): way)
                assert torch.equal(case.all_together(tokens), together), (tokens, kernel, way)
            assert held(case) == kept, (tokens, kernel, way)


@pytest.mark.parametrize(("name", "positions", "sliding"), LAYERS)
def test_a_prompts_attention_is_near_float64(name, positions, sliding):
    start = positions - PROMPT_ROWS
    case = case_of(name, positions, sliding, torch.bfloat16, [start])
    layer = AttentionLayer(case.layer, case.cache, case.q_norm, case.k_norm)
    steps = steps_of(PrefillChunk(case.rows(PROMPT_ROWS, [start], [0]).tokens[0], start, 0))
    qkv = case.qkv(PROMPT_ROWS).bfloat16()
    pair = steps.exchange(qkv, layer)
    made = steps.attend(qkv, layer, pair, "bf16").values.float()
    assert error(made, case.exact(PROMPT_ROWS)) <= PROMPTS
    ours = newest(case, PROMPT_ROWS)
    assert error(ours, stored_by_reference(case, PROMPT_ROWS).double()) <= STORED


def steps_of(chunk: PrefillChunk) -> PrefillKernels:
    return PrefillKernels(chunk, released("gemma-4-31b").eps)


def target_of(
    name: str, positions: int, slots: int = 2, dtype: str = "fp8", graphs: bool = False
) -> CudaTarget:
    common = {"dtype": dtype, "kv_dtype": KV[name], "graphs": graphs, "device": DEVICE}
    target = random_target(layers_of(name), CudaOptions(slots, positions, **common))
    soften(target.weights)
    fill(target)
    return target


def soften(weights: Weights) -> None:
    for layer in weights.layers:
        layer.q_norm.mul_(MODEL_QUERIES)


def fill(target: CudaTarget) -> None:
    """All K/V anew: the same each time."""
    layers = [layer for layer in target.cache.layers if layer is not None]
    for seed, part in enumerate(part for layer in layers for part in (layer.k, layer.v)):
        part.copy_(randn(*part.shape, seed=seed, device=DEVICE).to(part.dtype))


def words(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (count,), generator=draw).tolist()


def fed(target: CudaTarget, texts: dict[int, list[int]], starts: dict[int, int], sizes: list[int]):
    """Logits [B, T, V] of slots' texts in calls of so many tokens each, over K/V that is filled
    anew; and what they have stored."""
    fill(target)
    slots, first, parts = list(texts), 0, []
    for size in sizes:
        tokens = [texts[slot][first : first + size] for slot in slots]
        rows = target._rows(tokens, [starts[slot] + first for slot in slots], slots)
        parts.append(target.logits(rows)[0].clone())
        first += size
    kept = [stored(target, slot, starts[slot] + first, starts[slot]) for slot in slots]
    return torch.cat(parts, 1), kept


@pytest.mark.parametrize(("name", "positions"), PLACES)
def test_a_models_rows_are_themselves_at_any_width(name, positions, monkeypatch):
    """Fed alone, behind and beside others, and by either kernel of attention."""
    target = target_of(name, positions)
    texts, starts = {0: words(8, 1), 1: words(8, 2)}, {0: positions - 8, 1: positions // 2 - 3}
    whole, kept = fed(target, texts, starts, [8])

    def check(slots: list[int], sizes: list[int]) -> None:
        logits, now = fed(target, {slot: texts[slot] for slot in slots}, starts, sizes)
        assert torch.equal(logits, whole[slots]), (slots, sizes)
        for slot, parts in zip(slots, now, strict=True):
            assert all(map(torch.equal, parts, kept[slot])), (slots, sizes)

    for sizes in ([1] * 8, [5, 3], [1, 5, 2]):
        check([0, 1], sizes)
    check([0], [8])
    check([1], [1] * 8)
    for kernel in ("split", "fused"):
        with monkeypatch.context() as patch:
            only(patch, kernel)
            check([0, 1], [8])
            check([0, 1], [5, 1, 1, 1])


@pytest.mark.parametrize(("name", "positions"), PLACES)
@torch.inference_mode()
def test_a_model_agrees_with_the_references(name, positions):
    """Over the same K/V, with the same weights."""
    target = target_of(name, positions)
    rows = target._rows([words(5, 1), words(5, 2)], [positions - 5, positions // 2 - 3], [0, 1])
    ours = target.logits(rows)[0].flatten(0, 1).clone()
    reference = Reference(target.arch)
    weights = random_params(target.arch, target.plan.dtype, DEVICE, reference)
    soften(weights)
    theirs = decode(weights, target.arch, target.cache, rows, reference).logits
    assert theirs is not None
    assert error(ours, theirs.double()) <= (ROUTED if target.arch.moe else WHOLE)


@pytest.mark.parametrize(("name", "positions"), PLACES)
@torch.inference_mode()
def test_a_prompts_last_chunk_is_near_the_same_in_decodings_calls(name, positions):
    """Its logits, and the keys and values that it stores."""
    target = target_of(name, positions, 1, "bfloat16")
    start = positions - CHUNK
    rows = target._rows([words(CHUNK, 3)], [start], [0])
    chunk = PrefillChunk(rows.tokens[0], start, 0)
    runs = []
    for calls in (
        lambda: prefill(target.weights, target.arch, target.cache, chunk, target.ops),
        lambda: target._in_calls(rows, target.plan.short),
    ):
        fill(target)
        *_, out = calls()
        assert out is not None and out.logits is not None
        runs.append([out.logits.clone(), *stored(target, 0, positions, start)])
    allowed = ROUTED if target.arch.moe else WHOLE
    for part, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        assert error(ours, theirs.double()) <= allowed, part


def answer(engine: Engine, prompt: list[int], max_tokens: int = 8) -> tuple[Sequence, list]:
    """Its tokens, and all that is known of each."""
    reuse = Reuse(partings=(COMMON,))
    seq = Sequence(prompt, Sampling(logprobs=4), max_tokens=max_tokens, reuse=reuse)
    events = list(engine.run([seq]))
    assert seq.finish == "length", [event.error for event in events]
    return seq, [event.logprobs for event in events]


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e4b"])
def test_a_prompt_that_resumes_far_out_has_the_bits_of_a_cold_one(name):
    target = target_of(name, FULL, 1)
    own = snapshots_of(target)
    cache = PrefixCache(own.unit, [own], SnapshotPool(Budget(device=ROOM)))
    cycle = host_cycle(target, NoDrafter(), 0)
    warm, cold = (Engine(target, NoDrafter(), cycle, prefix_cache=c) for c in (cache, None))
    common = words(COMMON, 1)
    answer(warm, common + words(700, 2), max_tokens=1)
    runs = []
    for engine in (warm, cold):
        fill(target)  # what the slot still held would hide a part that is not restored
        seq, told = answer(engine, common + words(900, 3))
        runs.append((seq.tokens, told, stored(target, 0, len(seq.tokens) - 1)))
    assert cache.hits == COMMON // own.unit * own.unit > 0
    assert runs[0][:2] == runs[1][:2]
    assert all(map(torch.equal, runs[0][2], runs[1][2]))


def texts_of(target: CudaTarget, drafter: Drafter, cycle: Cycle) -> dict[str, list[int]]:
    """A long text and a short one, greedy and sampled, that are decoded side by side."""
    engine = Engine(target, drafter, cycle)
    lengths, modes = (target.max_len - 100, 3000), ("greedy", "nucleus")
    seqs = [
        Sequence(words(n, i), MODES[mode](i), max_tokens=48, request_id=str(i))
        for i, (n, mode) in enumerate(zip(lengths, modes, strict=True))
    ]
    engine.run_to_end(seqs)
    return {seq.request_id: seq.tokens for seq in seqs}


def test_no_drafter_changes_an_id_far_out():
    from drafters.lookup.cuda import DeviceLookup
    from targets.cuda.device_loop import device_loop

    lone, target = (target_of("gemma-4-e4b", FULL, n, graphs=n > 1) for n in (1, 2))
    plain = texts_of(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0))
    cycle = device_loop(target, DeviceLookup(target, 2, 5), 4)
    assert texts_of(target, NoDrafter(), cycle) == plain
    for shift, k in ((0, 7), (1, 4)):  # all guesses are right, and none
        drafter = Oracle(plain, shift, target.vocab)
        assert texts_of(target, drafter, host_cycle(target, drafter, k)) == plain, shift


QUOTIENTS = """#include "common.cuh"
extern "C" __global__ void check(const int* by, int* wrong) {
  for (int v = blockIdx.x * blockDim.x + threadIdx.x; v < 1 << 20; v += gridDim.x * blockDim.x)
    if (quotient(v, by[blockIdx.y]) != v / by[blockIdx.y]) atomicAdd(wrong, 1);
}
"""


def test_quotients_are_exact_below_2_to_the_20(tmp_path):
    """By all that kernels divide by, and all numbers up to 4,096."""
    (tmp_path / "quotients.cu").write_text(QUOTIENTS)
    contexts = [positions + SHORT for positions in (32_768, 131_072, 262_144, LONGEST)]
    by = torch.tensor([*range(1, 4097), *contexts], dtype=torch.int32, device=DEVICE)
    wrong = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    variant = Variant("quotients", folder=tmp_path)
    launch = Launcher(Library({variant}, tmp_path))
    launch(variant, "check", (64, len(by), 1), 256, [pointer(by), pointer(wrong)], pdl=False)
    assert int(wrong) == 0
