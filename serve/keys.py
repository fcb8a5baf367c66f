"""API keys: who sends none of them is answered 401; which one it was is `request.state.caller`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from fastapi import Request

from serve.errors import ApiError


class Keys:
    """A dependency that asks for `Authorization: Bearer KEY`, where there are keys."""

    def __init__(self, keys: Collection[str], together: bool = False) -> None:
        """together: whether callers with different keys are one to the prefix cache."""
        self._together = together
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, request: Request) -> None:
        known = self._known(request.headers.get("authorization", ""))
        request.state.caller = "" if self._together or known is None else str(known)
        if self._digests and known is None:
            raise ApiError(
                401,
                "wrong or missing API key: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _known(self, header: str) -> int | None:
        """Which key was sent, None for none of them."""
        scheme, _, key = header.partition(" ")
        sent = _digest(key.strip())
        # all of them, always: the time tells neither which one nor how much of it was right
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        return matches.index(True) if any(matches) and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    """Of one length for all."""
    return hashlib.sha256(key.encode()).digest()
