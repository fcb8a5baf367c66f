"""API keys: who sends none of them is answered 401; which one it was is `request.state.caller`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping

from fastapi import Request

from serve.errors import ApiError


class Keys:
    """A dependency that asks for `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's
    clients send it, where there are keys."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, request: Request) -> None:
        known = self._known(request.headers)
        request.state.caller = "" if known is None else str(known)
        if self._digests and known is None:
            raise ApiError(
                401,
                "wrong or missing API key: send it as Authorization: Bearer KEY or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _known(self, headers: Mapping[str, str]) -> int | None:
        """Which key was sent, None for none of them."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        sent = [_digest(key) for key in (bearer, headers.get("x-api-key", "").strip()) if key]
        # all of them, always: the time tells neither which one nor how much of it was right
        matches = [
            [hmac.compare_digest(key, digest) for key in sent].count(True)
            for digest in self._digests
        ]
        return next((number for number, match in enumerate(matches) if match), None)


def _digest(key: str) -> bytes:
    """Of one length for all."""
    return hashlib.sha256(key.encode()).digest()
