import random

from scheduling import make_scheduler, run
from stub_model import StubModel, output_alone

from hf_cb.core.priority import Priority
from hf_cb.core.sequence import Sequence
from hf_cb.request import Request, Service


def sequence(arrival: int, priority: int, arrived_at: float) -> Sequence:
    return Sequence(Request((0,), 1, service=Service(priority=priority)), arrival, arrived_at)


def drain(policy: Priority) -> list[int]:
    order = []
    while (seq := policy.next_waiting()) is not None:
        policy.remove(seq)
        order.append(seq.arrival)
    return order


def test_lower_first_and_among_equals_who_came_first():
    policy = Priority()
    for i, priority in enumerate((1, 0, 1, -5, 0)):
        policy.enqueue(sequence(i, priority, 0.001 * i))
    assert len(policy) == 5
    assert drain(policy) == [3, 1, 4, 0, 2]
    assert len(policy) == 0


def test_waiting_counts_so_that_nobody_starves():
    policy = Priority(seconds_per_level=10)
    policy.enqueue(sequence(0, 2, arrived_at=100))
    for i in range(1, 40):
        policy.enqueue(sequence(i, 0, arrived_at=100 + i))
    assert drain(policy).index(0) == 19  # those that came within two levels' time are before it, and no others


def test_the_least_deserving_gives_way_and_finds_its_place_again():
    policy = Priority()
    running = [sequence(i, priority, 0) for i, priority in enumerate((0, 3, 1, 3))]
    order = []
    while running:
        victim = policy.victim(running)
        running.remove(victim)
        policy.put_back(victim)
        order.append(victim.arrival)
    assert order == [3, 1, 2, 0]
    assert drain(policy) == [0, 2, 1, 3]


def test_preempted_again_and_again_it_waits_once():
    policy, seq = Priority(), sequence(0, 0, 0)
    for _ in range(5):
        policy.put_back(seq)
        assert policy.next_waiting() is seq
        policy.remove(seq)
    assert policy.next_waiting() is None
    assert len(policy._heap) == 0


def test_the_urgent_end_first_though_they_come_last():
    rng = random.Random(1)
    scheduler, model = make_scheduler(num_blocks=12, max_batch_size=3, policy=Priority()), StubModel(4)
    requests = [Request(tuple(rng.choices((0, 1), k=6)), 6, service=Service(priority=9 - i)) for i in range(10)]
    for request in requests:
        scheduler.add(request)
    tokens, ended = run(scheduler, model)
    assert tokens == {request.request_id: output_alone(request) for request in requests}
    assert list(ended) == [request.request_id for request in reversed(requests)]
