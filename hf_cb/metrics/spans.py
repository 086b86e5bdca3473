"""RequestTracer: a span for each request, by OpenTelemetry's conventions for generative AI. Needs the extra `tracing`."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.util.types import AttributeValue

import hf_cb
from hf_cb.request import FinishReason, Request
from hf_cb.stats import RequestRecord

logger = logging.getLogger("hf_cb")

_OPERATION = "text_completion"  # the engine sees tokens: whether they were a chat, it does not know


class RequestTracer:
    """A watcher (`engine.watch(RequestTracer("my-model"))`) that makes a span of each request that ends.

    It is a child of the span that is current where the request is submitted, an HTTP server's for example, and has a child for
    its time in the queue, for its prompt (prefill) and for its output (decode). Names and attributes are those of
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/.

    Spans take a tenth of a millisecond to make, so a thread of its own makes them: the engine goes on meanwhile. `flush` waits
    for those of requests that have ended; `close`, which is called at the interpreter's exit too, ends the thread.
    """

    def __init__(self, model: str, provider: TracerProvider | None = None) -> None:
        """`provider`: the program's own if None."""
        self._model = model
        self._tracer: Tracer = trace.get_tracer("hf_cb", hf_cb.__version__, provider)
        self._ended: queue.Queue[tuple[RequestRecord, Context] | None] = queue.Queue()
        self._thread: threading.Thread | None = None  # from the first request on

    def submitted(self, request: Request) -> Context:
        """Note which span it belongs to."""
        return context.get_current()

    def ended(self, record: RequestRecord, note: Context) -> None:
        """Hand a request that has ended to the thread that makes its spans."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hf_cb-spans", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._ended.put((record, note))

    def flush(self) -> None:
        """Return when the spans of all requests that have ended are made."""
        self._ended.join()

    def close(self) -> None:
        """Make what is left, and end the thread. A request that ends later begins a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._ended.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._ended.get()) is not None:
            try:
                self._make(*item)
            except Exception:  # of a sampler, processor or exporter of the program's
                logger.exception("a span failed", extra={"engine_request_id": item[0].request.request_id})
            finally:
                self._ended.task_done()
        self._ended.task_done()

    def _make(self, record: RequestRecord, note: Context) -> None:
        """The spans begin and end when what they tell of did."""
        nanoseconds = _clock()
        span = self._tracer.start_span(
            f"{_OPERATION} {self._model}",
            context=note,
            kind=SpanKind.INTERNAL,  # as the conventions say for a model in the same process
            attributes=self._attributes(record),
            start_time=nanoseconds(record.submitted_at),
        )
        if span.is_recording():
            if not record.is_answered and record.finish_reason is not FinishReason.CANCELLED:
                span.set_attribute("error.type", record.finish_reason.value)
                span.set_status(Status(StatusCode.ERROR, record.error))
            self._add_parts(span, record, nanoseconds)
        span.end(nanoseconds(record.finished_at))

    def _add_parts(self, span: Span, record: RequestRecord, nanoseconds: Callable[[float], int]) -> None:
        named = {"queue": record.submitted_at, "prefill": record.admitted_at, "decode": record.first_token_at}
        begun = [(name, start) for name, start in named.items() if start is not None]
        ends = [*(start for _, start in begun[1:]), record.finished_at]
        inside = trace.set_span_in_context(span)
        for (name, start), end in zip(begun, ends, strict=True):
            part = self._tracer.start_span(name, context=inside, start_time=nanoseconds(start))
            part.end(nanoseconds(end))

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


def _clock() -> Callable[[float], int]:
    """From `time.perf_counter()` to the nanoseconds since 1970 that spans take."""
    offset = time.time() - time.perf_counter()
    return lambda moment: int(1e9 * (moment + offset))
