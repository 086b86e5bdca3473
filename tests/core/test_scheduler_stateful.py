"""Whatever the sizes, the policy, the aborts and the failures: every request's output is what it is alone."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import make_scheduler, tokens_of
from stub_model import StubModel, StubSearch, output_alone, search_alone

from hf_cb.core.fair import Fair
from hf_cb.core.output import ScheduledRow, SchedulerOutput, StepResult
from hf_cb.core.policy import FCFS
from hf_cb.core.priority import Priority
from hf_cb.core.reach import ALL, Reach
from hf_cb.errors import RequestTooLongError
from hf_cb.request import FinishReason, Request, Service

REACHES = (
    (ALL,),
    (ALL, Reach(window=3)),
    (ALL, Reach(window=5), Reach(window=5)),
    (ALL, Reach(chunk=4)),
    (Reach(window=4),),
    (Reach(window=2), Reach(window=6, chunk=5)),
)


class _Ranked(FCFS):
    """Serves by an arbitrary but fixed rank, so that victims stand anywhere among the running."""

    @staticmethod
    def _rank(seq):
        return (seq.arrival * 7919) % 31, seq.arrival

    def next_waiting(self):
        return min(self._waiting.values(), key=self._rank, default=None)

    def victim(self, running):
        return max(running, key=self._rank)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 9),
        max_batch_size=st.integers(1, 5),
        policy=st.sampled_from([FCFS, _Ranked, Priority, Fair]),
        prefix_cache=st.booleans(),
        num_host_blocks=st.integers(0, 6),
        target_itl=st.sampled_from([None, 0.01]),
        reaches=st.sampled_from(REACHES),
        drafts=st.booleans(),
        spare_slots=st.sampled_from([None, None, 0, 1, 4]),
    )
    def make(
        self,
        num_blocks,
        block_size,
        max_batch_tokens,
        max_batch_size,
        policy,
        prefix_cache,
        num_host_blocks,
        target_itl,
        reaches,
        drafts,
        spare_slots,
    ):
        self.reaches, self.paced = reaches, target_itl is not None
        num_blocks *= len(reaches)
        self.fcfs = policy is FCFS and not self.paced
        self.max_batch_tokens, self.max_batch_size, self.block_size = max_batch_tokens, max_batch_size, block_size
        self.scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_size=max_batch_size,
            policy=policy(),
            prefix_cache=prefix_cache,
            num_host_blocks=num_host_blocks,
            target_itl=target_itl,
            reaches=reaches,
            draft=self._draft if drafts and spare_slots is None else None,
            num_state_slots=0 if spare_slots is None else 2 * max_batch_size + spare_slots,
        )
        self.num_slots = self.scheduler.memory.tables.num_slots
        if None not in (reach.span for reach in reaches):
            self.num_slots = min(self.num_slots, 40)
        else:
            assert self.num_slots >= num_blocks // len(reaches) * block_size
        self.model = StubModel(block_size, reaches=reaches)
        self.live: dict[int, tuple[Request, list[int]]] = {}
        self.flight: tuple[SchedulerOutput, StepResult] | None = None  # a step that is underway
        self.started: list[int] = []  # the requests in the order of their first tokens

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        max_new_tokens=st.integers(1, 10),
        eos=st.sampled_from([frozenset(), frozenset({0}), frozenset({1})]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from([None, "a", "b"]),
    )
    def add(self, prompt, max_new_tokens, eos, salt, priority, tenant):
        request = Request(tuple(prompt), max_new_tokens, eos, service=Service(priority, tenant, salt))
        try:
            self.scheduler.add(request)
        except RequestTooLongError:
            assert len(prompt) + max_new_tokens - 1 > self.num_slots
        else:
            assert len(prompt) + max_new_tokens - 1 <= max(self.num_slots, 40 if self.reaches[0].span else 0)
            self.model.add(request)
            self.live[request.request_id] = (request, [])

    @rule(data=st.data(), max_new_tokens=st.integers(1, 10))
    @precondition(lambda self: self.live)
    def add_a_fork(self, data, max_new_tokens):
        """Another request with the prompt of one that is here, which it may begin with; or that may be gone by then."""
        sibling = self.live[data.draw(st.sampled_from(sorted(self.live)))][0]
        request = Request(sibling.prompt, max_new_tokens, service=sibling.service, fork_of=sibling.request_id)
        if sibling.search is None and len(request.prompt) + max_new_tokens - 1 <= self.num_slots:
            self._add(request)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        width=st.integers(2, 4),
        max_new_tokens=st.integers(1, 8),
        num_steps=st.integers(1, 8),
    )
    def add_a_search(self, prompt, width, max_new_tokens, num_steps):
        search = StubSearch(width, min(num_steps, max_new_tokens))
        request = Request(tuple(prompt), max_new_tokens, search=search)
        kv, slots = self.scheduler.memory.tables, len(prompt) + max_new_tokens - 1
        if width <= self.max_batch_size and kv.num_needed(len(prompt), slots, width) <= kv.num_blocks:
            self._add(request)
        else:
            with pytest.raises(RequestTooLongError, match=r"^num_beams: "):
                self.scheduler.add(request)

    def _add(self, request):
        self.scheduler.add(request)
        self.model.add(request)
        self.live[request.request_id] = (request, [])

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def abort(self, data):
        self._abort(data.draw(st.sampled_from(sorted(self.live))))

    @rule()
    def step(self):
        output = self._schedule()
        self._update(output, self.model.step(output))

    @rule(steps=st.integers(1, 6), data=st.data())
    def steps_ahead(self, steps, data):
        """Each is scheduled while the one before it is underway."""
        for _ in range(steps):
            has_drafts = self.flight is not None and any(row.num_logits > 1 for row in self.flight[0].rows)
            output = self._schedule(ahead=not has_drafts)
            result = self.model.step(output, latest=None if self.flight is None else self.flight[1])
            self.scheduler.advance(output)
            self.scheduler.check()
            if self.live and data.draw(st.integers(0, 9)) == 0:
                self._abort(data.draw(st.sampled_from(sorted(self.live))))
            flight, self.flight = self.flight, (output, result)
            if flight is not None:
                self._settle(*flight)
            self.is_sound()

    def _draft(self, seq, room):
        """Guesses of which some are wrong, in more and fewer places."""
        request, done = seq.request, seq.num_tokens - len(seq.request.prompt)
        coming = output_alone(request, reaches=self.reaches)[done : done + min(room, seq.num_tokens % 4)]
        return tuple(token ^ (seq.num_tokens % 7 == i) for i, token in enumerate(coming))

    def _land(self):
        if self.flight is not None:
            flight, self.flight = self.flight, None
            self._settle(*flight)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def step_with_an_abort_in_it(self, data):
        output = self._schedule()
        if not self.live:
            return
        self._abort(data.draw(st.sampled_from(sorted(self.live))))
        self._update(output, self.model.step(output))

    @rule(written=st.booleans())
    def step_that_fails_and_is_repeated(self, written):
        output = self._schedule()
        if written:  # it may fail before or after it wrote its slots
            self.model.step(output, fails=True)
        again = self._schedule()
        if not self.paced:
            assert again.rows[: len(output.rows)] == output.rows
            assert again.rows == output.rows or output.preempted

    @rule(seconds=st.sampled_from([0.001, 0.1]), swap_seconds=st.sampled_from([0.0, 0.01, 10.0]))
    def step_that_is_measured(self, seconds, swap_seconds):
        output = self._schedule()
        if output.rows:
            self.scheduler.observe(output, seconds)
            self.scheduler.swap_cost.observe_swap(1, swap_seconds)
        self._update(output, self.model.step(output))

    @rule()
    def give_the_memory_back(self):
        self._land()
        self.scheduler.preempt_all()
        assert self.scheduler.memory.blocks_used == self.scheduler.num_running == 0

    @rule()
    def forget_prefixes(self):
        self.scheduler.forget_prefixes()

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def step_with_a_bad_row(self, data):
        output = self._schedule()
        if not output.rows:
            return
        bad = data.draw(st.sampled_from([row.request_id for row in output.rows]))
        result = self.model.step(output)
        result.tokens.pop(bad, None)
        result.choices.pop(bad, None)
        self._update(output, StepResult(result.tokens, {bad: ValueError("a bad row")}, choices=result.choices))
        assert bad not in self.live

    @invariant()
    def is_sound(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check()
        assert len(scheduler._running) + scheduler.num_waiting == len(self.live)
        assert scheduler.has_work == bool(self.live)
        for request_id, (request, output) in self.live.items():
            if request.search is None:
                assert tokens_of(scheduler, request_id) == (*request.prompt, *output)
                continue
            if self.flight is not None and request_id in self.flight[1].choices:
                continue  # its choice is made, and not taken in
            seq = scheduler._sequences[request_id]
            rows = [(*seq.tokens, *tail) for tail in seq.tails] or [tuple(beam.tokens) for beam in seq.members]
            assert rows == [(*request.prompt, *row) for row in request.search.rows]
        if not self.live:
            assert scheduler.memory.blocks_used == scheduler.memory.tokens_stored == 0

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        limit = 50 * (1 + len(self.live)) * self.num_slots
        while self.live:
            limit -= 1
            assert limit > 0, "no progress"
            self.step()
        self.is_sound()
        if self.fcfs:
            assert self.started == sorted(self.started)

    def _schedule(self, ahead: bool = False) -> SchedulerOutput:
        if not ahead:
            self._land()
        output = self.scheduler.schedule()
        self.model.move(output)
        assert not (output.moves.swap_in and output.moves.swap_out)
        if self.flight is None:
            assert bool(output.rows) == bool(self.live)
        assert output.num_scheduled_tokens == sum(len(row.token_ids) for row in output.rows) <= self.max_batch_tokens
        assert len(output.rows) <= self.scheduler.num_running <= self.max_batch_size
        assert not {row.request_id for row in output.rows} & set(output.preempted)
        held = Counter(block for row in output.rows for block in row.memory.block_table)
        for row in output.rows:  # what a row writes to is its own, and computed tokens are never written again
            written = row.memory.block_table[row.start // self.block_size * len(self.reaches) :]
            assert all(held[block] == 1 for block in written)
        for row in output.rows:
            self._check_row(row)
        return output

    def _check_row(self, row: ScheduledRow) -> None:
        seq = self.scheduler._sequences[row.request_id].members[row.beam]
        assert row.token_ids[: row.end - row.start] == tuple(seq.tokens[row.start : row.end]) != ()
        assert bool(row.num_logits) == (row.end == len(seq.tokens) and not seq.tails)
        assert len(row.memory.block_table) // len(self.reaches) * self.block_size >= row.start + len(row.token_ids)

    def _update(self, output: SchedulerOutput, result: StepResult) -> None:
        self.scheduler.advance(output)
        self._settle(output, result)

    def _settle(self, output: SchedulerOutput, result: StepResult) -> None:
        for request_id, new, reason, error, _, best in self.scheduler.settle(output, result):
            request, tokens = self.live[request_id]
            if best is not None:
                assert best == search_alone(request, request.width, request.search.num_steps, self.reaches)
                del self.live[request_id]
                continue
            if error is not None:
                assert (new, reason) == ((), FinishReason.FAILED)
                del self.live[request_id]
                continue
            if not tokens:
                self.started.append(request_id)
            tokens += new
            expected = output_alone(request, reaches=self.reaches)
            assert tokens == expected[: len(tokens)]
            assert (reason is not None) == (tokens == expected)
            if reason is not None:
                assert (reason is FinishReason.STOP) == (new[-1] in request.eos_token_ids)
                del self.live[request_id]

    def _abort(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id, FinishReason.CANCELLED)
        assert not self.scheduler.abort(request_id, FinishReason.CANCELLED)
        del self.live[request_id]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
