"""No history loses what a tool answered, and no text writes a control token: random ones, in each
API's form and with each template. `python -m tests.attacks` tries as many as one likes."""

from __future__ import annotations

import random

import pytest

from tests.attacks import (
    APIS,
    BODIES,
    attack,
    changed_controls,
    fields,
    missing_results,
    moved_beginning,
)
from tests.support.templates import TEMPLATES, tokenizer_with


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("api", APIS)
def test_random_histories_lose_no_result(api, template):
    rng = random.Random(f"{api} {template}")
    for number in range(40):
        missing = missing_results(rng, api, tokenizer_with(template))
        assert not missing, f"{missing} of history {number}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("api", APIS)
def test_no_text_field_writes_a_control_token(api, template):
    rng, tried = random.Random(f"{api} {template}"), 0
    for path in fields(BODIES[api]()):
        text = attack(rng)
        found = changed_controls(api, path, text, tokenizer_with(template))
        assert found is None or found[0] == found[1], (path, text)
        tried += found is not None
    assert tried > 50


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_beginning_of_an_answer_is_moved(template):
    rng = random.Random(template)
    for text in (attack(rng)[1:] for _ in range(60)):
        assert not moved_beginning(text, tokenizer_with(template)), text
