"""Replicas on Ray Serve: `serve run specdec.replicas:app model=mini replicas=3`.

Each replica is an engine with its OpenAI-compatible server, in a process and on a card of its own.
All replicas give the same answers: a request that is sent again because its replica has died gets
the same tokens, if it is greedy or has a seed.

Arguments are the fields of `ReplicaSettings`, and the command line's options by their names (k,
slots, max_len, backend, dtype ...). SPECDEC_API_KEY in the environment of `serve run` contains
keys; clients must send one of them. Invalid arguments raise UserError before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import start_http_server
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from drafters import registry
from serve.api import create_app
from serve.key_sources import environment_keys
from serve.prometheus_files import leave_with, tell_prometheus
from serve.runner import EngineRunner
from specdec.assembly.engine import require_exact, serving_engine
from specdec.assembly.model import load_model
from specdec.audit.identity import identity_of
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.llm import configured

ray: Any = import_module("ray")  # an extra, which need not be there where types are checked
ray_serve: Any = import_module("ray.serve")

WAITING = 256
"""Requests that may wait in a replica for a slot."""


class ReplicaSettings(BaseModel):
    """How many replicas, and what each has."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = 1
    """Number of replicas, or the fewest if `max_replicas` is set."""
    max_replicas: int | None = None
    """More are started up to this number while requests wait; None: `replicas`, no more."""
    cards: float | None = None
    """GPUs of a replica; by default `tp` with backend=cuda on GPUs, else 0."""
    cpus: float = 1
    metrics: Path | None = None
    """A folder: each replica serves its metrics on its own port and writes a file here with its
    address, for Prometheus (file_sd_configs). /metrics of the proxy is answered by one arbitrary
    replica."""
    name: str | None = None
    """The model's name in the API; by default its folder's."""


class Replica:
    """The deployment's class, with Ray's health check of this process's engine."""

    runner: EngineRunner | None = None

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed; Ray then replaces the replica."""
        if Replica.runner is not None and Replica.runner.failure is not None:
            raise RuntimeError(Replica.runner.failure)


def app(args: dict[str, Any]) -> Any:
    """The `ray.serve.Application` that `serve run` and `serve.run` start. Raises UserError."""
    own = {name: args[name] for name in ReplicaSettings.model_fields if name in args}
    settings = _parsed(ReplicaSettings, own)
    rest = {name: value for name, value in args.items() if name not in own}
    config, speculation, prefix = _options(rest)
    on_card = config.backend == "cuda" and config.device != "cpu"
    cards = settings.cards if settings.cards is not None else float(config.tp if on_card else 0)
    build = partial(_replica_app, config, speculation, prefix, settings, environment_keys())
    deployment = ray_serve.deployment(
        ray_serve.ingress(_named(build))(Replica),
        name="specdec",
        ray_actor_options={"num_gpus": cards, "num_cpus": settings.cpus},
        max_ongoing_requests=config.slots + WAITING,
        health_check_period_s=5,
        **_scale(settings, config.slots),
    )
    return deployment.bind()


def _scale(settings: ReplicaSettings, slots: int) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    if settings.max_replicas < settings.replicas:
        raise UserError(f"max_replicas must be at least replicas, {settings.replicas}")
    bounds = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
    return {"autoscaling_config": bounds | {"target_ongoing_requests": slots}}


def _options(values: dict[str, Any]) -> tuple[ModelConfig, SpeculationConfig, PrefixConfig]:
    """The configurations; strings from `serve run` are parsed as the fields' types."""
    typed: dict[str, Any] = {}
    for kind in (ModelConfig, registry.config_type(), PrefixConfig):
        names = kind.__dataclass_fields__.keys() & values.keys()
        parsed = _parsed(kind, {name: values[name] for name in names})
        typed |= {name: getattr(parsed, name) for name in names}
    rest = values | typed
    model = rest.pop("model", ModelConfig.model)
    drafter = rest.pop("drafter", SpeculationConfig.drafter)
    return configured(model, drafter, rest.pop("k", SpeculationConfig.k), rest)


def _parsed(kind: type, values: dict[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(f"{name}: {first['msg']}, got {first['input']!r}") from None


def _named(build: Callable[[], FastAPI]) -> Callable[[], FastAPI]:
    """`build` as a function, because Ray reads its `__name__`."""

    def app() -> FastAPI:
        return build()

    return app


def _replica_app(
    config: ModelConfig,
    speculation: SpeculationConfig,
    prefix: PrefixConfig,
    settings: ReplicaSettings,
    keys: tuple[str, ...],
) -> FastAPI:
    """Load, check and warm up the model, and make the app that a replica's process serves."""
    model = load_model(config, speculation)
    require_exact(model, speculation)
    engine = serving_engine(model, speculation, WAITING, prefix)
    Replica.runner = runner = EngineRunner(engine)
    replica = ray_serve.get_replica_context().replica_id.unique_id
    made = create_app(
        runner,
        model.tokenizer,
        settings.name or model.name,
        drafter=speculation.drafter,
        k=speculation.k,
        api_keys=keys,
        engine_label=replica,
        identity=identity_of(model),
        vision=model.target.vision,
    )
    if settings.metrics is not None:
        server, _ = start_http_server(0, registry=made.state.metrics.registry)
        host = ray.util.get_node_ip_address()
        leave_with(made, tell_prometheus(settings.metrics, replica, host, server.server_port))
    return made
