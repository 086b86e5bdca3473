"""Aborts at any point of the cycle, rows with errors, and steps that fail."""

import pytest
from scheduling import make_request, make_scheduler, run
from stub_model import StubModel, output_alone

from hf_cb.core.output import Emission, StepResult
from hf_cb.errors import EngineDeadError
from hf_cb.request import FinishReason


def test_abort_of_a_waiting_sequence():
    scheduler, model = make_scheduler(max_batch_size=1), StubModel(4)
    requests = [make_request(2), make_request(2), make_request(2)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    assert not scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    scheduler.check()
    tokens, _ = run(scheduler, model)
    assert list(tokens) == [requests[0].request_id, requests[2].request_id]


def test_abort_of_a_running_sequence_frees_its_blocks():
    scheduler, model, request = make_scheduler(), StubModel(4), make_request(9)
    scheduler.add(request)
    output = scheduler.schedule()
    scheduler.update(output, model.step(output))
    assert (scheduler.memory.blocks_used, scheduler.memory.tokens_stored) == (3, 9)
    assert scheduler.abort(request.request_id, FinishReason.TIMEOUT)
    assert (scheduler.memory.blocks_used, scheduler.memory.tokens_stored, scheduler.has_work) == (0, 0, False)
    assert not scheduler.abort(request.request_id, FinishReason.TIMEOUT)
    scheduler.check()


def test_abort_of_a_preempted_sequence():
    scheduler, model = make_scheduler(num_blocks=4), StubModel(4)
    requests = [make_request(7, 8), make_request(7, 8)]
    for request in requests:
        scheduler.add(request)
    while not (output := scheduler.schedule()).preempted:
        scheduler.update(output, model.step(output))
    assert scheduler.abort(requests[1].request_id, FinishReason.CANCELLED)
    scheduler.update(output, model.step(output))
    tokens, _ = run(scheduler, model)
    assert list(tokens) == [requests[0].request_id]


def test_abort_between_schedule_and_update_ignores_the_row():
    scheduler, model = make_scheduler(), StubModel(4)
    kept, gone = make_request(5), make_request(5)
    scheduler.add(gone)
    scheduler.add(kept)
    output = scheduler.schedule()
    result = model.step(output)
    assert scheduler.abort(gone.request_id, FinishReason.CANCELLED)
    assert [emission.request_id for emission in scheduler.update(output, result)] == [kept.request_id]
    scheduler.check()
    tokens, _ = run(scheduler, model)
    assert tokens == {kept.request_id: output_alone(kept)[1:]}


def test_abort_of_an_ended_or_unknown_request_does_nothing():
    scheduler, request = make_scheduler(), make_request(2, 1)
    scheduler.add(request)
    run(scheduler, StubModel(4))
    assert not scheduler.abort(request.request_id, FinishReason.CANCELLED)
    assert not scheduler.abort(-1, FinishReason.CANCELLED)


def test_a_row_with_an_error_ends_alone():
    scheduler, model = make_scheduler(), StubModel(4)
    good, bad = make_request(3), make_request(3)
    scheduler.add(bad)
    scheduler.add(good)
    output = scheduler.schedule()
    error = ValueError("a processor failed")
    result = model.step(output)
    del result.tokens[bad.request_id]
    emissions = scheduler.update(output, StepResult(result.tokens, {bad.request_id: error}))
    assert emissions[0] == Emission(bad.request_id, (), FinishReason.FAILED, error)
    assert emissions[1] == Emission(good.request_id, (output_alone(good)[0],), None)
    scheduler.check()
    assert scheduler.num_running == 1


def test_a_step_that_failed_is_repeated_without_the_offender():
    scheduler, model = make_scheduler(max_batch_tokens=8), StubModel(4)
    requests = [make_request(3), make_request(3), make_request(9)]
    for request in requests:
        scheduler.add(request)
    failed = scheduler.schedule()
    assert scheduler.memory.tokens_stored == 0
    assert scheduler.schedule() == failed
    scheduler.abort(requests[0].request_id, FinishReason.FAILED)
    again = scheduler.schedule()
    assert again.rows[0] == failed.rows[1]
    assert (again.rows[1].start, len(again.rows[1].token_ids)) == (0, 5)
    scheduler.update(again, model.step(again))
    tokens, _ = run(scheduler, model)
    assert tokens[requests[2].request_id] == output_alone(requests[2])


def test_the_wrong_result_is_a_broken_invariant():
    scheduler, model = make_scheduler(), StubModel(4)
    scheduler.add(make_request(3))
    output = scheduler.schedule()
    with pytest.raises(EngineDeadError, match="neither a token nor an error"):
        scheduler.update(output, StepResult({}))
    with pytest.raises(EngineDeadError, match="not that of the latest step"):
        scheduler.update(output, model.step(output))
