import random

import pytest
from stub_model import StubModel, output_alone

from hf_cb.core.output import Emission, StepResult
from hf_cb.core.scheduler import Scheduler
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError
from hf_cb.request import FinishReason, Request


def _scheduler(**options) -> Scheduler:
    return Scheduler(**{"num_blocks": 64, "block_size": 4, "max_batch_tokens": 32, "max_batch_size": 8} | options)


def _request(num_prompt_tokens: int, max_new_tokens: int = 4, **options) -> Request:
    return Request(tuple(i % 2 for i in range(num_prompt_tokens)), max_new_tokens, **options)


def _lens(output) -> list[tuple[int, int]]:
    return [(row.start, len(row.token_ids)) for row in output.rows]


def _run(scheduler: Scheduler, model: StubModel, steps: int = 1000) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    """Step until nothing is left. Returns outputs and reasons by request id, in the order in which they ended."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    while scheduler.has_work:
        steps -= 1
        assert steps >= 0, "no end"
        output = scheduler.schedule()
        for emission in scheduler.update(output, model.step(output)):
            tokens.setdefault(emission.request_id, []).append(emission.token)
            if emission.finish_reason is not None:
                ended[emission.request_id] = emission.finish_reason
        scheduler.check()
    return tokens, ended


# -- the rule -------------------------------------------------------------------------------------------------------------


def test_a_prompt_runs_in_one_step_and_then_token_by_token():
    scheduler, model, request = _scheduler(), StubModel(4), _request(6, 3)
    scheduler.add(request)
    shapes = []
    while scheduler.has_work:
        output = scheduler.schedule()
        (row,) = output.rows
        assert (row.request_id, row.samples) == (request.request_id, True)
        assert row.token_ids == scheduler.tokens_of(request.request_id)[row.start :]
        assert len(row.block_table) == -(-(row.start + len(row.token_ids)) // 4)
        shapes.append((row.start, len(row.token_ids)))
        scheduler.update(output, model.step(output))
    assert shapes == [(0, 6), (6, 1), (7, 1)]


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_its_end_only():
    scheduler, model = _scheduler(max_batch_tokens=4), StubModel(4)
    scheduler.add(_request(10, 2))
    seen = []
    while scheduler.has_work:
        output = scheduler.schedule()
        emissions = scheduler.update(output, model.step(output))
        seen.append((*_lens(output), output.rows[0].samples, len(emissions)))
    assert seen == [((0, 4), False, 0), ((4, 4), False, 0), ((8, 2), True, 1), ((10, 1), True, 1)]


def test_running_sequences_come_before_admission_and_all_share_the_budget():
    scheduler, model = _scheduler(max_batch_tokens=8), StubModel(4)
    first, second, third = _request(3), _request(12), _request(2)
    scheduler.add(first)
    output = scheduler.schedule()
    scheduler.update(output, model.step(output))
    scheduler.add(second)
    scheduler.add(third)
    seen = []
    for _ in range(3):
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == sum(len(row.token_ids) for row in output.rows)
        seen.append({row.request_id: len(row.token_ids) for row in output.rows})
        scheduler.update(output, model.step(output))
    one, two, three = (request.request_id for request in (first, second, third))
    assert seen == [{one: 1, two: 7}, {one: 1, two: 5, three: 2}, {one: 1, two: 1, three: 1}]


def test_batch_size_limits_admission():
    scheduler = _scheduler(max_batch_size=2)
    for _ in range(3):
        scheduler.add(_request(1))
    assert len(scheduler.schedule().rows) == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_prompt_is_not_started_before_there_are_blocks_for_all_of_it():
    scheduler, model = _scheduler(num_blocks=4, max_batch_tokens=5), StubModel(4)
    first, second = _request(8, 5), _request(10, 2)
    scheduler.add(first)
    scheduler.add(second)
    tokens, ended = _run(scheduler, model)
    assert list(ended) == [first.request_id, second.request_id]
    assert scheduler.num_preemptions == 0
    assert tokens[second.request_id] == output_alone(second)


def test_a_small_request_does_not_overtake_one_that_does_not_fit_now():
    scheduler, model = _scheduler(num_blocks=4), StubModel(4)
    big = [_request(12, 2), _request(12, 2)]
    small = _request(1, 1)
    for request in (*big, small):
        scheduler.add(request)
    _, ended = _run(scheduler, model)
    assert next(iter(ended)) == big[0].request_id
    assert scheduler.num_preemptions == 0


# -- where it ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [0, 1])
def test_eos_ends_a_sequence_with_that_token(eos):
    scheduler, request = _scheduler(), _request(5, 40, eos_token_ids=frozenset({eos}))
    scheduler.add(request)
    tokens, ended = _run(scheduler, StubModel(4))
    output = tokens[request.request_id]
    assert output == output_alone(request)
    assert output.index(eos) == len(output) - 1 < 39
    assert ended == {request.request_id: FinishReason.STOP}


def test_eos_in_the_prompt_does_not_count():
    scheduler, request = _scheduler(), Request((7, 7), 2, eos_token_ids=frozenset({7}))
    scheduler.add(request)
    tokens, ended = _run(scheduler, StubModel(4))
    assert len(tokens[request.request_id]) == 2
    assert ended == {request.request_id: FinishReason.LENGTH}


def test_a_request_that_fits_exactly_completes_alone_and_beside_others():
    scheduler, model = _scheduler(num_blocks=3), StubModel(4)
    exact = [_request(12, 1), _request(7, 6), _request(1, 12)]
    for request in exact:
        assert request.max_tokens - 1 == 12
        scheduler.add(request)
    tokens, _ = _run(scheduler, model)
    assert tokens == {request.request_id: output_alone(request) for request in exact}


@pytest.mark.parametrize("request_", [_request(13, 1), _request(7, 7), _request(1, 13)])
def test_one_token_too_many_never_enters(request_):
    scheduler = _scheduler(num_blocks=3)
    with pytest.raises(RequestTooLongError, match=r"^max_new_tokens: .* are 14, and at most 13 fit"):
        scheduler.check_fits(request_)
    with pytest.raises(RequestTooLongError):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_the_same_request_is_not_added_twice():
    scheduler, request = _scheduler(), _request(2)
    scheduler.add(request)
    with pytest.raises(InvalidArgumentError, match=r"^request: "):
        scheduler.add(request)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_batch_tokens", "max_batch_size"])
def test_sizes_are_checked(name):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: takes an integer >= 1; got 0"):
        _scheduler(**{name: 0})


# -- preemption -----------------------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_keeps_its_tokens_and_resumes():
    scheduler, model = _scheduler(num_blocks=4), StubModel(4)
    first, second = _request(7, 8), _request(7, 8)
    scheduler.add(first)
    scheduler.add(second)
    history = []
    outputs: dict[int, list[int]] = {first.request_id: [], second.request_id: []}
    while scheduler.has_work:
        before = scheduler.tokens_of(second.request_id)
        output = scheduler.schedule()
        if output.preempted:
            assert output.preempted == (second.request_id,)
            assert [row.request_id for row in output.rows] == [first.request_id]  # and nobody is admitted
            assert scheduler.tokens_of(second.request_id) == before
            assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (1, 1, 1)
        history.append(_lens(output))
        for emission in scheduler.update(output, model.step(output)):
            outputs[emission.request_id].append(emission.token)
        scheduler.check()
    assert scheduler.num_preemptions == 1
    # After step 2 both hold 8 tokens in 2 blocks; the second comes back when the first has ended, 2 tokens on.
    assert history[:3] == [[(0, 7), (0, 7)], [(7, 1), (7, 1)], [(8, 1)]]
    assert [(0, 9)] in history
    assert outputs == {request.request_id: output_alone(request) for request in (first, second)}


def test_a_preempted_sequence_comes_before_those_that_wait():
    scheduler, model = _scheduler(num_blocks=4, max_batch_size=2), StubModel(4)
    first, second, third = _request(7, 8), _request(7, 8), _request(1, 1)
    for request in (first, second, third):
        scheduler.add(request)
    served = []
    while scheduler.has_work:
        output = scheduler.schedule()
        served.append([row.request_id for row in output.rows])
        scheduler.update(output, model.step(output))
    assert scheduler.num_preemptions == 1
    one, two, three = first.request_id, second.request_id, third.request_id
    assert [one] in served
    assert [one, three] not in served  # though there was a block for it
    assert [two, three] in served


class _LastComeFirstServed:
    """The other way round: the first arrival gives way, though it was given its tokens before the step's others."""

    def __init__(self) -> None:
        self.waiting = []

    def enqueue(self, seq):
        self.waiting.append(seq)

    put_back = enqueue

    def remove(self, seq):
        self.waiting.remove(seq)

    def next_waiting(self):
        return max(self.waiting, key=lambda seq: seq.arrival, default=None)

    def victim(self, running):
        return min(running, key=lambda seq: seq.arrival)

    def __len__(self):
        return len(self.waiting)


