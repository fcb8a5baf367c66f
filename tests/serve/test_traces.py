"""A span for each request, as a collector gets it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve.traces import traced
from specdec.core.errors import UserError
from tests.support.serving import LONG, ServedTarget, Server, serving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP, on a port of its own."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        took = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                took._take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(told(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


def told(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(v) for v in found.values] if kind == "array_value" else found

    return {a.key: plain(a.value) for a in attributes}


@contextmanager
def tracing(**faults: Any) -> Iterator[tuple[Server, Collector]]:
    """A server that is traced. Spans are there after its end: shutting down sends them."""
    with Collector().listening() as collector:
        target = ServedTarget(slots=2)
        with traced(collector.url) as around, serving(target, around=around) as server:
            for name, value in faults.items():
                setattr(target, name, value)
            yield server, collector


ASK = {"prompt": "abcabc", "max_tokens": 30, "temperature": 0.5, "seed": LONG}


def test_a_span_tells_what_was_asked_and_what_came_of_it():
    with tracing() as (server, collector):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        reply = httpx.post(f"{server.url}/v1/completions", json=ASK, headers=headers)
    body = reply.json()
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "text_completion fake" and span.kind == span.SPAN_KIND_SERVER
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "specdec"
    known, counts = told(span.attributes), body["metrics"]["speculative_decoding"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    first = known.pop("gen_ai.latency.time_to_first_token")
    assert 0 <= known.pop("gen_ai.latency.time_in_queue") < first < seconds
    assert round(known.pop("specdec.tau"), 4) == counts["tokens_per_pass"]
    assert known == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": [body["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": body["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "specdec.drafter": "drafter",
        "specdec.k": 4,
        "specdec.verify_passes": counts["verify_passes"],
        "specdec.draft_tokens": counts["draft_tokens"],
        "specdec.accepted_tokens": counts["accepted_tokens"],
    }


def test_streams_chats_refusals_and_probes():
    with tracing() as (server, collector):
        chat = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5}
        for body in (chat | {"stream": True, "n": 2}, chat | {"temperature": "hot"}):
            httpx.post(f"{server.url}/v1/chat/completions", json=body)
        for path in ("health", "metrics", "v1/models", ""):
            httpx.get(f"{server.url}/{path}")
    stream, refused = collector.spans
    known = told(stream.attributes)
    assert stream.name == "chat fake" and len(known["gen_ai.response.finish_reasons"]) == 2
    assert stream.parent_span_id == b""
    assert refused.name == "POST /v1/chat/completions"
    assert told(refused.attributes)["http.response.status_code"] == 400
    assert refused.status.code == refused.status.STATUS_CODE_UNSET, "the client's fault"
    assert "secret" not in json.dumps([told(s.attributes) for s in collector.spans])


def test_a_client_that_left_its_stream_is_a_499():
    body = ASK | {"stream": True, "ignore_eos": True}
    with tracing(pause=0.02) as (server, collector):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        server.wait_until_idle()
    (span,) = collector.spans
    known = told(span.attributes)
    assert known["http.response.status_code"] == 499
    assert known["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_server_is_an_error(stream):
    with tracing(poisoned=True) as (server, collector):
        body = ASK | {"prompt": "aZb", "stream": stream}
        assert "error" in httpx.post(f"{server.url}/v1/completions", json=body).text
    (span,) = collector.spans
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert told(span.attributes)["gen_ai.response.finish_reasons"] == ["error"]


def test_without_an_endpoint_nothing_goes_around():
    app: Any = object()
    with traced(None) as around:
        assert around(app) is app


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4318", "ftp://a/b", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(UserError, match="--otlp-traces-endpoint must be a URL"), traced(endpoint):
        pass


def test_without_opentelemetry_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"pip install '\.\[otel\]' in specdec's clone"):
        with traced("http://127.0.0.1:4318"):
            pass
