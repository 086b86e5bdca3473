"""ContinuousBatchingBackend: the calls of all threads as requests to one engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel
from typing_extensions import override

from hf_cb.backend import GenerationBackend, plain_generate
from hf_cb.blocking import holding
from hf_cb.config import CBConfig
from hf_cb.engine import Engine
from hf_cb.errors import EngineClosedError, UnsupportedCallError, UnsupportedModelError
from hf_cb.hf.build import build
from hf_cb.hf.calls.generate import generate
from hf_cb.hf.calls.modes import undisturbed
from hf_cb.hf.calls.native import why_native
from hf_cb.hf.calls.result_cache import Origin
from hf_cb.hf.calls.rules import GoNativeError
from hf_cb.hf.probe import UnservableError
from hf_cb.hf.twins.fingerprint import Books, Fingerprint
from hf_cb.hf.twins.held import joined
from hf_cb.hf.twins.tensor_parallel import is_split
from hf_cb.hf.twins.twin import shared_tensors
from hf_cb.hf.twins.weights import Marks
from hf_cb.intake import Intake, Served
from hf_cb.request import Service
from hf_cb.runtime.openmp import release_pool

logger = logging.getLogger("hf_cb")

_ROWS_IN_FLIGHT = 128  # of one caller with many: enough for full batches, few enough for a thread each


class SharedLook:
    """One look at something that may change serves all callers who came before it began.

    For looks that take milliseconds and that many threads want at once: of fifty, two look and the rest wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler, or a finalizer, may call in the middle of a look
        self._begun = 0  # looks
        self._seen: bool | None = None  # by the latest; None: it raised

    def __call__(self, look: Callable[[], bool]) -> bool:
        """What `look`, the same one for all callers, sees between call and return. Raises what one's own look raises."""
        before = self._begun  # a look that is under way may have passed already what has just been changed
        with self._lock:
            if self._begun == before or self._seen is None:
                self._begun += 1
                self._seen = None
                self._seen = look()
            return self._seen


