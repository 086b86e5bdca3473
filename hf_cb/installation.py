"""install and uninstall: how a generation backend is put behind `model.generate()`, and taken away again."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from torch import nn
from transformers import Pipeline, PreTrainedModel

from hf_cb import forks
from hf_cb.backend import GenerationBackend, SerializedBackend
from hf_cb.config import CBConfig
from hf_cb.continuous import ContinuousBatchingBackend
from hf_cb.engine import Engine
from hf_cb.errors import AlreadyInstalledError, InvalidArgumentError, NotInstalledError, UnsupportedModelError
from hf_cb.hf.calls.generate import call_arguments
from hf_cb.hf.pipelines.pipeline import ServedPipeline, model_of, restore_pipeline, serve_pipeline
from hf_cb.options import check_seed, make_service
from hf_cb.runtime.openmp import release_pool

ENTRY_POINT_GROUP = "hf_cb.backends"

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
        self._is_retired = False
        self.__signature__ = inspect.signature(backend.original)

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

    def retire(self) -> GenerationBackend | None:
        """Undo the installation and answer plainly from now on. Returns the backend that did; None: it was undone already."""
        model, backend = self._model(), self.backend
        if self._is_retired:
            return None
        self._is_retired = True
        if model is not None:
            _installed.pop(model, None)
            self.backend = backend.restore(self)
        return backend

    # A copied model generates plainly, with its own weights, and can be loaded where this package is not.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.backend.original, memo)

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self.backend.original,),)


# By the model, not by its attribute, which others may wrap. Weak: a generate that nobody can call any more is not installed.
_installed: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[_Generate]] = weakref.WeakKeyDictionary()

_install_lock = threading.Lock()
forks.renewed_in_child(globals(), _install_lock=threading.Lock)


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
            _drop_retired(target)
            made = cls(target, settings)
            made.attach()
            vars(target)["generate"] = generate = _Generate(target, made)
            _installed[target] = weakref.ref(generate)
        if pipe is not None:
            serve_pipeline(pipe, installed_backend)
            made.pipelines.add(pipe)
    release_pool()  # often the main thread, which loaded the model with it and will do no more than wait
    return made.engine


def uninstall(model: PreTrainedModel | Pipeline | nn.Module) -> None:
    """Take the backend away: requests in flight are finished, then `vars(model)` is what it was. Raises NotInstalledError.

    From a pipeline too, and from all pipelines of the same model. If somebody has wrapped `model.generate` since, the wrapper
    stays, and what it calls is plain generate.
    """
    if not _undo(_installed_generate(model)):
        raise NotInstalledError("model: it has no generation backend")


def _undo(generate: _Generate | None) -> bool:
    """False: there was nothing to undo."""
    with _install_lock:
        backend = None if generate is None else generate.retire()
        if backend is None:
            return False
        for pipe in list(backend.pipelines):
            if installed_backend(pipe) is None:  # one may have got another model, which is installed too
                restore_pipeline(pipe)
    backend.detach()
    return True


def _drop_retired(model: PreTrainedModel) -> None:
    """Who wrapped an installed generate may have put it back after it was uninstalled."""
    if isinstance(left := vars(model).get("generate"), _Generate) and left._model() is model:
        left.backend.restore(left)


@contextlib.contextmanager
def continuous_batching(
    model: PreTrainedModel | Pipeline | nn.Module, config: CBConfig | None = None, **options: Any
) -> Iterator[Engine]:
    """`install` for the length of a with block."""
    if "backend" in options:
        raise InvalidArgumentError("backend: continuous_batching is one; install(model, backend=...) takes others")
    engine = install(model, config, backend="continuous_batching", **options)
    assert engine is not None
    generate = _installed_generate(model)  # held: whatever is put in its place inside, and into the pipeline
    try:
        yield engine
    finally:
        _undo(generate)


def get_engine(model: PreTrainedModel | Pipeline | nn.Module) -> Engine | None:
    """The engine of an installed model (None for a backend that has none). Raises NotInstalledError."""
    backend = installed_backend(model)
    if backend is None:
        raise NotInstalledError("model: it has no generation backend")
    return backend.engine


def installed_backend(model: Any) -> GenerationBackend | None:
    """The backend behind the generate of this model, or of the model in this pipeline or PeftModel, or None."""
    generate = _installed_generate(model)
    return None if generate is None else generate.backend


def _installed_generate(model: Any) -> _Generate | None:
    model = model_of(model)
    found = _installed.get(model) if isinstance(model, PreTrainedModel) else None
    return None if found is None else found()
