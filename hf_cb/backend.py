"""Generation backends: what stands behind `model.generate()`, and how one is put there and taken away again."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from torch import nn
from transformers import Pipeline, PreTrainedModel

from hf_cb.config import CBConfig
from hf_cb.engine import Engine, Served
from hf_cb.errors import (
    AlreadyInstalledError,
    EngineClosedError,
    InvalidArgumentError,
    NotInstalledError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from hf_cb.hf import errand
from hf_cb.hf.build import build
from hf_cb.hf.generate import call_arguments, generate, why_native
from hf_cb.hf.pipeline import ServedPipeline, model_of, restore_pipeline, serve_pipeline
from hf_cb.hf.rules import GoNativeError
from hf_cb.hf.seeds import seeded
from hf_cb.hf.support import UnservableError
from hf_cb.hf.tokenizing import tokenizing
from hf_cb.hf.twin import Fingerprint
from hf_cb.options import check_seed, make_service
from hf_cb.request import Service
from hf_cb.runtime.threads import release_pool

logger = logging.getLogger("hf_cb")

ENTRY_POINT_GROUP = "hf_cb.backends"
_ROWS_IN_FLIGHT = 128  # of one caller with many: enough for full batches, few enough for a thread each

_live: weakref.WeakSet[GenerationBackend] = weakref.WeakSet()


class GenerationBackend(abc.ABC):
    """What answers `model.generate()` while it is installed.

    A subclass takes (model, config) and may hold the model only weakly: `self.model` gives it. `plain` runs the model's own
    `generate`.
    """

    engine: Engine | None = None  # what install() gives to the user

    def __init__(self, model: PreTrainedModel, config: CBConfig) -> None:
        self.config = config
        self._model = weakref.ref(model)
        self._own_generate: Callable[..., Any] | None = vars(model).get("generate")  # as models with custom code may have
        self.pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # that use it
        self.renew_locks()
        _live.add(self)

    def renew_locks(self) -> None:
        """Make the locks; anew in a forked child."""
        self._plain_lock = threading.RLock()  # plain generate is not thread-safe: one call at a time per model

    @property
    def model(self) -> PreTrainedModel:
        """The model this backend is for."""
        model = self._model()
        if model is None:
            raise NotInstalledError("the model of this backend no longer exists")
        return model

    @abc.abstractmethod
    def attach(self) -> None:
        """Make ready to serve. Raising leaves the model as it was."""

    @abc.abstractmethod
    def detach(self) -> None:
        """Finish what runs and let go of everything."""

    @abc.abstractmethod
    def why_not(self, call: dict[str, Any]) -> str | None:
        """Why a call with these arguments runs natively, as far as that can be told beforehand; None: it is served here."""

    @abc.abstractmethod
    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        """Answer one call of `model.generate(**arguments)`; `service` says how soon and for whom."""

    def rows_in_flight(self, call: dict[str, Any]) -> int:
        """How many rows of such calls a pipeline may have underway from this thread; 1: one call at a time, on this thread."""
        return 1

    def plain(self, arguments: dict[str, Any], seed: int | None = None) -> Any:
        """The model's own generate, one call at a time. With a seed, torch's global generators are as they were afterwards."""
        if (tokenizer := arguments.get("tokenizer")) is not None:
            with tokenizing():  # others may be using it, and this call can't be made to wait for the lock where it does
                arguments = {**arguments, "tokenizer": copy.deepcopy(tokenizer)}
        with self._plain_lock:
            if (own := errand.current()) is not None:
                own.check()
                seed = own.seed if seed is None else seed
            if seed is None:
                return self.original(**arguments)
            with seeded(seed):
                return self.original(**arguments)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own `generate`, unlocked."""
        return self._own_generate or plain_generate(self.model)

    def restore(self) -> None:
        """Make `vars(model)` what it was before the installation."""
        attributes = vars(self.model)
        if self._own_generate is None:
            del attributes["generate"]
        else:
            attributes["generate"] = self._own_generate


class SerializedBackend(GenerationBackend):
    """A lock round plain generate: what people do today, and the baseline to measure against."""

    def attach(self) -> None:
        """Nothing to prepare."""

    def detach(self) -> None:
        """Nothing to release."""

    def why_not(self, call: dict[str, Any]) -> str | None:
        """Every call is plain generate."""
        return None

    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        """Wait for the lock, then run plain generate."""
        return self.plain(arguments, seed)


