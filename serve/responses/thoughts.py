"""Thoughts as `encrypted_content`, which clients store and send back without reading. It is not
encrypted: it is the thought's text in base64, so that the next turn's prompt contains the
thought."""

from __future__ import annotations

import base64
import binascii

MARK = "specdec."


def sealed(thought: str) -> str:
    return MARK + base64.b64encode(thought.encode()).decode()


def opened(content: str) -> str | None:
    """The thought's text; None if another server encrypted it."""
    if not content.startswith(MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
