"""`specdec serve`: an OpenAI-compatible server on one engine."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import Parameter

from drafters.registry import resolved
from specdec.assembly.model import Model
from specdec.audit.identity import identity_of
from specdec.audit.making import Identity
from specdec.cli import topics
from specdec.cli.access import AccessConfig
from specdec.cli.console import console, say_compiled, say_pictures, say_prefix_cache
from specdec.cli.failure import say_failure
from specdec.cli.hosts import HostsConfig, joined
from specdec.cli.logs import LogLevel, logged
from specdec.cli.signals import Signals, end_by, signals_heard
from specdec.cli.start import SHOWN, started
from specdec.cli.stderr import drain_stderr, make_stderr_patient
from specdec.core.config import Common, ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.control_channel import ControlChannel
from specdec.core.errors import UserError
from targets.backend import meter_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from serve.lifecycle import Lifecycle
    from serve.lockstep import Leader
    from serve.server import Server
    from serve.traces import Around
    from specdec.core.engine import Engine

ServedNames = Annotated[list[str] | None, Common, Parameter(consume_multiple=True, negative=())]
Hosts = Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())]


def serve(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    prefix: topics.Prefix = PrefixConfig(),  # noqa: B008
    hosts: HostsConfig = HostsConfig(),  # noqa: B008
    access: AccessConfig = AccessConfig(),  # noqa: B008
    host: Annotated[str, Common] = "127.0.0.1",
    port: Annotated[int, Common] = 8000,
    max_waiting: Annotated[int, Common] = 256,
    served_model_name: ServedNames = None,
    drain_seconds: float = 30.0,
    log_level: LogLevel = "info",
    otlp_traces_endpoint: str | None = None,
    image_hosts: Hosts = None,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /health, /ready and /metrics.

    It listens at once and answers 503 while the model loads. SIGTERM and Ctrl-C drain it.

    Parameters
    ----------
    host
        Address to listen on; 0.0.0.0 for every network, which requires an API key.
    port
        Port to listen on.
    max_waiting
        Requests that may wait for a slot; more are answered 429 with Retry-After.
    served_model_name
        The model's name in the API; by default its folder's. Of several names the first one is
        that of metrics, and requests may use any.
    drain_seconds
        How long running requests may go on after SIGTERM or Ctrl-C, while new ones get 503; inf:
        until they end. A second signal ends them at once.
    log_level
        Level of the log on stderr. info: a line for each request, with its X-Request-Id and
        token counts; debug: health checks too; warning: only problems.
    otlp_traces_endpoint
        Where to send an OpenTelemetry span for each request, such as http://127.0.0.1:4318. A
        span has the request's parameters, usage and acceptance, but no content.
    image_hosts
        Hosts from which pictures are fetched (https, public addresses, no redirects), such as
        images.example.org, or .example.org for all below. By default none: pictures come as data.
    """
    from serve.traces import traced

    make_stderr_patient()
    _check_at_least_zero("max-waiting", max_waiting)
    _check_at_least_zero("drain-seconds", drain_seconds)
    speculation = resolved(speculation, model)
    names = tuple(served_model_name or ())
    start = _Start(model, speculation, prefix, max_waiting)
    hosts_of_images = tuple(image_hosts or ())
    door = _Door(host, port, access, access.keys(host), names, drain_seconds, hosts_of_images)
    meeting = joined(hosts, model, speculation, prefix, max_waiting=max_waiting)
    with logged(log_level), traced(otlp_traces_endpoint) as around, meeting as lines:
        if lines is not None and not lines.leads:
            _follow(start, lines)
            return
        number = _lead(start, door, around, lines)
    drain_stderr()
    end_by(number)


@dataclass(frozen=True)
class _Start:
    """The configuration of an engine."""

    model: ModelConfig
    speculation: SpeculationConfig
    prefix: PrefixConfig
    max_waiting: int


@dataclass(frozen=True)
class _Door:
    """Address, access and name of the server."""

    host: str
    port: int
    access: AccessConfig
    keys: tuple[str, ...]
    names: tuple[str, ...]
    """The model's names in the API; none: its folder's."""
    drain_seconds: float
    image_hosts: tuple[str, ...] = ()
    """From which pictures are fetched; none: they come as data alone."""


def _check_at_least_zero(name: str, value: float) -> None:
    if not value >= 0:  # nor nan
        raise UserError(f"{name} must be 0 or more, got {value}")


def _lead(start: _Start, door: _Door, around: Around, lines: ControlChannel | None) -> int:
    """Listen, load, serve and drain. Returns the number of the signal that ended it."""
    from serve.lifecycle import Lifecycle
    from serve.lockstep import Leader
    from serve.server import Server

    lifecycle, policy = Lifecycle(), door.access.policy(door.host, door.keys)
    leader = None if lines is None else Leader(lines.send)
    with (
        _listen(door.host, door.port) as listener,
        Server(listener, lifecycle, policy, around) as server,
    ):
        loaded, engine = _loaded(start, lifecycle, lines)
        with lifecycle.telling(SHOWN)("digesting the weights"):
            identity = identity_of(loaded)
        app = _app(start, door, lifecycle, loaded, engine, leader, identity)
        with signals_heard() as signals:
            server.open(app)
            _say_where(start, door, loaded, engine, listener.getsockname()[1])
            number = _until_ended(server, lifecycle, signals, door.drain_seconds)
    if leader is not None and lines is not None:
        leader.end()
        lines.close()
    return number


