"""`specdec compile`: fill the cache of compiled programs, so that a served start has them all."""

from __future__ import annotations

import time

from drafters.registry import resolved
from specdec.cli import topics
from specdec.cli.console import command_record, console, print_json, say_compiled
from specdec.cli.hosts import HostsConfig, joined
from specdec.cli.start import started
from specdec.core.config import ModelConfig, PrefixConfig


def compile(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    prefix: topics.Prefix = PrefixConfig(),  # noqa: B008
    hosts: HostsConfig = HostsConfig(),  # noqa: B008
    json: topics.Json = False,
) -> None:
    """Do all that `specdec serve` does before its first request, and keep the compiled programs.

    A program is compiled for a model's shapes, --slots, --max-len, --k, --drafter, --loop,
    --dtype, --tp, the device and the versions of jax. Other commands reuse the programs that match
    and compile the rest. Of several processes only process 0 writes: let all read its folder. With
    cuda, kernels are compiled and kept in their own folder.
    """
    began = time.perf_counter()
    speculation = resolved(speculation, model)
    with joined(hosts, model, speculation, prefix):
        loaded, _ = started(model, speculation, prefix=prefix)
        say_compiled(loaded.backend)
        took = time.perf_counter() - began
        console.print(f"ready after {took:.1f} s; start `specdec serve` alike")
        if json:
            topics_ = {"speculation": speculation, "prefix": prefix, "hosts": hosts}
            record = command_record("compile", model=loaded.config, **topics_)
            found, made = loaded.backend.compiled() or (None, None)
            print_json(record | {"programs": {"found": found, "compiled": made}})
