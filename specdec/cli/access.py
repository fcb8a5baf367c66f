"""Who may use a server: the options, and the keys that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from serve.key_sources import VARIABLE, checked_keys, environment_keys
from specdec.cli.console import read_text
from specdec.core.errors import UserError

if TYPE_CHECKING:
    from serve.policy import AccessPolicy


@Parameter(name="*", group="Access")
@dataclass(frozen=True)
class AccessConfig:
    api_key: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A key, one of which clients must send as bearer token; may be repeated. The environment's
    SPECDEC_API_KEY (several with commas between) and --api-key-file add theirs, unseen by others on
    this machine. Nothing is asked by default."""
    api_key_file: Path | None = None
    "A file of such keys, one per line; lines that begin with # are skipped."
    no_api_key: Annotated[bool, Parameter(negative=())] = False
    "Serve anybody who reaches a --host beyond this machine, without a key."
    share_cache: Annotated[bool, Parameter(negative=())] = False
    """Let callers with different keys reuse each other's prompts. Apart by default: the time to the
    first token tells that somebody sent the same before."""
    allowed_host: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A further name by which clients reach a server without keys; may be repeated. Others than the
    machine's own are refused, so that no page in a browser can pass for this server."""
    cors_origin: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """An origin whose pages may use the server, as https://app.example, or * for any; may be
    repeated."""

    def keys(self, host: str) -> tuple[str, ...]:
        """All keys, of every source. Raises UserError, too where there should be one."""
        from serve.policy import is_loopback

        if any(not key.strip() for key in self.api_key):
            raise UserError("--api-key is empty: leave it out to ask for none")
        found = checked_keys((*self.api_key, *self._of_file())) + environment_keys()
        if found and self.no_api_key:
            raise UserError(f"--no-api-key, but there are keys (--api-key, {VARIABLE}): choose")
        if not found and not self.no_api_key and not is_loopback(host):
            raise UserError(
                f"--host {host} lets others than this machine in: set --api-key, --api-key-file or "
                f"{VARIABLE}, or say --no-api-key"
            )
        return found

    def policy(self, host: str, keys: tuple[str, ...]) -> AccessPolicy:
        """What is asked of callers beside a key."""
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
