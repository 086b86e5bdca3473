"""A caller's processors and criteria find what its thread has set, though they run on another one."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import crowd
import models
import pytest
import seam
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from two_pipes import pipe_of, texts

import hf_cb

NEW = 6
PROMPTS = [row[None] for row in seam.prompts(6, 17, 3, 9)]
tenant: contextvars.ContextVar[int] = contextvars.ContextVar("tenant", default=0)


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made


def by_tenant(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(tenant.get(), dims=-1)


def test_context_variables_of_each_caller(duo: seam.Duo) -> None:
    def call(prompt: torch.Tensor, model: Any, number: int) -> list[int]:
        tenant.set(number)
        return model.generate(prompt, max_new_tokens=NEW, logits_processor=[by_tenant])[0].tolist()

    for beams in (1, 2):
        tenant.set(beams)
        duo.same(PROMPTS[0], max_new_tokens=NEW, logits_processor=[by_tenant], num_beams=beams)
    want = [contextvars.copy_context().run(call, prompt, duo.plain, i) for i, prompt in enumerate(PROMPTS)]
    got = crowd.answers(duo.engine, [lambda i=i: call(PROMPTS[i], duo.served, i) for i in range(len(PROMPTS))])
    assert got == want


def test_what_is_set_stays_set(duo: seam.Duo) -> None:
    def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tenant.set(tenant.get() + 1)
        if tenant.get() == 3:
            raise KeyError("the third")
        return scores

    for model in (duo.plain, duo.served):
        tenant.set(5)
        model.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=[count])
        assert tenant.get() == 5 + NEW
        tenant.set(1)
        with pytest.raises(KeyError):
            model.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=[count])
        assert tenant.get() == 3


class Novelty:
    """Keeps a tensor of its own and writes to it; notes in which modes it is called, and what it is given."""

    def __init__(self) -> None:
        self.seen = torch.zeros(models.VOCAB, device="cpu")
        self.notes: set[tuple[Any, ...]] = set()

    def __call__(self, ids: torch.Tensor, scores: Any) -> Any:
        self.seen[ids[0, -1]] += 1.5
        kept = scores if isinstance(scores, torch.Tensor) else scores[-1]
        made = torch.ones(1)
        self.notes.add(
            (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), kept.is_inference(), made.device, made.dtype)
        )
        if isinstance(scores, torch.Tensor):
            return scores - self.seen
        return torch.tensor([False] * len(ids), device=ids.device)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "default device": lambda: torch.device("meta"),
}


# Under another default device plain generate has no beams: its own tensors would be there.
@pytest.mark.parametrize(("name", "beams"), [(name, n) for n in (1, 2) for name in MODES if (name, n) != ("default device", 2)])
def test_modes(duo: seam.Duo, name: str, beams: int) -> None:
    mode, notes = MODES[name], []
    for inside in (True, False):  # where the object with the tensor is made
        outcomes = []
        for model in (duo.plain, duo.served):
            own = Novelty()
            with mode():
                own = Novelty() if inside else own
                out = model.generate(
                    PROMPTS[0],
                    max_new_tokens=NEW,
                    num_beams=beams,
                    logits_processor=[own],
                    stopping_criteria=[own],
                    return_dict_in_generate=True,
                    output_scores=True,
                )
                outcomes.append((out.sequences.tolist(), [step.is_inference() for step in out.scores]))
            notes.append(own.notes)
            outcomes[-1][1].append(bool(own.seen.sum() > 0))
        assert outcomes[0] == outcomes[1]
    assert notes[0] == notes[1] == notes[2] == notes[3]


def test_who_needs_its_callers_thread_gets_it(duo: seam.Duo) -> None:
    local = threading.local()
    local.shift = 3

    def by_local(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(local.shift, dims=-1)

    class Watch:
        needs_callers_thread = True

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([local.shift > 9])

    by_local.needs_callers_thread = True  # type: ignore[attr-defined]
    duo.same(PROMPTS[0], max_new_tokens=NEW, logits_processor=[by_local], native="by_local needs its caller's thread")
    duo.same(PROMPTS[0], max_new_tokens=NEW, stopping_criteria=[Watch()], native="Watch needs its caller's thread")

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [local.shift + 1]

    allowed.needs_callers_thread = True  # type: ignore[attr-defined]
    duo.same(PROMPTS[0], max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed, native="allowed needs its caller's thread")


class Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is torch.ops.aten.silu.default else out


@pytest.mark.parametrize("mode", [Calls, Operations])
def test_other_modes_of_the_callers_watch_its_thread(duo: seam.Duo, mode: type[Any]) -> None:
    with mode():
        duo.same(PROMPTS[0], max_new_tokens=NEW, native="on in the calling thread")
    duo.same(PROMPTS[0], max_new_tokens=NEW)


def test_the_threads_of_a_pipeline() -> None:
    """Reading, preparing and answering, which a plain pipeline does on its caller's thread."""

    class Safe:
        supports_continuous_batching = True
        needs_callers_thread = False

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return by_tenant(ids, scores)

    def items() -> Iterator[str]:
        for text in texts(5, 9, 3, 7):
            yield f"{text} w{tenant.get() + 20}"

    plain, served = pipe_of(), pipe_of()
    hf_cb.install(served)
    try:
        tenant.set(4)
        answers = [
            list(pipe(items(), max_new_tokens=NEW, do_sample=False, logits_processor=[Safe()])) for pipe in (plain, served)
        ]
        assert answers[0] == answers[1]
        assert "w24" in answers[1][0][0]["generated_text"]
        assert hf_cb.get_engine(served).stats().native_calls == {}
    finally:
        hf_cb.uninstall(served)
