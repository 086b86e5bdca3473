"""Blocks shared by sequences that begin alike: what is computed is the least there is, and nobody sees another's tokens."""

import pytest
from scheduling import make_scheduler, run
from stub_model import StubModel, output_alone

from hf_cb.core import prefix
from hf_cb.core.prefix import PrefixNames
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import FinishReason, Request, Service

BLOCK = 4


def make(num_tokens: int, max_new_tokens: int = 4, *, first: int = 0, salt: str | None = None) -> Request:
    """A prompt of distinct tokens; two with the same `first` begin alike."""
    return Request(tuple(range(first, first + num_tokens)), max_new_tokens, service=Service(cache_salt=salt))


def sharing(**options) -> Scheduler:
    return make_scheduler(**{"prefix_cache": True, **options})


def serve(scheduler: Scheduler, model: StubModel, *requests: Request) -> tuple[int, list[list[int]]]:
    """Run them to their end; tokens computed and each one's output, which must be right."""
    for request in requests:
        scheduler.add(request)
    computed, outputs = 0, {request.request_id: [] for request in requests}
    while scheduler.has_work:
        output = scheduler.schedule()
        computed += output.num_scheduled_tokens
        for emission in scheduler.update(output, model.step(output)):
            outputs[emission.request_id].extend(emission.tokens)
        scheduler.check()
    assert list(outputs.values()) == [output_alone(request) for request in requests]
    return computed, list(outputs.values())


def test_a_prompt_that_was_computed_is_found_again_but_for_its_last_token():
    scheduler, model = sharing(), StubModel(BLOCK)
    assert serve(scheduler, model, make(12, 1))[0] == 12
    assert serve(scheduler, model, make(12, 1))[0] == 4  # three full blocks, and the last token's logits are needed
    assert serve(scheduler, model, make(13, 1))[0] == 1
    assert serve(scheduler, model, make(11, 1))[0] == 3
    assert serve(scheduler, model, make(3, 1))[0] == 3
    assert serve(scheduler, model, make(12, 1, first=1))[0] == 12


def test_output_is_found_by_the_next_turn():
    scheduler, model = sharing(), StubModel(BLOCK)
    prompt = make(6, 7)
    (output,) = serve(scheduler, model, prompt)[1]
    # 6 + 7 tokens are known, of which the last has no keys and values: three full blocks.
    turn = Request((*prompt.prompt, *output, 90, 91, 92), 5)
    assert serve(scheduler, model, turn)[0] == len(turn.prompt) - 12 + 4
    (output_of_turn,) = [output_alone(turn)]
    third = Request((*turn.prompt, *output_of_turn, 93), 1)
    assert serve(scheduler, model, third)[0] == len(third.prompt) - 20


def test_several_that_come_together_compute_what_they_share_once():
    scheduler, model = sharing(num_blocks=200), StubModel(BLOCK)
    prompts = [Request((*range(24), 100 + i), 1) for i in range(8)]
    assert serve(scheduler, model, *prompts)[0] == 24 + 8


def test_several_that_come_together_share_a_prompt_that_takes_many_steps():
    scheduler, model = sharing(num_blocks=200, max_batch_tokens=5), StubModel(BLOCK)
    prompts = [Request((*range(24), 100 + i), 1) for i in range(8)]
    assert serve(scheduler, model, *prompts)[0] == 24 + 8


def test_the_first_of_several_is_aborted_while_the_others_wait_for_it():
    scheduler, model = sharing(num_blocks=200, max_batch_tokens=8), StubModel(BLOCK)
    first, *rest = [Request((*range(24), 100 + i), 1) for i in range(4)]
    for request in (first, *rest):
        scheduler.add(request)
    output = scheduler.schedule()
    assert [row.request_id for row in output.rows] == [first.request_id]
    scheduler.update(output, model.step(output))
    output = scheduler.schedule()
    scheduler.abort(first.request_id, FinishReason.CANCELLED)
    scheduler.update(output, model.step(output))
    tokens, _ = run(scheduler, model)
    assert tokens == {request.request_id: output_alone(request) for request in rest}


