"""transformers' pipelines on an installed model: the items of one call, and those of many threads, share the engine's batches.

An installed pipeline gets a class made from its own, and nothing else of it changes. That class runs the pipeline's own
preprocess, forward and postprocess, so what a pipeline does to an item is written nowhere twice. It differs in two ways: many
items are in flight at a time, each batch of them as one call of `generate()` on a thread of its own, and the tokenizer is used
by one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import nn
from transformers import Pipeline, PreTrainedModel
from transformers.pipelines.base import ChunkPipeline, no_collate_fn, pad_collate_fn
from transformers.pipelines.pt_utils import PipelineIterator

from hf_cb.blocking import holding
from hf_cb.errors import PipelineItemsError
from hf_cb.hf.calls import background
from hf_cb.hf.calls.seeds import draw_seed
from hf_cb.hf.calls.tokenizing import tokenizing
from hf_cb.hf.pipelines.in_order import InOrder

# Names of forward's parameters that generate() does not see as arguments: the pipeline's own, and the package's.
_NOT_OF_GENERATE = frozenset({"prefix_length", "seed", "priority", "tenant", "cache_salt", "timeout"})
# Given once for all items: what keeps state in them counts on the items' coming one after the other.
_SHARED_BY_ITEMS = ("streamer", "logits_processor", "stopping_criteria")

_plain_turn = threading.RLock()


class RowLimit(Protocol):
    """What stands behind an installed model's generate, as far as a pipeline needs it."""

    def rows_in_flight(self, call: dict[str, Any]) -> int:
        """How many rows of such calls may be underway for one caller, from this thread; 1: one call at a time, on it."""


def model_of(target: Any) -> Any:
    """The transformers model in a pipeline, in a PeftModel or in what torch.compile makes of one; anything else as it is."""
    if isinstance(target, Pipeline):
        return model_of(target.model)
    if isinstance(target, nn.Module) and (compiled := target._modules.get("_orig_mod")) is not None:
        return model_of(compiled)
    if isinstance(target, nn.Module) and not isinstance(target, PreTrainedModel):
        base = getattr(target, "get_base_model", None)  # as PEFT names it
        return base() if callable(base) else target
    return target


def serve_pipeline(pipe: Pipeline, server_of: Callable[[Any], RowLimit | None]) -> None:
    """Let the pipeline's calls share batches wherever its model has a server."""
    restore_pipeline(pipe)  # its model may be another one now
    if not isinstance(pipe, ServedPipeline):
        pipe.__class__ = _served(type(pipe), server_of)


def restore_pipeline(pipe: Pipeline) -> None:
    """Give the pipeline its own class back. One that somebody has derived from the installed class since stays: without a
    server it does what the pipeline's own does."""
    if isinstance(pipe, ServedPipeline) and "own_class" in vars(type(pipe)):
        pipe.__class__ = _own_class(pipe)  # type: ignore[assignment]


def _own_class(pipe: Pipeline) -> type[Pipeline]:
    """The class that is the pipeline's while it isn't installed. It may be so by now: hence no `super()` in the methods below,
    which fails on an object that is of another class since they were entered."""
    cls = type(pipe)
    return cls.own_class if issubclass(cls, ServedPipeline) else cls


class ServedPipeline(Pipeline):
    """The methods of a pipeline that are other ones while it is installed. Never made by itself."""

    own_class: ClassVar[type[Pipeline]]
    server_of: ClassVar[Callable[[Any], RowLimit | None]]

    def __reduce__(self) -> Any:  # pickled or copied deeply, it is a plain pipeline again
        return object.__new__, (self.own_class,), self.__dict__

    def _sanitize_parameters(self, **parameters: Any) -> Any:
        with tokenizing():  # a prefix is tokenized here
            return _own_class(self)._sanitize_parameters(self, **parameters)

    def preprocess(self, *args: Any, **parameters: Any) -> Any:
        """The pipeline's own, on one thread at a time."""
        with tokenizing():
            return _own_class(self).preprocess(self, *args, **parameters)

    def postprocess(self, *args: Any, **parameters: Any) -> Any:
        """The pipeline's own, on one thread at a time."""
        with tokenizing():
            return _own_class(self).postprocess(self, *args, **parameters)

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """The results of a list, all of them; of anything else an iterator. `num_workers` has no use: nothing is forked."""
        server_of = getattr(type(self), "server_of", lambda model: None)
        server = server_of(self.model)
        if server is None or isinstance(self, ChunkPipeline):
            return _own_class(self).get_iterator(
                self, inputs, num_workers, batch_size, preprocess_params, forward_params, postprocess_params
            )
        collate = no_collate_fn if batch_size == 1 else pad_collate_fn(self.tokenizer, self.feature_extractor)

        def forward(items: list[Any]) -> list[Any]:
            # Uninstalled meanwhile: plain generate, of which one call at a time is safe.
            turn = contextlib.nullcontext() if server_of(self.model) is server else holding(_plain_turn)
            with turn:
                return list(PipelineIterator([collate(items)], self.forward, forward_params, loader_batch_size=batch_size))

        work = _Work(
            prepare=lambda item: self.preprocess(item, **preprocess_params),
            forward=forward,
            finish=lambda outputs: self.postprocess(outputs, **postprocess_params),
            batch_size=batch_size,
            batches_in_flight=lambda: (
                1 if _is_written_to(self.model) else _batches_in_flight(server, forward_params, batch_size)
            ),
        )
        return _all(inputs, work) if isinstance(inputs, list) else Results(inputs, work)


