import random

import pytest
from scheduling import make_scheduler, run
from stub_model import StubModel, output_alone

from hf_cb.core.fair import OUTPUT_COST, PROMPT_COST, Fair
from hf_cb.core.policy import FCFS
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import Request, Service


def make(tenant: str | None, num_prompt_tokens: int, max_new_tokens: int) -> Request:
    return Request(tuple(i % 2 for i in range(num_prompt_tokens)), max_new_tokens, service=Service(tenant=tenant))


def service_curves(scheduler: Scheduler, requests: list[Request]) -> list[dict[str, int]]:
    """What each tenant was served by the end of each step, as long as all have requests waiting."""
    tenant_of = {request.request_id: request.service.tenant for request in requests}
    waiting = {request.request_id for request in requests}
    model, served, curves = StubModel(4), dict.fromkeys(tenant_of.values(), 0), []
    for request in requests:
        scheduler.add(request)
    while {tenant_of[request_id] for request_id in waiting} == set(served):
        output = scheduler.schedule()
        for request_id, num_cached in output.cached:
            waiting.discard(request_id)
            (prompt,) = [len(request.prompt) for request in requests if request.request_id == request_id]
            served[tenant_of[request_id]] += PROMPT_COST * (prompt - num_cached)
        for emission in scheduler.update(output, model.step(output)):
            served[tenant_of[emission.request_id]] += OUTPUT_COST
        curves.append(dict(served))
    run(scheduler, model)
    return curves


@pytest.mark.parametrize("seed", range(6))
def test_the_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(seed):
    rng = random.Random(seed)
    longest, batch = 24, 6
    scheduler = make_scheduler(num_blocks=200, max_batch_size=batch, policy=Fair())
    requests = [make("many short", rng.randint(1, 4), rng.randint(1, 6)) for _ in range(300)]
    requests += [make("long prompts", rng.randint(12, longest), rng.randint(1, 3)) for _ in range(100)]
    requests += [make("long outputs", rng.randint(1, 4), rng.randint(10, 30)) for _ in range(100)]
    rng.shuffle(requests)
    curves = service_curves(scheduler, requests)
    assert len(curves) > 100
    most_tokens = batch * (longest + 30)
    bound = 2 * max(PROMPT_COST * longest, OUTPUT_COST * most_tokens)
    gaps = [max(served.values()) - min(served.values()) for served in curves]
    assert max(gaps) <= bound < min(curves[-1].values())  # so it does not grow with what was served


def test_first_come_first_served_has_no_such_bound():
    requests = [make("flood", 4, 6) for _ in range(300)] + [make("light", 4, 6) for _ in range(30)]
    gap = {}
    for policy in (FCFS(), Fair()):
        served = service_curves(make_scheduler(num_blocks=200, max_batch_size=6, policy=policy), requests)[-1]
        gap[type(policy)] = served["flood"] - served["light"]
    assert gap[FCFS] > 10 * abs(gap[Fair])


def test_idle_time_cannot_be_saved_up():
    policy = Fair()
    scheduler, model = make_scheduler(max_batch_size=1, policy=policy), StubModel(4)
    for _ in range(20):
        scheduler.add(make("busy", 4, 4))
    for _ in range(40):
        output = scheduler.schedule()
        scheduler.update(output, model.step(output))
    late = [make("late", 4, 4) for _ in range(10)]
    for request in late:
        scheduler.add(request)
    _, ended = run(scheduler, model)
    order = [request_id in {request.request_id for request in late} for request_id in ended]
    assert order[:4].count(True) == 2  # they take turns from now on: nothing is made up for


def test_the_tenant_that_was_served_most_gives_way():
    scheduler, model = make_scheduler(num_blocks=5, policy=Fair()), StubModel(4)
    served_much, served_little = make("much", 7, 8), make("little", 4, 8)
    scheduler.add(served_much)
    scheduler.add(served_little)
    preempted = []
    while scheduler.has_work:
        output = scheduler.schedule()
        preempted += output.preempted
        scheduler.update(output, model.step(output))
        scheduler.check()
    assert preempted[0] == served_much.request_id


def test_everybody_is_right_and_tenants_that_left_are_forgotten():
    policy = Fair()
    scheduler, model = make_scheduler(num_blocks=20, policy=policy), StubModel(4)
    requests = [make(f"tenant {i}", 1 + i % 9, 1 + i % 5) for i in range(3000)]
    for request in requests:
        scheduler.add(request)
    tokens, _ = run(scheduler, model, steps=100_000)
    assert tokens == {request.request_id: output_alone(request) for request in requests}
    for i in range(1500):
        scheduler.add(make(f"later {i}", 1, 1))
        run(scheduler, model)
    assert len(policy._served) <= 1024 + 2
