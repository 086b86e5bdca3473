from hf_cb.core.policy import FCFS
from hf_cb.core.sequence import Sequence
from hf_cb.request import Request


def _sequences(n):
    return [Sequence(Request((0,), max_new_tokens=1), arrival) for arrival in range(n)]


def _drain(policy):
    order = []
    while (seq := policy.next_waiting()) is not None:
        policy.remove(seq)
        order.append(seq.arrival)
    return order


def test_first_come_first_served():
    policy = FCFS()
    for seq in _sequences(4):
        policy.enqueue(seq)
    assert policy.next_waiting() is policy.next_waiting()  # asking takes nothing
    assert len(policy) == 4
    assert _drain(policy) == [0, 1, 2, 3]
    assert len(policy) == 0


def test_the_latest_arrival_gives_way_and_is_first_in_the_queue_again():
    policy, running = FCFS(), _sequences(4)
    policy.enqueue(running.pop())
    for _ in range(2):
        victim = policy.victim(running)
        running.remove(victim)
        policy.put_back(victim)
    assert [seq.arrival for seq in running] == [0]
    assert _drain(policy) == [1, 2, 3]


def test_one_from_the_middle_can_leave():
    policy, sequences = FCFS(), _sequences(3)
    for seq in sequences:
        policy.enqueue(seq)
    policy.remove(sequences[1])
    assert _drain(policy) == [0, 2]
