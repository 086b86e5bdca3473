"""Preempted sequences that wait in the host's memory: nothing is computed twice, nobody's blocks are mixed up."""

import pytest
from scheduling import make_request, make_scheduler
from stub_model import StubModel, output_alone

from hf_cb.core.scheduler import Scheduler
from hf_cb.core.swap_cost import SwapCost
from hf_cb.request import FinishReason, Request


def serve(scheduler: Scheduler, requests: list[Request]) -> tuple[int, int]:
    """Run all to their end, which must be right. Tokens computed, and blocks copied either way."""
    model, outputs = StubModel(4), {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    computed = copied = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        model.move(output)
        copied += len(output.moves.swap_out) + len(output.moves.swap_in)
        computed += output.num_scheduled_tokens
        for emission in scheduler.update(output, model.step(output)):
            outputs[emission.request_id].extend(emission.tokens)
        scheduler.check()
    assert outputs == {request.request_id: output_alone(request) for request in requests}
    return computed, copied


def requests() -> list[Request]:
    return [make_request(5 + i % 3, 14) for i in range(6)]


def least(wanted: list[Request]) -> int:
    return sum(request.max_tokens - 1 for request in wanted)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_with_room_enough_nothing_is_computed_again(prefix_cache):
    wanted = requests()
    scheduler = make_scheduler(num_blocks=9, num_host_blocks=40, prefix_cache=prefix_cache)
    computed, copied = serve(scheduler, wanted)
    assert scheduler.num_swaps == scheduler.num_preemptions > 0
    assert copied > 0
    if prefix_cache:
        assert computed <= least(wanted)
    else:
        assert computed == least(wanted)
    without = make_scheduler(num_blocks=9, prefix_cache=prefix_cache)
    assert serve(without, requests())[0] >= computed
    assert without.num_preemptions > without.num_swaps == 0


def test_who_finds_no_room_computes_again():
    wanted = requests()
    scheduler = make_scheduler(num_blocks=9, num_host_blocks=2)
    computed, _ = serve(scheduler, wanted)
    assert scheduler.num_preemptions > scheduler.num_swaps
    assert computed > least(wanted)


def test_the_cheaper_is_chosen():
    for block_seconds, swaps in ((1e-3, True), (1.0, False)):
        scheduler = make_scheduler(num_blocks=9, num_host_blocks=40, swap_cost=SwapCost(block_seconds))
        scheduler.swap_cost.observe_step(10, 0.1)
        serve(scheduler, requests())
        assert (scheduler.num_swaps > 0) == swaps


def test_the_cost_follows_what_is_measured():
    cost = SwapCost(1.0)
    assert cost.is_cheaper(1, 100)  # nothing was computed yet: what was given for it is used
    cost.observe_step(100, 0.1)  # a millisecond each
    assert not cost.is_cheaper(16, 1)
    for _ in range(40):
        cost.observe_swap(10, 0.001)
    assert cost.is_cheaper(16, 1)
    assert not cost.is_cheaper(1, 10)


@pytest.mark.parametrize("end", [FinishReason.CANCELLED, FinishReason.TIMEOUT])
def test_one_that_ends_while_it_waits_there_gives_the_room_back(end):
    scheduler, model = make_scheduler(num_blocks=4, num_host_blocks=2), StubModel(4)
    first, second = make_request(7, 8), make_request(7, 8)
    for request in (first, second):
        scheduler.add(request)
    while not (output := scheduler.schedule()).preempted:
        scheduler.update(output, model.step(output))
    assert output.moves.swap_out
    scheduler.check()
    scheduler.abort(second.request_id, end)
    scheduler.check()
    scheduler.abort(first.request_id, end)
    serve(scheduler, [make_request(7, 8), make_request(7, 8)])
    assert scheduler.num_swaps == 2


def test_one_that_computed_by_an_older_model_publishes_nothing_when_it_is_back():
    scheduler, model = make_scheduler(num_blocks=4, num_host_blocks=4, prefix_cache=True), StubModel(4)
    first, second = Request(tuple(range(7)), 8), Request(tuple(range(50, 57)), 8)
    for request in (first, second):
        scheduler.add(request)
    while scheduler.has_work:
        output = scheduler.schedule()
        model.move(output)
        if output.moves.swap_out:
            scheduler.forget_prefixes()
        scheduler.update(output, model.step(output))
    later = Request((*second.prompt, *output_alone(second)), 1)
    scheduler.add(later)
    assert scheduler.schedule().cached == ((later.request_id, 0),)
    scheduler.abort(later.request_id, FinishReason.CANCELLED)
