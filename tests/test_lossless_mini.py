"""Our word of honour on programs as users have them, fully optimised: the embedded model in both
loops and, slowly, the whole matrix of models, slots, drafters and K."""

from __future__ import annotations

import pytest

from targets import mini
from tests.lossless import (
    check_device,
    check_device_model,
    check_eagle3,
    check_host,
    forget_targets,
)
from tests.tiny import VARIANTS


@pytest.fixture(autouse=True, scope="module")
def own_targets():
    """None whose programs were compiled cheaply."""
    forget_targets()


def test_mini_both_loops():
    check_host(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)
    check_device(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)
    check_eagle3(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "nucleus"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("variant", ["mini", *VARIANTS])
def test_whole_matrix(tiny, variant, slots, mode):
    path = mini.path("mini") if variant == "mini" else tiny[variant]
    check_host(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_device(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_device_model(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_eagle3(path, mode, slots, ks=[1, 2, 4, 7])