def test_a_step_that_failed_publishes_nothing():
    scheduler, model = sharing(), StubModel(BLOCK)
    failed = make(12, 1)
    scheduler.add(failed)
    scheduler.schedule()  # its slots are never written
    scheduler.abort(failed.request_id, FinishReason.FAILED)
    assert serve(scheduler, model, make(12, 1))[0] == 12


def test_a_salt_keeps_apart():
    scheduler, model = sharing(), StubModel(BLOCK)
    for salt in (None, "a", "b", ""):
        assert serve(scheduler, model, make(12, 1, salt=salt))[0] == 12
    for salt in (None, "a", "b", ""):
        assert serve(scheduler, model, make(12, 1, salt=salt))[0] == 4


def test_without_the_cache_everything_is_computed():
    scheduler, model = sharing(prefix_cache=False), StubModel(BLOCK)
    for _ in range(2):
        assert serve(scheduler, model, make(12, 1))[0] == 12


def test_what_was_forgotten_is_computed_again():
    scheduler, model = sharing(), StubModel(BLOCK)
    serve(scheduler, model, make(12, 1))
    scheduler.forget_prefixes()
    assert serve(scheduler, model, make(12, 1))[0] == 12
    assert serve(scheduler, model, make(12, 1))[0] == 4


def test_a_sequence_that_ran_while_all_was_forgotten_publishes_no_more():
    scheduler, model = sharing(), StubModel(BLOCK)
    running = make(6, 10)
    scheduler.add(running)
    output = scheduler.schedule()
    scheduler.update(output, model.step(output))
    scheduler.forget_prefixes()
    run(scheduler, model)
    whole = Request((*running.prompt, *output_alone(running)), 1)
    assert serve(scheduler, model, whole)[0] == len(whole.prompt)


def test_a_preempted_sequence_finds_what_nobody_took():
    scheduler, model = sharing(num_blocks=7), StubModel(BLOCK)
    first, second = make(7, 14), make(7, 14, first=50)
    computed, _ = serve(scheduler, model, first, second)
    assert scheduler.num_preemptions > 0
    without, _ = serve(sharing(num_blocks=7, prefix_cache=False), StubModel(BLOCK), first, second)
    assert computed < without


def test_the_least_recently_used_goes_first_from_its_end():
    scheduler, model = sharing(num_blocks=6), StubModel(BLOCK)
    old, new = make(12, 1), make(8, 1, first=50)
    serve(scheduler, model, old)
    serve(scheduler, model, new)
    serve(scheduler, model, make(5, 1, first=80))  # takes the free block, and the last of `old`
    assert serve(scheduler, model, new)[0] == 4
    assert serve(scheduler, model, old)[0] == 4


def test_equal_hashes_are_not_taken_for_equal_tokens(monkeypatch):
    monkeypatch.setattr(prefix, "_hash", lambda *parts: b"the same")
    scheduler, model = sharing(), StubModel(BLOCK)
    for first in (0, 30, 60):
        serve(scheduler, model, make(8, 2, first=first))  # each must be right
    assert serve(scheduler, model, make(12, 1))[0] == 8  # it is found by the first block only, where tokens agree


def test_names_depend_on_all_that_comes_before_and_on_the_salt():
    def keys(tokens, salt=None):
        return [name.key for name in PrefixNames(2, salt).upto(len(tokens) // 2, tokens)]

    assert keys([1, 2, 3, 4]) == keys([1, 2, 3, 4, 5])
    assert keys([1, 2, 3, 4])[1] != keys([2, 2, 3, 4])[1]
    assert all(len(key) >= 16 for key in keys([1, 2, 3, 4]))
    assert len({keys([1, 2], salt)[0] for salt in (None, "", "a", "b")}) == 4


@pytest.mark.parametrize("budget", [3, 7, 32])
def test_how_much_was_found_is_told_once(budget):
    scheduler, model = sharing(max_batch_tokens=budget), StubModel(BLOCK)
    told = []
    for request in (make(12, 3), make(14, 3), make(3, 2)):
        scheduler.add(request)
        while scheduler.has_work:
            output = scheduler.schedule()
            told += output.cached
            scheduler.update(output, model.step(output))
    assert [tokens for _, tokens in told] == [0, 12, 0]
