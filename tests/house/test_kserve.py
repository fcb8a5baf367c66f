"""deploy/kserve: the manifests name each other, the image, routes and options that there are; and
KServe's own definitions take them, where KSERVE_CRDS is a folder that holds them."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fastapi.routing import APIRoute

from serve.lifecycle import Lifecycle, lifecycle_routes
from specdec.cli import app
from specdec.cli.serve import serve
from tests.support.places import ROOT

FOLDER = ROOT / "deploy/kserve"
RUNTIME = yaml.safe_load((FOLDER / "runtime.yaml").read_text())
SERVICE = yaml.safe_load((FOLDER / "service.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]
PREDICTOR = SERVICE["spec"]["predictor"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
CRDS = os.environ.get("KSERVE_CRDS")
"""A folder of inferenceservices.yaml and servingruntimes.yaml, as docs/guide/replicas.md has it."""


def given() -> dict[str, Any]:
    """What `specdec` is started with: KServe puts the service's arguments after the runtime's."""
    command, *arguments = [*CONTAINER["args"], *PREDICTOR["model"]["args"]]
    named = [argument.replace("{{.Name}}", SERVICE["metadata"]["name"]) for argument in arguments]
    found, bound, _ = app.parse_args([command, *named], exit_on_error=False, print_error=False)
    assert CONTAINER["command"] == ["specdec"] and inspect.unwrap(found) is serve
    return bound.arguments


def test_the_service_names_the_runtime():
    model = PREDICTOR["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"] in RUNTIME["spec"]["supportedModelFormats"]
    assert CONTAINER["name"] == "kserve-container"  # which KServe looks for


def test_the_server_understands_its_options():
    options = given()
    (port,) = CONTAINER["ports"]
    assert options["port"] == port["containerPort"]
    assert options["served_model_name"] == [SERVICE["metadata"]["name"]]
    assert options["drain_seconds"] < PREDICTOR["terminationGracePeriodSeconds"]
    assert options["model"].model == "/mnt/models"
    assert options["speculation"].drafter == "assistant"
    (key,) = (one for one in CONTAINER["env"] if one["name"] == "SPECDEC_API_KEY")
    assert key["valueFrom"].keys() == {"secretKeyRef"}


def test_probes_ask_what_the_server_answers():
    routes = lifecycle_routes(Lifecycle()).routes
    answered = {route.path for route in routes if isinstance(route, APIRoute)}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] in answered and asked["port"] == given()["port"]
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"
    scraped = RUNTIME["spec"]["annotations"]
    assert scraped["prometheus.kserve.io/port"] == str(given()["port"])


def test_it_runs_as_the_image_does():
    assert f"USER {CONTAINER['securityContext']['runAsUser']}\n" in DOCKERFILE
    written = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {*re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)} < written  # all else is read-only
    volumes = {volume["name"] for volume in RUNTIME["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    resources = CONTAINER["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.skipif(CRDS is None, reason="KSERVE_CRDS names no folder")
@pytest.mark.parametrize("manifest", [RUNTIME, SERVICE], ids=lambda manifest: manifest["kind"])
def test_kserve_takes_it(manifest):
    definition = yaml.safe_load(
        (Path(CRDS or "") / f"{manifest['kind'].lower()}s.yaml").read_text()
    )
    group, _, version = manifest["apiVersion"].partition("/")
    spec = definition["spec"]
    assert (spec["group"], spec["names"]["kind"]) == (group, manifest["kind"])
    (schema,) = (one["schema"] for one in spec["versions"] if one["name"] == version)
    strict = strictly(schema["openAPIV3Schema"])
    jsonschema.validate(manifest, strict)
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        jsonschema.validate(manifest | {"spec": manifest["spec"] | {"surprise": 1}}, strict)


def strictly(schema: Any) -> Any:
    """A definition's schema as strict JSON Schema: unknown names are refused (a cluster would drop
    them), and numbers may be strings where Kubernetes allows it."""
    if isinstance(schema, list):
        return [strictly(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strictly(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault(
            "additionalProperties", bool(schema.get(f"{KUBERNETES}preserve-unknown-fields"))
        )
    if schema.get(f"{KUBERNETES}int-or-string"):
        made.pop("type", None)
    return made


KUBERNETES = "x-kubernetes-"
