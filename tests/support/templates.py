"""Chat templates as they circulate: every test that renders a history does so with each of them."""

from __future__ import annotations

import copy
from functools import cache

from targets.chat_template import ChatTemplate
from targets.tokenizer import Tokenizer
from tests.support.constrained import mini_tokenizer
from tests.support.places import DATA

FOLDER = DATA / "templates"
TEMPLATES = ("mini", "forward_scan", "alternating", "without_tools")

WITH_TOOLS = TEMPLATES[:3]
"""Those that have a form for a tool's result."""


def template_text(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def tokenizer_with(name: str) -> Tokenizer:
    """mini's tokenizer with a template of `TEMPLATES`."""
    if name == "mini":
        return mini_tokenizer()
    return with_template(template_text(name))


def with_template(text: str) -> Tokenizer:
    """mini's tokenizer with a template of one's own."""
    tokenizer = copy.copy(mini_tokenizer())
    tokenizer._template = ChatTemplate(text)
    return tokenizer
