"""Thoughts as `encrypted_content`, which clients keep and send back unread. Here it hides nothing:
it is the thought's text, by which the next turn's prompt says what was said."""

from __future__ import annotations

import base64
import binascii

MARK = "specdec."


def sealed(thought: str) -> str:
    return MARK + base64.b64encode(thought.encode()).decode()


def opened(content: str) -> str | None:
    """None for what another server sealed."""
    if not content.startswith(MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
