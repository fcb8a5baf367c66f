"""`specdec serve`: an OpenAI-compatible server on one engine."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

from drafters.registry import resolved
from specdec.assembly.model import Model
from specdec.cli import topics
from specdec.cli.access import AccessConfig
from specdec.cli.console import console, say_compiled, say_prefix_cache
from specdec.cli.hosts import HostsConfig, joined
from specdec.cli.logs import LogLevel, logged
from specdec.cli.signals import Signals, end_by, signals_heard
from specdec.cli.start import SHOWN, started
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.control_channel import ControlChannel
from specdec.core.errors import UserError
from targets.backend import meter_of

if TYPE_CHECKING:
    from serve.server import Server


def serve(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    prefix: topics.Prefix = PrefixConfig(),  # noqa: B008
    hosts: HostsConfig = HostsConfig(),  # noqa: B008
    access: AccessConfig = AccessConfig(),  # noqa: B008
    host: str = "127.0.0.1",
    port: int = 8000,
    max_waiting: int = 256,
    served_model_name: str | None = None,
    drain_seconds: float = 30.0,
    log_level: LogLevel = "info",
    otlp_traces_endpoint: str | None = None,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /health, /ready and /metrics.

    It listens at once and says 503 while the model loads. SIGTERM and Ctrl-C drain it.

    Parameters
    ----------
    host
        Address to listen on; 0.0.0.0 for every network, which asks for an API key.
    port
        Port to listen on.
    max_waiting
        Requests that may wait for a slot; more are answered 429 with Retry-After.
    served_model_name
        The model's name in the API; by default its folder's.
    drain_seconds
        How long running requests may go on after SIGTERM or Ctrl-C, while new ones get 503.
        A second signal ends them at once.
    log_level
        What the log on stderr tells. info: a line for each request, with its X-Request-Id and
        token counts; debug: also of health checks; warning: only what goes wrong.
    otlp_traces_endpoint
        Where to send an OpenTelemetry span for each request, such as http://127.0.0.1:4318. It
        tells what was asked for and how speculation fared, never what was said.
    """
    from serve.api import create_app
    from serve.lockstep import Leader, lead_budget
    from serve.runner import EngineRunner
    from serve.server import Server
    from serve.stage import Stage
    from serve.traces import traced

    if max_waiting < 0:
        raise UserError(f"max-waiting must be 0 or more, got {max_waiting}")
    if drain_seconds < 0:
        raise UserError(f"drain-seconds must be 0 or more, got {drain_seconds}")
    keys = access.keys(host)
    policy = access.policy(host, keys)
    speculation = resolved(speculation, model)
    meeting = joined(hosts, model, speculation, prefix, max_waiting=max_waiting)
    with logged(log_level), traced(otlp_traces_endpoint) as around, meeting as lines:
        if lines is not None and not lines.leads:
            _follow(model, speculation, prefix, max_waiting, lines)
            return
        stage = Stage()
        with _listen(host, port) as listener, Server(listener, stage, policy, around) as server:
            shown = stage.telling(SHOWN)
            loaded, engine = started(model, speculation, max_waiting, shown, prefix)
            say_compiled(loaded.backend)
            _say_memory(loaded)
            say_prefix_cache(loaded, prefix)
            if lines is not None:
                lead_budget(engine, lines.send)
            name = served_model_name or loaded.name
            leader = None if lines is None else Leader(lines.send)
            runner = EngineRunner(engine, leader)
            app = create_app(
                runner,
                loaded.tokenizer,
                name,
                drafter=speculation.drafter,
                k=speculation.k,
                api_keys=keys,
                stage=stage,
                share_cache=access.share_cache,
            )
            with signals_heard() as signals:
                server.open(app)
                console.print(
                    f"serving [bold]{name}[/bold] at http://{host}:{port}/v1 (drafter "
                    f"{speculation.drafter}, K = {speculation.k}, {engine.target.slots} slots), "
                    f"with a page to look at: http://{host}:{port}/"
                )
                number = _until_ended(server, signals, drain_seconds)
        if leader is not None and lines is not None:
            leader.end()
            lines.close()
    end_by(number)


def _until_ended(server: Server, signals: Signals, drain_seconds: float) -> int:
    """Wait for a signal and drain. Returns its number."""
    while (number := signals.take(timeout=1.0)) is None:
        assert server.alive, "the web server's thread has ended"
    console.print(f"draining: running requests have {drain_seconds:g} s to end", markup=False)
    if not server.drain(drain_seconds, lambda seconds: signals.take(seconds) is not None):
        console.print("the engine does not end: giving it up", markup=False)
        sys.stdout.flush()
        os._exit(128 + number)  # an orderly exit would wait for its thread
    return number


def _follow(
    model: ModelConfig,
    speculation: SpeculationConfig,
    prefix: PrefixConfig,
    max_waiting: int,
    lines: ControlChannel,
) -> None:
    """What a process other than 0 does: the same start, and then the same steps."""
    from serve.lockstep import follow, follow_budget
    from specdec.constraints.constraint import unpacked
    from specdec.constraints.vocabulary import Vocabulary

    loaded, engine = started(model, speculation, max_waiting, prefix=prefix)
    follow_budget(engine, lines.receive)
    vocabulary = Vocabulary(loaded.tokenizer)
    with signals_heard(most=1):  # process 0 drains, and needs this one for it
        follow(engine, lines.receive, lambda packed: unpacked(packed, vocabulary))


def _say_memory(model: Model) -> None:
    """What is left when all is ready tells an operator how many more slots would fit."""
    held = meter_of(model.target).memory()
    if held is not None:
        weights, cache, used = (held[part] / 1e9 for part in ("weights", "cache", "used"))
        console.print(
            f"[dim]{used:.1f} GB of GPU memory in use: weights {weights:.1f}, K/V cache "
            f"{cache:.1f}, all else {used - weights - cache:.1f}[/dim]"
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
