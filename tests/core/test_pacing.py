import pytest
from scheduling import make_request, make_scheduler
from stub_model import StubModel, output_alone

from hf_cb.core.output import SchedulerOutput
from hf_cb.core.pacing import Pacer
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import FinishReason


def seconds(output: SchedulerOutput) -> float:
    """What the steps of a made-up machine take."""
    return 0.010 + 0.0002 * output.num_scheduled_tokens


def times(scheduler: Scheduler, num_decoding: int, prompt: int) -> tuple[list[float], list[int]]:
    """Long prompts come in while others decode: the time of each step in which they do, and the tokens of the long ones."""
    model = StubModel(4)
    decoding = [make_request(3, 200) for _ in range(num_decoding)]
    prompts = [make_request(prompt, 2) for _ in range(4)]
    for request in decoding:
        scheduler.add(request)
    took, chunks, outputs = [], [], {request.request_id: [] for request in (*decoding, *prompts)}
    for step in range(2000):
        if step == 5:
            for request in prompts:
                scheduler.add(request)
        if not scheduler.has_work:
            break
        output = scheduler.schedule()
        scheduler.observe(output, seconds(output))
        ids = {row.request_id for row in output.rows}
        if step > 5 and decoding[0].request_id in ids and output.num_scheduled_tokens > len(output.rows):
            assert all(request.request_id in ids for request in decoding)  # nobody is kept from its next token
            took.append(seconds(output))
            chunks.append(output.num_scheduled_tokens - num_decoding)
        for emission in scheduler.update(output, model.step(output)):
            outputs[emission.request_id].extend(emission.tokens)
    assert outputs == {request.request_id: output_alone(request) for request in (*decoding, *prompts)}
    return took, chunks


@pytest.mark.parametrize("target", [0.015, 0.03, 0.1])
def test_steps_stay_below_the_target_and_use_most_of_it(target):
    options = {"num_blocks": 4000, "max_batch_tokens": 2000, "max_batch_size": 64}
    took, _ = times(make_scheduler(target_itl=target, **options), num_decoding=8, prompt=1500)
    assert max(took) <= target
    assert sorted(took)[len(took) // 2] > 0.7 * target
    whole, _ = times(make_scheduler(**options), num_decoding=8, prompt=1500)
    assert max(whole) > 0.3


def test_a_target_that_cannot_be_met_does_not_keep_prompts_for_ever():
    scheduler = make_scheduler(target_itl=0.001, num_blocks=1000, max_batch_tokens=500)
    _, chunks = times(scheduler, num_decoding=3, prompt=50)
    assert min(chunks[1:-1]) >= 4


def test_prompts_alone_take_the_whole_budget():
    scheduler = make_scheduler(target_itl=0.001, num_blocks=1000, max_batch_tokens=500)
    scheduler.add(make_request(600, 1))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == 500
    scheduler.observe(output, 0.5)
    scheduler.update(output, StubModel(4).step(output))
    scheduler.abort(output.rows[0].request_id, FinishReason.CANCELLED)


def test_the_budget_stays_the_upper_limit():
    scheduler = make_scheduler(target_itl=1000.0, max_batch_tokens=16)
    model = StubModel(4)
    for _ in range(3):
        scheduler.add(make_request(40, 3))
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output.num_scheduled_tokens <= 16
        scheduler.observe(output, 0.001)
        scheduler.update(output, model.step(output))


def test_measurements_follow_the_machine():
    pacer = Pacer(0.1, 1)
    for _ in range(20):
        pacer.observe(8, 0, 0.05)
        pacer.observe(8, 10, 0.06)
    assert pacer.allowance() in range(36, 42)
    for _ in range(40):  # it has become twice as slow
        pacer.observe(8, 0, 0.07)
        pacer.observe(8, 10, 0.09)
    assert pacer.allowance() in range(9, 12)