class ContinuousBatchingBackend(GenerationBackend):
    """Calls from all threads share the batches of one engine; what it cannot serve runs natively, exactly."""

    engine: Engine

    def __init__(self, model: PreTrainedModel, config: CBConfig) -> None:
        super().__init__(model, config)
        self._is_detached = False
        self._fingerprint: Fingerprint | None = None

    def renew_locks(self) -> None:
        """Make the locks; anew in a forked child."""
        super().renew_locks()
        self._freshness_lock = threading.Lock()

    def attach(self) -> None:
        """Make and probe the twin. A model that cannot be served is attached all the same: all of its calls run natively."""
        fingerprint, served, reason = self._build()
        refresh = weakref.WeakMethod(self._refresh)  # an engine does not keep its backend, nor the model, alive
        self.engine = Engine(served, self.config, reason, refresh)
        self._fingerprint = fingerprint

    def detach(self) -> None:
        """Finish the requests there are and end the engine's thread."""
        self._is_detached = True
        self.engine.shutdown(drain=True)

    def why_not(self, call: dict[str, Any]) -> str | None:
        """The engine's reason for the model, or the call's own."""
        if self._own_generate not in (None, plain_generate(self.model)):  # a copy of an installed model has the latter
            return "the model has a generate of its own"
        return self.engine.unsupported_reason or why_native(self.model, call)

    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        """Through the engine where it can, else natively with the reason counted and logged."""
        self.engine.refuse_own_thread("generate")
        if self.engine.is_paused_by_caller:
            reason: str | None = "this thread has paused the engine"
        else:
            self._refresh()
            reason = self.why_not(arguments)
        if reason is None:
            try:
                return generate(self.engine, self.model, self.original, arguments, seed, service)
            except (GoNativeError, UnsupportedModelError) as error:  # the latter: another caller's refresh came between
                reason = str(error)
            except EngineClosedError:
                if not self._is_detached:
                    raise
                return self.plain(arguments, seed)  # as a call that came a moment later
        if self.engine.is_tensor_parallel:
            raise UnsupportedCallError(f"the engine cannot serve this call ({reason}), and plain generate() needs all ranks")
        if self.config.fallback == "error":
            raise UnsupportedCallError(f"the engine cannot serve this call ({reason}) and fallback='error'")
        self.engine.count_native(reason)
        logger.debug("generate runs natively: %s", reason)
        try:
            return self.plain(arguments, seed)
        finally:
            release_pool()

    def rows_in_flight(self, call: dict[str, Any]) -> int:
        """Twice what a batch holds: those at the end of one wait for the slowest before them."""
        self.engine.refuse_own_thread("generate")
        config = self.engine.config
        if config is None or self.engine.is_paused_by_caller or self.why_not(call) is not None:
            return 1
        return min(_ROWS_IN_FLIGHT, 2 * config.max_batch_size, self.config.max_queue_size or _ROWS_IN_FLIGHT)

    def _build(self) -> tuple[Fingerprint, Served | None, str | None]:
        with self._plain_lock:  # a plain call in flight may have switched the model's settings for its duration
            fingerprint = Fingerprint.of(self.model)
            try:
                return fingerprint, build(self.model, self.config), None
            except UnservableError as error:
                logger.info("the engine cannot serve %s: %s", type(self.model).__name__, error)
                return fingerprint, None, str(error)

    def _is_fresh(self) -> bool:
        if self.engine.is_tensor_parallel:  # its layers exchange their weights as they run; and no rank can rebuild alone
            return True
        return self._fingerprint is not None and self._fingerprint.matches(Fingerprint.of(self.model))

    def _refresh(self) -> None:
        """Rebuild the twin if the model has changed in a way that sharing weights does not follow."""
        if self._is_fresh():
            return
        with self._freshness_lock:
            if self._is_fresh():  # another caller has done it
                return
            logger.info("the model's modules have changed: rebuilding the twin")
            fingerprint, served, reason = self._build()
            self.engine.serve(served, reason)
            self._fingerprint = fingerprint  # last: until then nobody may take the old twin for fresh


_BACKENDS: dict[str, type[GenerationBackend]] = {
    "continuous_batching": ContinuousBatchingBackend,
    "serialized": SerializedBackend,
}


def register_backend(name: str, backend: type[GenerationBackend]) -> None:
    """Make `install(model, backend=name)` use this class.

    Packages may also name theirs in the entry-point group hf_cb.backends.
    """
    if not (isinstance(backend, type) and issubclass(backend, GenerationBackend)):
        raise InvalidArgumentError(f"backend: takes a subclass of GenerationBackend; got {backend!r}")
    if _BACKENDS.get(name, backend) is not backend:
        raise InvalidArgumentError(f"name: a backend named {name!r} is registered already")
    _BACKENDS[name] = backend


def _find_backend(name: str) -> type[GenerationBackend]:
    if name not in _BACKENDS:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            register_backend(name, entry.load())
    if name not in _BACKENDS:
        raise InvalidArgumentError(f"backend: takes one of {', '.join(_BACKENDS)}; got {name!r}")
    return _BACKENDS[name]


