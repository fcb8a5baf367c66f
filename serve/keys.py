"""API keys: a request without a valid one is answered 401. The number of the key that was sent is
stored in `request.state.caller`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping

from fastapi import Request

from serve.errors import ApiError


class Keys:
    """A dependency that requires `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's
    clients send it. Without `keys` no header is required."""

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
        """The number of the key that was sent; None if none or a wrong one was sent."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        sent = [_digest(key) for key in (bearer, headers.get("x-api-key", "").strip()) if key]
        # Compare with every key in constant time, so that the time taken reveals neither which key
        # matched nor how long a prefix of it did.
        matches = [
            [hmac.compare_digest(key, digest) for key in sent].count(True)
            for digest in self._digests
        ]
        return next((number for number, match in enumerate(matches) if match), None)


def _digest(key: str) -> bytes:
    """A key's hash: all have the same length, so comparing does not reveal a key's length."""
    return hashlib.sha256(key.encode()).digest()