def _loaded(
    start: _Start, lifecycle: Lifecycle, lines: ControlChannel | None
) -> tuple[Model, Engine]:
    """Load the model and its engine; prints memory, compiled programs and the prefix cache."""
    from serve.lockstep import lead_budget

    shown = lifecycle.telling(SHOWN)
    loaded, engine = started(start.model, start.speculation, start.max_waiting, shown, start.prefix)
    say_compiled(loaded.backend)
    _say_memory(loaded)
    say_prefix_cache(loaded, start.prefix)
    say_pictures(loaded)
    if lines is not None:
        lead_budget(engine, lines.send)
    return loaded, engine


def _app(
    start: _Start,
    door: _Door,
    lifecycle: Lifecycle,
    loaded: Model,
    engine: Engine,
    leader: Leader | None,
    identity: Identity,
) -> FastAPI:
    from serve.api import create_app
    from serve.runner import EngineRunner

    return create_app(
        EngineRunner(engine, leader),
        loaded.tokenizer,
        (door.names or (loaded.name,))[0],
        aliases=door.names[1:],
        drafter=start.speculation.drafter,
        k=start.speculation.k,
        api_keys=door.keys,
        lifecycle=lifecycle,
        share_cache=door.access.share_cache,
        identity=identity,
        vision=loaded.target.vision,
        image_hosts=door.image_hosts,
    )


def _say_where(start: _Start, door: _Door, loaded: Model, engine: Engine, port: int) -> None:
    """port: that was taken, where --port is 0."""
    host = f"[{door.host}]" if ":" in door.host else door.host
    address = f"http://{host}:{port}"
    console.print(
        f"serving [bold]{', '.join(door.names) or loaded.name}[/bold] at {address}/v1 (drafter "
        f"{start.speculation.drafter}, K = {start.speculation.k}, {engine.target.slots} slots), "
        f"with a page to look at: {address}/"
    )


def _until_ended(
    server: Server, lifecycle: Lifecycle, signals: Signals, drain_seconds: float
) -> int:
    """Wait for a signal and drain. Returns its number. If the engine fails, the process ends."""
    while (number := signals.take(timeout=1.0)) is None:
        assert server.alive, "the web server's thread has ended"
        if lifecycle.status == "failed":
            _end_failed(server, lifecycle)
    time = f"have {drain_seconds:g} s to" if drain_seconds < math.inf else "may"
    console.print(f"draining: running requests {time} end", markup=False)
    if not server.drain(drain_seconds, lambda seconds: signals.take(seconds) is not None):
        console.print("the engine does not end: giving it up", markup=False)
        sys.stdout.flush()
        drain_stderr()
        os._exit(128 + number)  # an orderly exit would wait for its thread
    return number


def _end_failed(server: Server, lifecycle: Lifecycle) -> NoReturn:
    """End with exit code 1, so that a supervisor restarts the server. An orderly exit might wait
    for a lost device; other processes of this server end when their connections close."""
    server.finish_answers()
    say_failure(f"{lifecycle.report()['doing']}: the server ends")
    drain_stderr()
    os._exit(1)


def _follow(start: _Start, lines: ControlChannel) -> None:
    """Run a process other than 0: the same start, then the same steps as process 0."""
    from serve.lockstep import follow, follow_budget
    from specdec.constraints.constraint import unpacked
    from specdec.constraints.vocabulary import Vocabulary

    loaded, engine = started(start.model, start.speculation, start.max_waiting, prefix=start.prefix)
    follow_budget(engine, lines.receive)
    vocabulary = Vocabulary(loaded.tokenizer)
    vocabulary.load()
    with signals_heard(most=1):  # process 0 drains, and needs this one for it
        follow(engine, lines.receive, lambda packed: unpacked(packed, vocabulary))


def _say_memory(model: Model) -> None:
    """Print the GPU memory in use, from which an operator can see how many more slots would fit."""
    held = meter_of(model.target).memory()
    if held is not None:
        parts = "weights", "copies", "cache", "used"
        weights, copies, cache, used = (held[part] / 1e9 for part in parts)
        of_it = f" ({copies:.1f} of it second copies)" if copies else ""
        each = f" on each of {held['cards']} cards" if held["cards"] > 1 else ""
        console.print(
            f"[dim]{used:.1f} GB of GPU memory in use{each}: weights {weights:.1f}{of_it}, K/V "
            f"cache {cache:.1f}, all else {used - weights - cache:.1f}[/dim]"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded: a port in use should not cost a minute."""
    if not 0 <= port <= 65535:
        raise UserError(f"port must be 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as problem:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({problem.strerror}): choose another --port or --host"
        ) from None
    return listener