class _Generate:
    """The attribute `generate` of a model that has a backend. Looks like the original to `inspect`."""

    def __init__(self, model: PreTrainedModel, backend: GenerationBackend) -> None:
        functools.update_wrapper(self, backend.original)
        vars(self).pop("__wrapped__")  # a bound method: it would hold the model
        self.backend = backend
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(backend.original)

    def is_of(self, model: Any) -> bool:
        """False for a shallow copy of the model, which has the same attributes."""
        return self._model() is model

    def __call__(
        self,
        *args: Any,
        seed: int | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        arguments = call_arguments(self.backend.original, args, kwargs)
        service = make_service({"priority": priority, "tenant": tenant, "cache_salt": cache_salt, "timeout": timeout})
        return self.backend.generate(arguments, None if seed is None else check_seed(seed), service)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied model generates plainly, with its own weights: this backend serves the original.
        model = self._model()
        return plain_generate(memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return plain_generate, (self.backend.model,)


def plain_generate(model: Any) -> Callable[..., Any]:
    """The model's own `generate`, whatever is installed on it."""
    return types.MethodType(type(model).generate, model)


_install_lock = threading.Lock()


def _renew_locks() -> None:
    global _install_lock
    _install_lock = threading.Lock()
    for backend in list(_live):
        backend.renew_locks()


if hasattr(os, "register_at_fork"):  # the threads that hold them are not in the child
    os.register_at_fork(after_in_child=_renew_locks)


def install(
    model: PreTrainedModel | Pipeline | nn.Module,
    config: CBConfig | None = None,
    *,
    backend: str = "continuous_batching",
    **options: Any,
) -> Engine | None:
    """Put a generation backend behind `model.generate()` and return its engine (None for a backend that has none).

    `model` may be a PeftModel; or a pipeline, whose items then share batches too. `config`, or CBConfig's fields as `options`,
    sets the backend up. Nothing of the model changes but its attribute `generate`, of a pipeline but its class, and `uninstall`
    undoes both. A pipeline whose model has a backend already joins that, if it asks for none of its own.

    Raises UnsupportedModelError for what is not a generative transformers model, AlreadyInstalledError, InvalidArgumentError.
    """
    target, pipe = model_of(model), model if isinstance(model, Pipeline) else None
    if not (isinstance(target, PreTrainedModel) and target.can_generate()):
        raise UnsupportedModelError(f"model: takes a transformers model that can generate; got {type(target).__name__}")
    settings = CBConfig.make(config, **options)
    cls = _find_backend(backend)
    with _install_lock:
        made = installed_backend(target)
        joins = pipe is not None and not isinstance(pipe, ServedPipeline) and not options and config is None
        if made is not None and not (joins and type(made) is cls):
            raise AlreadyInstalledError("model: it has a generation backend already; uninstall(model) takes it away")
        if made is None:
            made = cls(target, settings)
            made.attach()
            vars(target)["generate"] = _Generate(target, made)
        if pipe is not None:
            serve_pipeline(pipe, installed_backend)
            made.pipelines.add(pipe)
    release_pool()  # often the main thread, which loaded the model with it and will do no more than wait
    return made.engine


def uninstall(model: PreTrainedModel | Pipeline | nn.Module) -> None:
    """Take the backend away: requests in flight are finished, then `vars(model)` is what it was. Raises NotInstalledError.

    From a pipeline too, and from all pipelines of the same model.
    """
    with _install_lock:
        backend = installed_backend(model)
        if backend is None:
            raise NotInstalledError("model: it has no generation backend")
        backend.restore()
        for pipe in list(backend.pipelines):
            if installed_backend(pipe) is None:  # one may have got another model, which is installed too
                restore_pipeline(pipe)
    backend.detach()


@contextlib.contextmanager
def continuous_batching(
    model: PreTrainedModel | Pipeline | nn.Module, config: CBConfig | None = None, **options: Any
) -> Iterator[Engine]:
    """`install` for the length of a with block."""
    if "backend" in options:
        raise InvalidArgumentError("backend: continuous_batching is one; install(model, backend=...) takes others")
    engine = install(model, config, backend="continuous_batching", **options)
    assert engine is not None
    try:
        yield engine
    finally:
        uninstall(model)


def get_engine(model: PreTrainedModel | Pipeline | nn.Module) -> Engine | None:
    """The engine of an installed model (None for a backend that has none). Raises NotInstalledError."""
    backend = installed_backend(model)
    if backend is None:
        raise NotInstalledError("model: it has no generation backend")
    return backend.engine


def installed_backend(model: Any) -> GenerationBackend | None:
    """The backend behind the generate of this model, or of the model in this pipeline or PeftModel, or None."""
    model = model_of(model)
    attribute = getattr(model, "__dict__", {}).get("generate")
    return attribute.backend if isinstance(attribute, _Generate) and attribute.is_of(model) else None
