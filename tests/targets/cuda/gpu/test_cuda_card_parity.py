"""On the card: weights come back as rows, and whole models agree with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from targets.arch import released
from targets.checkpoint import Checkpoint
from targets.cuda import four_bits, int4, untile
from targets.cuda.formulas import lookup
from targets.cuda.kernels import Kernels
from targets.cuda.nvfp4 import GROUP
from targets.cuda.ops import Dense, Rows
from targets.cuda.reader import quantised
from targets.cuda.reference import Reference
from targets.model_folder import read_arch
from targets.stored import dequantise
from tests.support.tiny import PREFIX, VARIANTS, oracle, write_tiny
from tests.targets.cuda.card import KINDS, error, one_layer, random_weight
from tests.targets.cuda.nvfp4_files import in_part, write_nvfp4
from tests.targets.cuda.runner import IDS, Runner

pytestmark = pytest.mark.gpu
torch.set_num_threads(1)  # as targets.cuda.load does for the references
LEAST = 0.05
"""Relative error of logits that is allowed in any case."""
ROUTED = 0.4
"""Relative error that is allowed where a router that reads 8 bits picks another expert now and
then. Models as small as these amplify what rounding to 8 bits does: the references are off by up to
0.15 themselves."""


def put_together(parts: Iterator[tuple[slice, Dense]]) -> Dense:
    """What `Ops.dense_parts` gives, as `dense` has it."""
    values, scales, seen = [], [], 0
    for features, (some, scale) in parts:
        assert features.start == seen and len(some) == 2 * (features.stop - features.start)
        seen = features.stop
        values.append(some.view(torch.uint8).unflatten(0, (2, -1)).clone())
        scales.append(None if scale is None else scale.unflatten(0, (2, -1)))
    scale = None if scales[0] is None else torch.cat(scales, 1).flatten()
    return torch.cat(values, 1).flatten(0, 1), scale


@pytest.mark.parametrize("kind", ["fp8", "int4", "uint4", "nvfp4", "w8a8", "bf16"])
def test_weights_come_back_as_rows(kind, monkeypatch):
    """Whole, and gates and ups a part at a time, of one pass or more."""
    monkeypatch.setattr(untile, "WHOLE_BYTES", 0)
    ops = Kernels(one_layer(released("gemma-4-26b-a4b"), 0), 128, torch.bfloat16, KINDS)
    plain = [(300, 1000), (128, 2816), (16384, 5376), (7, 48)]
    cases = [(shape, "plain") for shape in plain]
    cases += [((2 * n, k), "gated") for n, k in [*plain, (60_000, 64)]]
    if kind != "w8a8" and kind not in four_bits.KINDS:  # these multiply experts in stored form
        cases += [((128, 2816, 704), "experts"), ((128, 1408, 2816), "experts_gated")]
        cases += [((5, 300, 104), "experts"), ((5, 2 * 72, 48), "experts_gated")]
    for shape, layout in cases:
        if kind == "nvfp4" and shape[-1] % GROUP:
            continue  # no file has such
        weight = random_weight(ops, shape, kind, layout)
        values, scale = ops.dense(weight.packed)
        flat = weight.values.reshape(-1, shape[-1])
        assert values.dtype == flat.dtype
        assert torch.equal(values.view(torch.uint8), flat.view(torch.uint8)), (shape, layout)
        assert (scale is None) == (kind == "bf16")
        assert scale is None or torch.equal(scale, weight.scale.flatten())
        if layout == "gated":
            values, own = put_together(ops.dense_parts(weight.packed))
            assert torch.equal(values, flat.view(torch.uint8)), shape
            assert scale is None or torch.equal(own, scale)


@pytest.mark.parametrize(
    "shape", [(300, 1000), (7, 48), (262144, 1536), (262144, 5376), (5000, 64)]
)
def test_embeddings_are_rows_of_the_head(shape):
    """Tiled for the head, looked up for a token: to the bit, also of ids that don't exist."""
    vocab, width = shape
    ops = Kernels(one_layer(released("gemma-4-26b-a4b"), 0), 128, torch.bfloat16, KINDS)
    weight = random_weight(ops, shape, "bf16")
    ids = torch.randint(0, vocab, (5, 203), dtype=torch.int32, device="cuda")
    ids[0, :6] = torch.tensor([0, vocab - 1, vocab, -1, 2**31 - 1, -(2**31)], device="cuda")

    def whole(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    start, slot = whole(0, 3, 2**30, 9, 1), whole(4, 0, -1, 1, 3)
    texts = torch.full((6, 220), -7, dtype=torch.int32, device="cuda")
    expected = texts.clone()
    h = ops.embed(weight.packed, Rows(ids, start, slot), texts)
    assert torch.equal(h, lookup(weight.values, ids.flatten(), width))
    for row, first, own in zip(ids, start.tolist(), slot.tolist(), strict=True):
        if own >= 0:
            expected[own, first : first + len(row)] = row
    assert torch.equal(texts, expected)
    assert torch.equal(ops.embed(weight.packed, Rows(ids, start, slot)), h)


def rounded_to_int4(values: np.ndarray) -> np.ndarray:
    weight = int4.quantise(torch.from_numpy(values))
    return (weight.values().float() * weight.row[..., None]).numpy()


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("fp8", "fp8"),
        ("fp8", "fp8-w8a8"),
        ("bfloat16", "int4"),
        ("nvfp4", "int4"),
        ("nvfp4 in part", "int4"),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_agrees_with_transformers(tmp_path, variant, storage, dtype):
    """Its logits at every position, whole and one token at a time."""
    if storage.startswith("nvfp4"):
        write_tiny(tmp_path / "wide", variant)
        write_nvfp4(tmp_path / "wide", tmp_path, *([in_part] if "part" in storage else []))
    else:
        write_tiny(tmp_path, variant, storage)
    arch = read_arch(tmp_path)
    ours = Runner(tmp_path, Kernels(arch, 128, torch.bfloat16, KINDS), dtype, "cuda")
    whole = ours.feed((32,))
    assert torch.equal(ours.feed((1,) * 32), whole)
    checkpoint = Checkpoint(tmp_path, arch)
    tensors = {name: dequantise(checkpoint.read(name)) for name in checkpoint.specs}
    if (storage, dtype) == ("bfloat16", "int4"):  # rounded on load
        narrow = [name for name, spec in checkpoint.specs.items() if quantised(name, spec)]
        tensors |= {name: rounded_to_int4(tensors[name]) for name in narrow}
    with torch.no_grad():
        exact = oracle(variant, tensors)(torch.tensor(IDS)).logits.double()
    reference = Runner(tmp_path, Reference(arch), dtype, "cpu").feed((32,))
    allowed = max(LEAST, 2 * error(reference, exact))
    if arch.layers[0].moe:
        allowed = max(ROUTED, allowed) if dtype == "fp8-w8a8" else ROUTED
    assert error(whole, exact) <= allowed


def test_a_head_of_its_own_makes_the_logits(tmp_path):
    """Another table than the embedding: the kernels agree with the references."""
    write_tiny(tmp_path, "31b")
    file = tmp_path / "model.safetensors"
    tensors, tied = load_file(file), read_arch(tmp_path)
    before = Runner(tmp_path, Reference(tied), "bfloat16", "cpu").feed((32,))
    head = np.roll(tensors[f"{PREFIX}embed_tokens.weight"], 1, 0)
    save_file(tensors | {"lm_head.weight": head}, file)
    arch = read_arch(tmp_path)
    assert arch.own_head and not tied.own_head
    expected = Runner(tmp_path, Reference(arch), "bfloat16", "cpu").feed((32,))
    ours = Runner(tmp_path, Kernels(arch, 128, torch.bfloat16, KINDS), "bfloat16", "cuda")
    whole = ours.feed((32,))
    assert torch.equal(ours.feed((1,) * 32), whole)
    assert error(whole, expected.double()) < LEAST
    # row i of the head is the embedding's row i - 1: the same logits, one place further
    rolled = before.roll(1, -1).double()
    assert error(expected, rolled) < LEAST < error(before, rolled)
