"""Spans of requests, in the SDK's memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import crowd
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode
from transformers import PreTrainedModel

import hf_cb
from hf_cb.metrics.spans import RequestTracer

pytestmark = pytest.mark.timeout(20)


class Tracing:
    """An engine whose spans are kept."""

    def __init__(self, engine: hf_cb.Engine) -> None:
        self.engine = engine
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.tracer = RequestTracer("tiny", self.provider)
        engine.watch(self.tracer)

    def all(self) -> tuple[ReadableSpan, ...]:
        """Those of all requests that have ended."""
        self.tracer.flush()
        return self.kept.get_finished_spans()

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, where there is one of each."""
        found = self.all()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


@pytest.fixture
def tracing(llama: PreTrainedModel) -> Iterator[Tracing]:
    with hf_cb.continuous_batching(llama) as engine:
        tracing = Tracing(engine)
        yield tracing
        tracing.tracer.close()


def test_a_request_is_a_span_with_its_parts(tracing: Tracing) -> None:
    before = time.time_ns()
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 11, "eos_token_id": None}
    result = tracing.engine.submit([3, 4, 5], max_new_tokens=4, **options).result()
    spans = tracing.spans()
    assert spans.keys() == {"text_completion tiny", "queue", "prefill", "decode"}
    whole = spans["text_completion tiny"]
    assert (whole.kind, whole.parent, whole.status.status_code) == (SpanKind.INTERNAL, None, StatusCode.UNSET)
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hf_cb",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": str(result.request_id),
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5.0,
        "gen_ai.request.seed": 11,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent.span_id for part in parts if part.parent} == {whole.context.span_id}
    moments = [whole.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == moments[:-1]
    assert moments == sorted(moments)
    assert whole.end_time == moments[-1]
    assert before - 1e9 < moments[0] < moments[-1] < time.time_ns() + 1e9  # seconds since 1970, as everybody's


def test_the_attributes_are_those_of_the_conventions(tracing: Tracing) -> None:
    tracing.engine.submit([3, 4], max_new_tokens=2, do_sample=True).result()
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert set(tracing.spans()["text_completion tiny"].attributes or {}) <= known


def test_it_belongs_to_the_span_where_it_was_submitted(tracing: Tracing) -> None:
    tracer = tracing.provider.get_tracer("a server")
    with crowd.held(tracing.engine, 2):
        parents = []
        for name in ("first", "second"):
            with tracer.start_as_current_span(name) as parent:
                parents.append((parent, tracing.engine.submit([3, 4], max_new_tokens=2)))
    results = [(parent, handle.result()) for parent, handle in parents]
    by_id = {(span.attributes or {}).get("gen_ai.response.id"): span for span in tracing.all()}
    for parent, result in results:
        span = by_id[str(result.request_id)]
        assert span.parent is not None
        assert span.parent.span_id == parent.get_span_context().span_id
        assert span.context.trace_id == parent.get_span_context().trace_id


def test_failures_have_a_status_and_only_the_parts_there_were(tracing: Tracing) -> None:
    with tracing.engine.pause():
        handle = tracing.engine.submit([3, 4], max_new_tokens=2)
        tracing.engine.shutdown(drain=False)
    with pytest.raises(hf_cb.EngineClosedError):
        handle.result()
    spans = tracing.spans()
    assert spans.keys() == {"text_completion tiny", "queue"}
    whole = spans["text_completion tiny"]
    assert whole.status.status_code is StatusCode.ERROR
    assert "shut down" in (whole.status.description or "")
    assert (whole.attributes or {})["error.type"] == "failed"
    assert spans["queue"].end_time == whole.end_time


def test_cancelling_is_no_failure(tracing: Tracing) -> None:
    handle = tracing.engine.submit([3, 4], max_new_tokens=400, eos_token_id=None)
    next(iter(handle))
    handle.cancel()
    with pytest.raises(hf_cb.RequestCancelledError):
        handle.result()
    assert tracing.spans()["text_completion tiny"].status.status_code is StatusCode.UNSET


def test_closing_makes_what_is_left_and_what_comes_later_is_made_too(tracing: Tracing) -> None:
    for count in (1, 2):
        tracing.engine.submit([3, 4], max_new_tokens=2).result()
        tracing.tracer.close()
        assert len(tracing.kept.get_finished_spans()) == 4 * count


def test_a_processor_that_fails_costs_its_span_alone(tracing: Tracing, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: object, parent_context: object = None) -> None:
            if len(caplog.records) == 0:
                raise RuntimeError("on purpose")

    tracing.provider.add_span_processor(Broken())
    for _ in range(2):
        tracing.engine.submit([3, 4], max_new_tokens=2).result()
        tracing.tracer.flush()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["a span failed"]
    assert len(tracing.kept.get_finished_spans()) == 4


def test_nothing_is_made_of_what_is_not_sampled(llama: PreTrainedModel) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with hf_cb.continuous_batching(llama) as engine:
        tracer = RequestTracer("tiny", provider)
        engine.watch(tracer)
        engine.submit([3, 4], max_new_tokens=2).result()
    tracer.close()
    assert kept.get_finished_spans() == ()


def test_hf_cb_alone_imports_none_of_it() -> None:
    # transformers may bring the API of opentelemetry where it is installed; the SDK and the rest nobody does.
    program = "import sys, hf_cb; print(*{'prometheus_client', 'rich', 'opentelemetry.sdk'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