class ContinuousBatchingBackend(GenerationBackend):
    """Calls from all threads share the batches of one engine; what it cannot serve runs natively, exactly."""

    engine: Engine

    def __init__(self, model: PreTrainedModel, config: CBConfig) -> None:
        super().__init__(model, config)
        self._is_detached = False
        self._fingerprint: Fingerprint | None = None
        self._marks: tuple[Fingerprint | None, Marks | None] = None, None  # of the weights, and with which look

    @override
    def renew_locks(self) -> None:
        super().renew_locks()
        self._freshness_lock = threading.RLock()
        self._shared_look = SharedLook()

    @override
    def attach(self) -> None:
        fingerprint, served, reason = self._build()
        backend = weakref.ref(self)  # an engine does not keep its backend, nor the model, alive

        def refresh() -> None:
            if (own := backend()) is not None:
                own._refresh()

        self._intake = Intake(served, self.config, reason, refresh)
        self.engine = Engine(self._intake)
        self._fingerprint = fingerprint

    @override
    def detach(self) -> None:
        self._is_detached = True
        self.engine.shutdown(drain=True)

    @override
    def why_not(self, call: dict[str, Any]) -> str | None:
        if self._own_generate not in (None, plain_generate(self.model)):  # a copy of an installed model has the latter
            return "the model has a generate of its own"
        return self._intake.reason or why_native(self.model, call, self._intake.zeros_are_none)

    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        """Through the engine where it can, else natively with the reason counted and logged."""
        self._intake.refuse_own_thread("generate")
        if self._intake.is_paused_by_caller:
            reason: str | None = "this thread has paused the engine"
        else:
            self._refresh()
            reason = self.why_not(arguments)
        if reason is None:
            try:
                return generate(self._intake, self.model, self._origin, self.original, arguments, seed, service)
            except (GoNativeError, UnsupportedModelError) as error:  # the latter: another caller's refresh came between
                reason = str(error)
            except EngineClosedError:
                if not self._is_detached:
                    raise
                return self.plain(arguments, seed)  # as a call that came a moment later
        if self._intake.is_tensor_parallel:
            raise UnsupportedCallError(f"the engine cannot serve this call ({reason}), and plain generate() needs all ranks")
        if self.config.fallback == "error":
            raise UnsupportedCallError(f"the engine cannot serve this call ({reason}) and fallback='error'")
        self._intake.count_native(reason)
        logger.debug("generate runs natively: %s", reason)
        try:
            return self.plain(arguments, seed)
        finally:
            release_pool()

    def _origin(self) -> Origin:
        """The model as it is now, for a cache that is made later."""
        model, fingerprint = self.model, self._fingerprint
        if fingerprint is None:  # a twin is being replaced
            fingerprint = Fingerprint.of(model)
        known, marks = self._marks
        if known is not fingerprint or marks is None:
            marks = Marks(shared_tensors(model))
            self._marks = fingerprint, marks
        return Origin.of(model, weakref.WeakMethod(self._turn), fingerprint, marks)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._intake.is_tensor_parallel:
            raise UnsupportedCallError("the cache of a result can't be read: all ranks would have to make it together")
        with self._plain_lock:
            yield

    def rows_in_flight(self, call: dict[str, Any]) -> int:
        """Twice what a batch holds: those at the end of one wait for the slowest before them."""
        self._intake.refuse_own_thread("generate")
        config = self._intake.config
        if config is None or self._intake.is_paused_by_caller or self.why_not(call) is not None:
            return 1
        return min(_ROWS_IN_FLIGHT, 2 * config.max_batch_size, self.config.max_queue_size or _ROWS_IN_FLIGHT)

    def _build(self) -> tuple[Fingerprint, Served | None, str | None]:
        # Alone: a plain call in flight may have switched the model's settings for its duration.
        with holding(self._plain_lock), undisturbed():
            fingerprint, served, reason = self._build_steadily()
        if reason is not None:
            logger.info("the engine cannot serve %s: %s", type(self.model).__name__, reason)
        return fingerprint, served, reason

    def _build_steadily(self) -> tuple[Fingerprint, Served | None, str | None]:
        """A twin of a model that was the same before and after, but for what its modules write as they run."""
        written: Books = {}
        for _ in range(2):
            books: Books = {}
            before = Fingerprint.of(self.model)
            if not before.is_whole:
                return before, None, "its modules hold more than each call can look at"
            served, reason = self._try_to_build(books)
            fingerprint, after = Fingerprint.of(self.model, books), Fingerprint.of(self.model)
            if is_split(self.model) or before.matches_but_for(books, after):
                return fingerprint, served, reason
            written = joined(books, before.written(after))
        # Who keeps a new twin for it, as long as it goes on, would make one for each call.
        return Fingerprint.of(self.model, written), None, "what its modules hold changes while the engine runs a copy of them"

    def _try_to_build(self, books: Books) -> tuple[Served | None, str | None]:
        try:
            return build(self.model, self.config, books), None
        except UnservableError as error:
            return None, str(error)

    def _is_fresh(self) -> bool:
        """Whether the twin is as good as new. Of many callers who come at once, few look."""
        return self._shared_look(self._look)

    def _look(self) -> bool:
        if self._intake.is_tensor_parallel:  # its layers exchange their weights as they run; and no rank can rebuild alone
            return True
        return self._fingerprint is not None and self._fingerprint.is_of(self.model)

    def _refresh(self) -> None:
        """Rebuild the twin if the model has changed in a way that sharing weights does not follow."""
        if self._is_fresh():
            return
        with holding(self._freshness_lock):  # that one rebuilds, and the rest wait
            if self._is_fresh():  # another caller has done it
                return
            logger.info("the model's modules have changed: rebuilding the twin")
            # Nobody may take the old twin for fresh meanwhile, even if the model is changed back: it is being replaced.
            self._fingerprint = None
            fingerprint, served, reason = self._build()
            self._intake.serve(served, reason)
            self._fingerprint = fingerprint
