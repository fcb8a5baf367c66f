"""Options for access to a server, and the API keys from all sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from serve.key_sources import VARIABLE, checked_keys, environment_keys
from specdec.cli.console import read_text
from specdec.core.config import Common
from specdec.core.errors import UserError

if TYPE_CHECKING:
    from serve.policy import AccessPolicy


@Parameter(name="*", group="Access")
@dataclass(frozen=True)
class AccessConfig:
    api_key: Annotated[tuple[str, ...], Common, Parameter(negative=())] = ()
    """An API key; may be repeated. Clients must send one of the keys as bearer token. Keys in the
    environment's SPECDEC_API_KEY (separated by commas) and in --api-key-file count too, and are not
    visible to other users of this machine. By default no key is required."""
    api_key_file: Annotated[Path | None, Common] = None
    "A file of such keys, one per line; lines that begin with # are skipped."
    no_api_key: Annotated[bool, Parameter(negative=())] = False
    "Allow requests without a key even if --host can be reached from other machines."
    share_cache: Annotated[bool, Parameter(negative=())] = False
    """Let callers with different keys reuse each other's prompts. By default each key has its own
    cache: the time to the first token would reveal that another key sent the same prompt."""
    allowed_host: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A further host name by which clients reach a server without keys; may be repeated. Names
    other than these and the machine's own are refused, so that no page in a browser can pass for
    this server."""
    cors_origin: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """An origin with pages that may use the server, such as https://app.example, or * for any; may
    be repeated."""

    def keys(self, host: str) -> tuple[str, ...]:
        """All keys from all sources. Raises UserError, also if a key is required and there is
        none."""
        from serve.policy import is_loopback

        if any(not key.strip() for key in self.api_key):
            raise UserError("--api-key is empty: leave it out to require no key")
        found = checked_keys((*self.api_key, *self._of_file())) + environment_keys()
        if found and self.no_api_key:
            raise UserError(f"--no-api-key, but there are keys (--api-key, {VARIABLE}): choose")
        if not found and not self.no_api_key and not is_loopback(host):
            raise UserError(
                f"--host {host} can be reached from other machines: set --api-key, --api-key-file "
                f"or {VARIABLE}, or pass --no-api-key"
            )
        return found

    def policy(self, host: str, keys: tuple[str, ...]) -> AccessPolicy:
        """The policy for Host headers and CORS."""
        from serve.policy import AccessPolicy

        hosts = None if keys else frozenset(self.allowed_host)
        return AccessPolicy(hosts, host, self.cors_origin)

    def _of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise UserError(f"--api-key-file: {self.api_key_file} holds no key")
        return keys
