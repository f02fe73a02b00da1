"""Spans of requests, read back by OpenTelemetry's own exporter and its own messages."""

import asyncio
import builtins
import gzip
import http.server
import logging
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire import LLM, SamplingParams
from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError, InvalidParameter
from quire.observability.tracing import RequestTracer, exporter_to

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
ARGS = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def llm():
    with LLM(**ARGS, disable_log_stats=False) as made:
        yield made


@pytest.fixture
def spans(llm):
    """The spans that a test's requests leave."""
    exporter = InMemorySpanExporter()
    front_end = llm.llm_engine.front_end
    front_end.tracer = RequestTracer(exporter, "the-model")

    def finished():
        front_end.tracer._provider.force_flush()
        return exporter.get_finished_spans()

    yield finished
    front_end.tracer.close()
    front_end.tracer = None


def run(llm, *, headers=None, prompt="def f():", **fields):
    engine = llm.llm_engine
    params = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **fields})
    engine.add_request("mine", prompt, params, trace_headers=headers)
    while engine.has_unfinished_requests():
        engine.step()


def test_a_request_is_one_span_with_the_names_of_the_field(llm, spans):
    run(llm, headers=HEADERS, n=2, temperature=0.5, top_p=0.9)
    [span] = spans()
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"
    found = dict(span.attributes)
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.request.max_tokens"] == 5
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_p"] == 0.9
    assert found["gen_ai.response.model"] == "the-model"
    assert found["gen_ai.usage.prompt_tokens"] == len(llm.get_tokenizer().encode("def f():"))
    assert found["gen_ai.usage.completion_tokens"] == 10
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if "latency" in name}
    assert set(latency) == {
        "time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill",
        "time_in_model_decode", "time_in_model_inference",
    }  # fmt: skip
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    parts = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert parts == pytest.approx(latency["time_in_model_inference"])
    assert latency["e2e"] <= (span.end_time - span.start_time) / 1e9 + 0.001


def test_who_brings_no_trace_begins_one(llm, spans):
    run(llm)
    run(llm, headers={"traceparent": "00-nonsense"})
    first, second = spans()
    assert first.parent is None
    assert second.parent is None
    assert first.context.trace_id != second.context.trace_id


def test_an_abort_ends_the_span_and_says_so(llm, spans):
    engine = llm.llm_engine
    engine.add_request("gone", "a", SamplingParams(max_tokens=50))
    engine.step()
    engine.abort_request(["gone"])
    [span] = spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.status.status_code is StatusCode.UNSET


def test_without_traces_their_headers_are_said_to_go_nowhere(llm, caplog):
    with caplog.at_level(logging.WARNING):
        run(llm, headers=HEADERS)
        run(llm, headers=HEADERS)
    assert sum("otlp_traces_endpoint" in record.message for record in caplog.records) == 1


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an exporter posts."""

    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        message = ExportTraceServiceRequest.FromString(data)
        self.server.found += [
            (scope.scope.name, {a.key: a.value for a in group.resource.attributes}, span)
            for group in message.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        """Quiet."""


@pytest.fixture
def collector():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.found = []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector_and_a_death_is_one_too(collector):
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"

    async def live():
        args = EngineArgs(**ARGS, otlp_traces_endpoint=endpoint, disable_log_stats=True)
        engine = AsyncLLM.from_engine_args(args)
        assert await engine.is_tracing_enabled()
        mailbox = await engine.add_request(
            "one", "def f():", SamplingParams(max_tokens=4), trace_headers=HEADERS
        )
        assert mailbox.traceparent.split("-")[:2] == ["00", TRACE]
        await mailbox.get()
        stream = engine.generate("a", SamplingParams(max_tokens=200, ignore_eos=True), "two")
        await anext(stream)
        engine.shutdown()
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                continue

    asyncio.run(live())
    scopes, resources, spans = zip(*collector.found, strict=True)
    assert set(scopes) == {"quire"}
    assert all(r["service.name"].string_value == "quire" for r in resources)
    by_id = {
        next(a.value.string_value for a in s.attributes if a.key == "gen_ai.request.id"): s
        for s in spans
    }
    assert by_id["one"].trace_id.hex() == TRACE
    assert by_id["one"].parent_span_id.hex() == PARENT
    assert by_id["two"].status.code == 2  # an error


@pytest.mark.parametrize("endpoint", ["nowhere", "file:///x", "http://", "localhost:4317"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(InvalidParameter, match="otlp_traces_endpoint"):
        exporter_to(endpoint)


def test_missing_packages_are_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidParameter, match=r"quire\[otel\]"):
        exporter_to("http://127.0.0.1:4318/v1/traces")
