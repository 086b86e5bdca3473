"""RequestTracer: a span for each request, by OpenTelemetry's conventions for generative AI. Needs the extra `tracing`."""

from __future__ import annotations

import time

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.util.types import AttributeValue

import hf_cb
from hf_cb.request import FinishReason, Request
from hf_cb.stats import RequestRecord

_OPERATION = "text_completion"  # the engine sees tokens: whether they were a chat, it does not know


class RequestTracer:
    """A watcher (`engine.watch(RequestTracer("my-model"))`) that makes a span of each request that ends.

    It is a child of the span that is current where the request is submitted, an HTTP server's for example, and has a child for
    its time in the queue, for its prompt (prefill) and for its output (decode). Names and attributes are those of
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. Spans are made on the engine's thread: let the provider
    have a processor that exports elsewhere, such as the SDK's BatchSpanProcessor.
    """

    def __init__(self, model: str, provider: TracerProvider | None = None) -> None:
        """`provider`: the program's own if None."""
        self._model = model
        self._tracer: Tracer = trace.get_tracer("hf_cb", hf_cb.__version__, provider)

    def submitted(self, request: Request) -> Context:
        """Note which span it belongs to."""
        return context.get_current()

    def ended(self, record: RequestRecord, note: Context) -> None:
        """Make its spans, which begin and end when what they tell of did."""
        clock = _Clock()
        span = self._tracer.start_span(
            f"{_OPERATION} {self._model}",
            context=note,
            kind=SpanKind.INTERNAL,  # as the conventions say for a model in the same process
            attributes=self._attributes(record),
            start_time=clock.nanoseconds(record.submitted_at),
        )
        if span.is_recording():
            if not record.is_answered and record.finish_reason is not FinishReason.CANCELLED:
                span.set_attribute("error.type", record.finish_reason.value)
                span.set_status(Status(StatusCode.ERROR, record.error))
            self._add_parts(span, record, clock)
        span.end(clock.nanoseconds(record.finished_at))

    def _add_parts(self, span: Span, record: RequestRecord, clock: _Clock) -> None:
        moments = [record.submitted_at, record.admitted_at, record.first_token_at]
        inside = trace.set_span_in_context(span)
        for i, name in enumerate(("queue", "prefill", "decode")):
            start = moments[i]
            if start is None:
                return
            following = moments[i + 1] if i + 1 < len(moments) else None
            end = record.finished_at if following is None else following
            part = self._tracer.start_span(name, context=inside, start_time=clock.nanoseconds(start))
            part.end(clock.nanoseconds(end))

    def _attributes(self, record: RequestRecord) -> dict[str, AttributeValue]:
        request, sampling = record.request, record.request.sampling
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": "hf_cb",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": str(request.request_id),
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.response.finish_reasons": [record.finish_reason.value],
        }
        if sampling.do_sample:
            found |= {
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": float(sampling.top_k),
                "gen_ai.request.seed": sampling.seed,
            }
        return found


class _Clock:
    """From `time.perf_counter()` to the nanoseconds since 1970 that spans take."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def nanoseconds(self, moment: float) -> int:
        return int(1e9 * (moment + self._offset))
