"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from engine.contracts.events import ProxiedEvent, RequestEvent, RequestParameters
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, one_of_each, request_event
from engine_plugins.exporter import otlp
from engine_plugins.exporter.config import OtlpConfig
from engine_plugins.exporter.otlp import OtlpExporter, rejected_spans
from engine_plugins.exporter.otlp_spans import PHASES, SERVER

from .receiver import Reply, receiving
from .strict_otlp import Span, decoded

TRACE, PARENT, OWN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
SENT = f"00-{TRACE}-{PARENT}-01"
ASKED = RequestParameters("chat", True, 2, 0.7, 0.9, 40, 1234)


def request(**changes: Any) -> RequestEvent:
    event = request_event(time.monotonic(), cached_tokens=4, drafted_tokens=3, accepted_tokens=2, max_tokens=64)
    return msgspec.structs.replace(event, request_id="chatcmpl-abc-0", parameters=ASKED, **changes)


def exported(*events: Any, **config: Any) -> tuple[dict[str, Any], list[Span]]:
    """What a collector was sent; it is decoded strictly."""
    with receiving() as server:
        exporter = OtlpExporter(OtlpConfig(endpoint=server.url + "/v1/traces", **config), build_context())
        exporter.export(events)
        exporter.close()
        if not server.posted:
            return {}, []
        (posted,) = server.posted
        assert (posted.path, posted.headers["Content-Type"]) == ("/v1/traces", "application/json")
        return decoded(posted.body)


class TestConformance(ExporterConformance):
    """The collector is away: whatever was exported is counted as dropped."""

    def make(self) -> OtlpExporter:
        return OtlpExporter(OtlpConfig(endpoint="http://127.0.0.1:9"), build_context())

    @pytest.fixture(autouse=True)
    def at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(otlp, "GATHER_S", 60.0)


def test_a_request_is_a_span_with_the_conventions_attributes():
    resource, (span, *_) = exported(request(engine="replica-1"), service_name="chatbot")
    assert resource == {"service.name": "chatbot"}
    assert (span.name, span.kind, span.status) == (f"chat {build_context().model.name}", SERVER, 0)
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "engine",
        "gen_ai.request.model": build_context().model.name,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 1234,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-abc",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.02,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "engine.id": "replica-1",
        "engine.drafted_tokens": 3,
        "engine.accepted_tokens": 2,
        "engine.preemptions": 0,
        "server.address": "127.0.0.1",
        "server.port": 8000,
    }


def test_phases_follow_each_other_inside_and_add_up_to_the_request():
    _, (span, *phases) = exported(request(receive_ms=1.0, route_ms=0.25, unattributed_ms=-0.25))
    assert [phase.name for phase in phases] == ["receive", "tokenize", "route", "queue", "prefill", "decode"]
    assert all((phase.trace, phase.parent) == (span.trace, span.id) for phase in phases)
    ends = [phase.end_ns for phase in phases]
    assert [phase.start_ns for phase in phases] == [span.start_ns, *ends[:-1]]
    _, (span, *phases) = exported(request())
    assert phases[-1].end_ns == span.end_ns and phases[-1].name == "unattributed"
    assert set(PHASES) >= {phase.name for phase in phases}


def test_times_are_those_of_the_clock_on_the_wall():
    before = time.time_ns()
    _, (span, *_) = exported(request())
    assert before - 1e9 <= span.end_ns <= time.time_ns() and span.end_ns - span.start_ns == 60_000_000


def test_a_request_belongs_to_the_clients_trace():
    _, (span, *_) = exported(request(traceparent=SENT, span_id=OWN))
    assert (span.trace, span.parent, span.id) == (TRACE, PARENT, OWN)


def test_a_request_without_a_trace_begins_one_of_its_own():
    _, spans = exported(request(), request())
    roots = [span for span in spans if not span.parent]
    assert len(roots) == 2 and roots[0].trace != roots[1].trace


def test_a_trace_that_is_not_sampled_is_not_exported():
    assert exported(request(traceparent=SENT[:-1] + "0", span_id=OWN)) == ({}, [])


def test_an_error_is_one_and_an_abort_is_none():
    _, (failed, *_) = exported(request(finish_reason="error", output_tokens=0))
    assert (failed.status, failed.attributes["error.type"]) == (2, "engine_failed")
    assert "gen_ai.response.time_to_first_chunk" not in failed.attributes
    _, (aborted, *_) = exported(request(finish_reason="abort"))
    assert (aborted.status, aborted.attributes["gen_ai.response.finish_reasons"]) == (0, ["abort"])


def test_a_request_passed_on_is_a_span_with_the_other_server():
    event = ProxiedEvent(time.monotonic(), "cmpl-b", "completion", "10.0.0.2:8000", 502, 30.0, SENT, OWN)
    _, (span,) = exported(event)
    assert span.name.startswith("text_completion ") and span.status == 2
    assert (span.trace, span.parent, span.id) == (TRACE, PARENT, OWN)
    assert (span.attributes["engine.proxied_to"], span.attributes["error.type"]) == ("10.0.0.2:8000", "502")


def test_no_attribute_holds_text_of_a_request():
    _, spans = exported(*one_of_each())
    assert not [key for span in spans for key in span.attributes if "messages" in key or "stop_seq" in key]


def test_what_a_collector_does_not_take_is_counted():
    with receiving(Reply(body=b'{"partialSuccess": {"rejectedSpans": "1"}}')) as server:
        exporter = OtlpExporter(OtlpConfig(endpoint=server.url), build_context())
        exporter.export([request(), request()])
        exporter.close()
        page = exporter.render()
    assert "engine_otlp_requests_sent_total" in page and page.count("} 1.0\n") == 2
    assert [rejected_spans(body) for body in (b"", b"{}", b'{"partialSuccess": {}}', b"[1]", b"x")] == [0] * 5


def test_keys_come_from_a_file_and_go_with_each_body(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("X-Api-Key: secret:1\n\nX-Team: a b\n")
    with receiving() as server:
        config = OtlpConfig(endpoint=server.url, headers_file=str(keys))
        exporter = OtlpExporter(config, build_context())
        exporter.export([request()])
        exporter.close()
        headers = server.posted[0].headers
    assert (headers["X-Api-Key"], headers["X-Team"]) == ("secret:1", "a b")


@pytest.mark.parametrize("text", ["no colon", ": value", "A B: c"])
def test_a_file_of_keys_that_holds_something_else_is_refused(text, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(text)
    with pytest.raises(ValueError, match=r"exporter\.otlp\.headers_file=.*: header 1 is not 'Name: value'"):
        OtlpExporter(OtlpConfig(headers_file=str(keys)), build_context())


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a:b"])
def test_an_endpoint_that_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match=r"exporter\.otlp\.endpoint=.*: expected an http or https URL"):
        OtlpConfig(endpoint=url)
