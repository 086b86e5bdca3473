"""The errors that hf_cb raises, all below one base.

HFCBError
├── InvalidArgumentError (ValueError)       an argument has a value that nothing can serve
│   └── RequestTooLongError                 the request could never fit the model's positions or the block pool
├── UnsupportedModelError (TypeError)       the model cannot be installed, or its engine cannot serve it
├── UnsupportedCallError (ValueError)       fallback="error", and this call could only run natively
├── AlreadyInstalledError (RuntimeError)    install() on a model that has a backend
├── NotInstalledError (RuntimeError)        uninstall() or get_engine() on a model that has none
├── CacheLostError (RuntimeError)           the cache of a result is read when it can no longer be made
├── EngineClosedError (RuntimeError)        submit after shutdown()
├── EngineOverloadedError (RuntimeError)    too many requests wait already: CBConfig.max_queue_size
├── EngineDeadError (RuntimeError)          the engine cannot go on (broken invariant, lost device, fork)
├── RequestCancelledError (RuntimeError)    the request was cancelled before it ended
├── RequestTimeoutError (TimeoutError)      the request's own deadline passed, or result(timeout=) ran out
├── RequestFailedError (RuntimeError)       the step that held this request failed; the cause is chained
└── PipelineItemsError (RuntimeError)       items of a pipeline's list failed; the results of the others are in it

Every message names the argument or the limit that it is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class HFCBError(Exception):
    """Base of every error that hf_cb raises on purpose."""


class InvalidArgumentError(HFCBError, ValueError):
    """An argument has a value that nothing can serve. The message names it and says what it takes."""


class RequestTooLongError(InvalidArgumentError):
    """The request could never fit, even alone. The message says how many tokens would."""


class UnsupportedModelError(HFCBError, TypeError):
    """The model is not one that can be installed, or its engine found that it cannot serve it."""


class UnsupportedCallError(HFCBError, ValueError):
    """The engine cannot serve this call and the configuration forbids running it natively."""


class AlreadyInstalledError(HFCBError, RuntimeError):
    """The model already has a generation backend."""


class NotInstalledError(HFCBError, RuntimeError):
    """The model has no generation backend of ours."""


class CacheLostError(HFCBError, RuntimeError):
    """The cache of a result is made when it is first read, and the model has changed since, trains, or is gone."""


class EngineClosedError(HFCBError, RuntimeError):
    """The engine was shut down and takes no more requests."""


class EngineOverloadedError(HFCBError, RuntimeError):
    """Too many requests wait already. The message says how many wait and run. Nothing was queued: try again later."""


class EngineDeadError(HFCBError, RuntimeError):
    """The engine cannot go on; the cause is chained."""


class RequestCancelledError(HFCBError, RuntimeError):
    """The request was cancelled before it ended."""


class RequestTimeoutError(HFCBError, TimeoutError):
    """A deadline passed: the request's own, or the one given to ``result(timeout=)``."""


class RequestFailedError(HFCBError, RuntimeError):
    """What the engine did for this request failed; the cause is chained."""


def brief(error: BaseException) -> str:
    """An error in a few words: its type, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def failure_of(request_id: int, cause: BaseException) -> RequestFailedError:
    """The error that a request's callers get, with its cause."""
    error = RequestFailedError(f"request {request_id} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


class PipelineItemsError(HFCBError, RuntimeError):
    """Items of a list that was given to an installed pipeline failed. The others were done; the first failure is chained."""

    def __init__(self, results: list[Any], errors: dict[int, Exception]) -> None:
        """`results`: of all items in order, the exception in the place of one that failed; `errors`: those, by place."""
        self.results = results
        self.errors = errors
        first, error = next(iter(errors.items()))
        super().__init__(
            f"{len(errors)} of {len(results)} items failed, the first of them item {first} ({type(error).__name__}: {error}); "
            f"`results` of this error has the results of the others"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.results, self.errors)