def test_a_victim_that_had_its_tokens_in_this_step_loses_them():
    scheduler, model = _scheduler(num_blocks=4, policy=_LastComeFirstServed()), StubModel(4)
    first, second = _request(5, 8), _request(8, 4)
    tokens: dict[int, list[int]] = {first.request_id: [], second.request_id: []}
    preempted = []
    scheduler.add(first)
    while scheduler.has_work:
        output = scheduler.schedule()
        if output.preempted:
            preempted.append((output.preempted, [row.request_id for row in output.rows], output.num_scheduled_tokens))
        for emission in scheduler.update(output, model.step(output)):
            tokens[emission.request_id].append(emission.token)
        scheduler.check()
        if len(tokens[first.request_id]) == 1:
            scheduler.add(second)
    # The first comes before the second among the running, and has room; the second needs a third block.
    assert preempted == [((first.request_id,), [second.request_id], 1)]
    assert tokens == {request.request_id: output_alone(request) for request in (first, second)}


# -- aborts, errors and steps that fail -----------------------------------------------------------------------------------


def test_abort_of_a_waiting_sequence():
    scheduler, model = _scheduler(max_batch_size=1), StubModel(4)
    requests = [_request(2), _request(2), _request(2)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    assert not scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    scheduler.check()
    tokens, _ = _run(scheduler, model)
    assert list(tokens) == [requests[0].request_id, requests[2].request_id]


def test_abort_of_a_running_sequence_frees_its_blocks():
    scheduler, model, request = _scheduler(), StubModel(4), _request(9)
    scheduler.add(request)
    output = scheduler.schedule()
    scheduler.update(output, model.step(output))
    assert (scheduler.blocks_used, scheduler.tokens_stored) == (3, 9)
    assert scheduler.abort(request.request_id, FinishReason.TIMEOUT)
    assert (scheduler.blocks_used, scheduler.tokens_stored, scheduler.has_work) == (0, 0, False)
    with pytest.raises(KeyError):
        scheduler.tokens_of(request.request_id)
    scheduler.check()


def test_abort_of_a_preempted_sequence():
    scheduler, model = _scheduler(num_blocks=4), StubModel(4)
    requests = [_request(7, 8), _request(7, 8)]
    for request in requests:
        scheduler.add(request)
    while not (output := scheduler.schedule()).preempted:
        scheduler.update(output, model.step(output))
    assert scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    scheduler.update(output, model.step(output))
    tokens, _ = _run(scheduler, model)
    assert list(tokens) == [requests[0].request_id]


def test_abort_between_schedule_and_update_ignores_the_row():
    scheduler, model = _scheduler(), StubModel(4)
    kept, gone = _request(5), _request(5)
    scheduler.add(gone)
    scheduler.add(kept)
    output = scheduler.schedule()
    result = model.step(output)
    assert scheduler.abort(gone.request_id, FinishReason.CANCELLED)
    assert [emission.request_id for emission in scheduler.update(output, result)] == [kept.request_id]
    scheduler.check()
    tokens, _ = _run(scheduler, model)
    assert tokens == {kept.request_id: output_alone(kept)[1:]}


def test_abort_of_an_ended_or_unknown_request_does_nothing():
    scheduler, request = _scheduler(), _request(2, 1)
    scheduler.add(request)
    _run(scheduler, StubModel(4))
    assert not scheduler.abort(request.request_id, FinishReason.CANCELLED)
    assert not scheduler.abort(-1, FinishReason.CANCELLED)


def test_a_row_with_an_error_ends_alone():
    scheduler, model = _scheduler(), StubModel(4)
    good, bad = _request(3), _request(3)
    scheduler.add(bad)
    scheduler.add(good)
    output = scheduler.schedule()
    error = ValueError("a processor failed")
    result = model.step(output)
    del result.tokens[bad.request_id]
    emissions = scheduler.update(output, StepResult(result.tokens, {bad.request_id: error}))
    assert emissions[0] == Emission(bad.request_id, None, FinishReason.FAILED, error)
    assert emissions[1] == Emission(good.request_id, output_alone(good)[0], None)
    scheduler.check()
    assert scheduler.num_running == 1


def test_a_step_that_failed_is_repeated_without_the_offender():
    scheduler, model = _scheduler(max_batch_tokens=8), StubModel(4)
    requests = [_request(3), _request(3), _request(9)]
    for request in requests:
        scheduler.add(request)
    failed = scheduler.schedule()
    assert scheduler.tokens_stored == 0
    assert scheduler.schedule() == failed
    scheduler.abort(requests[0].request_id, FinishReason.FAILED)
    again = scheduler.schedule()
    assert again.rows[0] == failed.rows[1]
    assert (again.rows[1].start, len(again.rows[1].token_ids)) == (0, 5)
    scheduler.update(again, model.step(again))
    tokens, _ = _run(scheduler, model)
    assert tokens[requests[2].request_id] == output_alone(requests[2])


def test_the_wrong_result_is_a_broken_invariant():
    scheduler, model = _scheduler(), StubModel(4)
    scheduler.add(_request(3))
    output = scheduler.schedule()
    with pytest.raises(EngineDeadError, match="neither a token nor an error"):
        scheduler.update(output, StepResult({}))
    with pytest.raises(EngineDeadError, match="not that of the latest step"):
        scheduler.update(output, model.step(output))


def _lose_a_running_sequence(scheduler):
    scheduler._running.popitem()


def _lose_a_waiting_sequence(scheduler):
    scheduler._policy.remove(scheduler._policy.next_waiting())


def _let_a_waiting_sequence_hold_blocks(scheduler):
    scheduler._kv.reserve(scheduler._policy.next_waiting(), 1)


@pytest.mark.parametrize("damage", [_lose_a_running_sequence, _lose_a_waiting_sequence, _let_a_waiting_sequence_hold_blocks])
def test_check_sees_damage(damage):
    scheduler = _scheduler(max_batch_size=1)
    scheduler.add(_request(3))
    scheduler.add(_request(3))
    scheduler.schedule()
    scheduler.check()
    damage(scheduler)
    with pytest.raises(EngineDeadError):
        scheduler.check()


# -- many -----------------------------------------------------------------------------------------------------------------


def test_5000_requests_go_through_in_order_and_each_as_if_it_were_alone():
    rng = random.Random(5)
    scheduler = _scheduler(num_blocks=60, max_batch_tokens=64, max_batch_size=32)
    model = StubModel(4, vocab_size=50)
    requests = [
        Request(tuple(rng.choices(range(50), k=rng.randint(1, 12))), rng.randint(1, 8), frozenset({0, 1})) for _ in range(5000)
    ]
    for request in requests:
        scheduler.add(request)
    tokens: dict[int, list[int]] = {}
    while scheduler.has_work:
        output = scheduler.schedule()
        for emission in scheduler.update(output, model.step(output)):
            tokens.setdefault(emission.request_id, []).append(emission.token)
    scheduler.check()
    assert scheduler.num_preemptions > 0
    assert list(tokens) == [request.request_id for request in requests]  # first tokens in the order of arrival
    assert all(tokens[request.request_id] == output_alone(request, vocab_size=50) for request in requests)
