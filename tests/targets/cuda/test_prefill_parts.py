"""How long others wait while a chunk of a long prompt is read, in layers."""

import pytest

from targets.arch import released
from targets.cuda.prefill import parts_begin

CHUNK = 2048


@pytest.mark.parametrize("model", ["gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-e4b"])
def test_far_out_no_part_has_two_global_layers(model):
    layers = released(model).layers
    begins = parts_begin(released(model), len(layers), CHUNK, 98_304)
    for first, stop in zip([0, *begins], [*begins, len(layers)], strict=True):
        assert sum(layer.window is None for layer in layers[first:stop]) <= 1


def test_a_first_chunk_has_a_part_for_512_tokens():
    arch = released("gemma-4-31b")
    assert parts_begin(arch, 59, CHUNK, 0) == [15, 30, 45]
    assert parts_begin(arch, 59, 1100, 0) == [20, 40]
    assert parts_begin(arch, 59, 300, 0) == []


def test_no_part_begins_where_only_last_rows_go_on():
    assert max(parts_begin(released("gemma-4-e4b"), 24, CHUNK, 98_304)) < 24
