"""Forks and beams, step by step: what is shared, what is copied, and what a preempted search becomes."""

from scheduling import make_scheduler
from stub_model import StubModel, StubSearch, output_alone, search_alone

from hf_cb.core.reach import ALL, Reach
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import Request


def serve(scheduler: Scheduler, model: StubModel, request: Request) -> list[int]:
    """Step until `request` has ended; its tokens."""
    tokens: list[int] = []
    while request.request_id in scheduler._sequences:
        output = scheduler.schedule()
        model.move(output)
        for emission in scheduler.update(output, model.step(output)):
            if emission.request_id == request.request_id:
                tokens += emission.best or emission.tokens
        scheduler.check()
    return tokens


def test_a_fork_computes_one_token_and_copies_one_block():
    scheduler, model = make_scheduler(block_size=4, prefix_cache=False), StubModel(4)
    first = Request(tuple(range(7)), 5)
    scheduler.add(first)
    scheduler.update(output := scheduler.schedule(), model.step(output))
    fork = Request(first.prompt, 5, fork_of=first.request_id)
    scheduler.add(fork)
    output = scheduler.schedule()
    assert [(row.request_id, row.start, len(row.token_ids)) for row in output.rows] == [
        (first.request_id, 7, 1),
        (fork.request_id, 6, 1),
    ]
    assert output.cached == ((fork.request_id, 6),)
    (block, copy), one, two = output.moves.copies[0], output.rows[0].memory.block_table, output.rows[1].memory.block_table
    assert (one[0], one[1], block, copy) == (two[0], block, one[1], two[1])
    model.move(output)
    scheduler.update(output, model.step(output))
    assert serve(scheduler, model, fork) == output_alone(fork)[1:]


def test_a_fork_waits_until_the_prompt_is_computed_and_needs_no_sibling():
    scheduler, model = make_scheduler(block_size=4, max_batch_tokens=4, prefix_cache=False), StubModel(4)
    first = Request(tuple(range(10)), 2)
    forks = [Request(first.prompt, 2, fork_of=first.request_id) for _ in range(2)]
    for request in (first, forks[0]):
        scheduler.add(request)
    for expected in (4, 4):
        output = scheduler.schedule()
        assert [(row.request_id, len(row.token_ids)) for row in output.rows] == [(first.request_id, expected)]
        scheduler.update(output, model.step(output))
    assert serve(scheduler, model, forks[0]) == output_alone(forks[0])
    scheduler.add(forks[1])  # its sibling has ended
    assert scheduler.schedule().cached == ((forks[1].request_id, 0),)


def test_a_fork_of_a_fork_in_one_step():
    """The second begins with a block that the same step makes for the first: it is made from the same one."""
    scheduler, model = make_scheduler(num_blocks=4, block_size=3, max_batch_tokens=5, prefix_cache=False), StubModel(3)
    first = Request((0,) * 6, 1)
    scheduler.add(first)
    scheduler.update(output := scheduler.schedule(), model.step(output))
    fork = Request(first.prompt, 1, fork_of=first.request_id)
    forks_fork = Request(first.prompt, 1, fork_of=fork.request_id)
    scheduler.add(fork)
    scheduler.add(forks_fork)
    output = scheduler.schedule()
    assert len(output.rows) == 3
    assert {block for block, _ in output.moves.copies} == {output.rows[0].memory.block_table[1]}
    model.move(output)
    for emission in scheduler.update(output, model.step(output)):
        assert emission.tokens == (output_alone(first)[0],)


def test_beams_hold_the_prompt_once_and_a_preempted_search_is_folded():
    scheduler, model = make_scheduler(num_blocks=40, block_size=4, prefix_cache=False), StubModel(4)
    request = Request(tuple(range(21)), 9, search=StubSearch(3, 9))
    model.add(request)
    scheduler.add(request)
    for _ in range(4):
        output = scheduler.schedule()
        model.move(output)
        scheduler.update(output, model.step(output))
    assert scheduler.num_running == 3
    assert 5 < scheduler.memory.blocks_used <= 5 + 3  # with the prompt's last token and what follows, one each at the most
    rows = [tuple(beam.tokens) for beam in scheduler._sequences[request.request_id].beams]
    scheduler.preempt_all()
    assert (scheduler.num_running, scheduler.memory.blocks_used, scheduler.num_waiting) == (0, 0, 1)
    trunk = scheduler._sequences[request.request_id]
    assert [(*trunk.tokens, *tail) for tail in trunk.tails] == rows
    assert len(trunk.tokens) >= 21
    output = scheduler.schedule()  # the trunk alone, and nothing is chosen from it
    assert [(len(row.token_ids), row.num_logits) for row in output.rows] == [(len(trunk.tokens), 0)]
    scheduler.update(output, model.step(output))
    assert tuple(serve(scheduler, model, request)) == search_alone(request, 3, 9)


def test_layers_that_look_back_only_so_far_give_blocks_back():
    reaches = (ALL, Reach(window=6), Reach(chunk=8))
    scheduler = make_scheduler(num_blocks=60, block_size=4, max_batch_tokens=8, reaches=reaches, prefix_cache=True)
    model = StubModel(4, reaches=reaches)
    request = Request(tuple(range(40)), 9)
    scheduler.add(request)
    used = []
    for _ in range(6):
        output = scheduler.schedule()
        scheduler.update(output, model.step(output))
        used.append(scheduler.memory.blocks_used)
    # After 8, 16, .. 40 tokens: all of them; what the next token can see by the window; what is left of its chunk.
    assert used == [2 + 2 + 0, 4 + 2 + 0, 6 + 2 + 0, 8 + 2 + 0, 10 + 2 + 0, 11 + 2 + 1]
    assert scheduler.memory.tokens_stored == 41 + (41 - 36) + (41 - 40)
    again = Request((*request.prompt, 7), 3)  # what was given back is still found, until somebody needs the room
    scheduler.add(again)
    output = scheduler.schedule()
    assert output.cached == ((again.request_id, 40),)
    scheduler.update(output, model.step(output))
    assert serve(scheduler, model, again) == output_alone(again, reaches=reaches)[1:]


def test_a_window_alone_bounds_what_a_sequence_holds():
    reaches = (Reach(window=8),)
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_batch_tokens=8, reaches=reaches)
    model = StubModel(4, reaches=reaches)
    request = Request(tuple(range(100)), 30)  # 130 tokens, and the pool holds 32
    scheduler.add(request)
    assert serve(scheduler, model, request) == output_alone(request, reaches=reaches)