@functools.cache
def _served(cls: type[Pipeline], server_of: Callable[[Any], RowLimit | None]) -> type[ServedPipeline]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ServedPipeline, cls), {**names, "own_class": cls, "server_of": staticmethod(server_of)})


def _is_written_to(model: Any) -> bool:
    """Whether generate of this PeftModel changes methods of the transformers model while it runs, as with virtual tokens."""
    base = model_of(model)
    return base is not model and getattr(model, "base_model", None) is base


def _batches_in_flight(server: RowLimit, forward_params: dict[str, Any], batch_size: int) -> int:
    call = {name: value for name, value in forward_params.items() if name not in _NOT_OF_GENERATE}
    shared = [thing for name in _SHARED_BY_ITEMS if (given := call.get(name)) is not None for thing in _each(given)]
    if not all(getattr(thing, "supports_continuous_batching", False) for thing in shared):
        return 1
    return max(1, server.rows_in_flight(call) // batch_size)


def _each(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


class _Failed(NamedTuple):
    """Stands in the place of an item that failed."""

    error: Exception


class _Work(NamedTuple):
    """What one call of a pipeline does to its items."""

    prepare: Callable[[Any], Any]
    forward: Callable[[list[Any]], list[Any]]  # of the items of one batch
    finish: Callable[[Any], Any]
    batch_size: int
    batches_in_flight: Callable[[], int]

    def answer(self, batch: list[Any]) -> list[Any]:
        """The batch's outputs, or _Failed in their place. One item that fails does not take the others along."""
        sound = [item for item in batch if not isinstance(item, _Failed)]
        outputs = _attempt(self.forward, sound) if sound else []
        if isinstance(outputs, _Failed):
            one = (lambda item: _attempt(lambda: self.forward([item])[0])) if len(sound) > 1 else (lambda _: outputs)
            outputs = [one(item) for item in sound]
        rest = iter(outputs)
        return [item if isinstance(item, _Failed) else next(rest) for item in batch]


def _attempt(call: Callable[..., Any], *args: Any) -> Any:
    if (own := background.current()) is not None:
        own.check()
    try:
        return call(*args)
    except Exception as error:
        return _Failed(error)


class Results:
    """What an installed pipeline returns for a dataset or a generator: the results in order, made as they are asked for."""

    def __init__(self, inputs: Any, work: _Work) -> None:
        self._inputs = inputs
        self._work = work
        self._latest: Iteration | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iteration:
        is_new = self._latest is None or iter(self._inputs) is not self._inputs  # a generator can only be gone on with
        if self._latest is None or is_new:
            self._latest = Iteration(self._inputs, self._work)
        return self._latest


class Iteration:
    """One way through the results. An item that failed raises its error in its place; the next `next` goes on with the rest."""

    def __init__(self, inputs: Any, work: _Work) -> None:
        batches = _batches(_prepared(inputs, work.prepare), work.batch_size)
        limit = work.batches_in_flight()
        seed = draw_seed()  # always: the plain pipeline's loader takes a number from torch's generator too
        self._in_order = InOrder(batches, work.answer, limit, seed) if limit > 1 else None
        self._answers: Iterator[list[Any]] = self._in_order or map(work.answer, batches)
        self._outcomes: deque[Any] = deque()
        self._finish = work.finish

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        while not self._outcomes:
            self._outcomes.extend(next(self._answers))
        outcome = self._outcomes.popleft()
        if not isinstance(outcome, _Failed):
            outcome = _attempt(self._finish, outcome)
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    @property
    def was_interrupted(self) -> bool:
        """Whether what the latest `next` raised is no item's error, but was thrown into the thread that waited."""
        return self._in_order is not None and self._in_order.was_interrupted

    def close(self) -> None:
        """Cancel what is underway. What is dropped is closed by itself."""
        if self._in_order is not None:
            self._in_order.close()


def _all(inputs: list[Any], work: _Work) -> list[Any]:
    """Every result. Raises PipelineItemsError, when all are done, if items failed."""
    outcomes: list[Any] = []
    errors: dict[int, Exception] = {}
    results = Iteration(inputs, work)
    while True:
        try:
            outcomes.append(next(results))
        except StopIteration:
            break
        except BaseException as error:
            if results.was_interrupted or not isinstance(error, Exception):  # Ctrl-C
                results.close()
                raise
            errors[len(outcomes)] = error
            outcomes.append(error)
    if errors:
        raise PipelineItemsError(outcomes, errors) from next(iter(errors.values()))
    return outcomes


def _prepared(inputs: Any, prepare: Callable[[Any], Any]) -> Iterator[Any]:
    for item in _items(inputs):
        yield item if isinstance(item, _Failed) else _attempt(prepare, item)


def _items(inputs: Any) -> Iterator[Any]:
    """Each of the inputs, or _Failed in its place."""
    if isinstance(inputs, Sized):
        for i in range(len(inputs)):
            yield _attempt(operator.getitem, inputs, i)
        return
    iterator = iter(inputs)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield _Failed(error)


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
