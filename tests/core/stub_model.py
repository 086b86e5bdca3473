"""A model without arithmetic: it sees its tokens through the block table alone, so a wrong table changes what it says."""

import itertools

from hf_cb.core.output import UNKNOWN, ScheduledRow, SchedulerOutput, StepResult
from hf_cb.core.reach import ALL, Reach
from hf_cb.request import Choice, Request

_SEED = 11


def _absorb(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 61)


def _next_token(state: int, vocab_size: int) -> int:
    return (state >> 37) % vocab_size


class StubModel:
    """What a slot holds is a hash of its token and of all before it, read from the slot before: as in a real KV cache.

    Each group of layers has slots of its own. What comes next hangs on the last slot of the first group, and on all that the
    others can see.
    """

    def __init__(self, block_size: int, vocab_size: int = 2, reaches: tuple[Reach, ...] = (ALL,)) -> None:
        self.block_size, self.reaches = block_size, reaches
        self.vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._host: dict[int, list[int | None]] = {}
        self._sums: dict[int, int] = {}  # slot of a state -> the hash of all tokens that it sums up
        self._host_sums: dict[int, int] = {}
        self._searches: dict[int, Request] = {}
        self._states: dict[int, dict[int, int]] = {}  # search -> beam -> what follows its last token

    def add(self, request: Request) -> None:
        """Get to know a request before its first step."""
        if request.search is not None:
            self._searches[request.request_id] = request

    def move(self, output: SchedulerOutput) -> None:
        """Copy the blocks that the output names, before anything is written."""
        size = self.block_size
        moves = output.moves
        for slot, host in moves.states_out:
            self._host_sums[host] = self._sums[slot]
        for host, slot in moves.states_in:
            self._sums[slot] = self._host_sums.pop(host)
        for block, host in moves.swap_out:
            self._host[host] = [self._slots.get(block * size + i) for i in range(size)]
        for host, block in moves.swap_in:
            for i, value in enumerate(self._host.pop(host)):
                self._slots.pop(block * size + i, None)
                if value is not None:
                    self._slots[block * size + i] = value
        assert len({copy for _, copy in moves.copies}) == len(moves.copies)
        before = dict(self._slots)
        for block, copy in moves.copies:
            for i in range(size):
                self._slots.pop(copy * size + i, None)
                if block * size + i in before:
                    self._slots[copy * size + i] = before[block * size + i]

    def step(self, output: SchedulerOutput, fails: bool = False, latest: StepResult | None = None) -> StepResult:
        """Compute every row, write its slots, and sample where the row asks for it, unless it `fails` before that.

        `latest`: what the step before gave, where this one has UNKNOWN tokens.
        """
        tokens: dict[int, tuple[int, ...]] = {}
        for row in output.rows:
            self._sum_up(row, latest)
            for position, token in enumerate(row.token_ids, row.start):
                token = latest.tokens[row.request_id][-1] if token == UNKNOWN else token
                before = _SEED if position == 0 else self._slots[self._slot(row.memory.block_table, position - 1)]
                for group in range(len(self.reaches)):
                    self._slots[self._slot(row.memory.block_table, position, group)] = _absorb(before, token)
            if row.num_logits and not fails:
                last, end = self._seen(row, row.end), row.end
                search = self._searches.get(row.request_id)
                if search is None:
                    tokens[row.request_id] = self._sampled(row)
                elif end == len(search.prompt) + search.search.num_chosen:
                    self._states.setdefault(row.request_id, {})[row.beam] = last
        return StepResult(tokens, choices=self._choices({row.request_id for row in output.rows}))

    def _sum_up(self, row: ScheduledRow, latest: StepResult | None) -> None:
        """From state to state, as a recurrent layer: what is read is the sum of just the tokens before."""
        if not row.memory.states:
            return
        targets, slot = dict(row.memory.states), row.memory.state
        assert (slot is None) == (row.start == 0)
        assert slot not in targets.values()
        total = _SEED if slot is None else self._sums[slot]
        if row.start:
            assert total == self._slots[self._slot(row.memory.block_table, row.start - 1)]
        for position, token in enumerate(row.token_ids, row.start + 1):
            total = _absorb(total, latest.tokens[row.request_id][-1] if token == UNKNOWN else token)
            if position in targets:
                self._sums[targets.pop(position)] = total
        assert not targets

    def _seen(self, row: ScheduledRow, end: int) -> int:
        """What position `end - 1` sees."""
        return _mix(
            [
                [self._slots[self._slot(row.memory.block_table, p, g)] for p in range(reach.first(end - 1), end)]
                for g, reach in enumerate(self.reaches)
            ]
        )

    def _sampled(self, row: ScheduledRow) -> tuple[int, ...]:
        """What comes next, and after each draft that is right."""
        tokens = [_next_token(self._seen(row, row.end), self.vocab_size)]
        for i, draft in enumerate(row.drafts, 1):
            if draft != tokens[-1]:
                break
            tokens.append(_next_token(self._seen(row, row.end + i), self.vocab_size))
        return tuple(tokens)

    def _choices(self, request_ids: set[int]) -> dict[int, Choice]:
        choices = {}
        for request_id in request_ids & self._states.keys():
            search, states = self._searches[request_id].search, self._states[request_id]
            if len(states) == (search.width if search.num_chosen else 1):
                choices[request_id] = search.choose([states[beam] for beam in sorted(states)])
                del self._states[request_id]
        return choices

    def _slot(self, block_table: tuple[int, ...], position: int, group: int = 0) -> int:
        block = block_table[position // self.block_size * len(self.reaches) + group]
        return block * self.block_size + position % self.block_size


def _mix(seen: list[list[int]]) -> int:
    """From what each group of layers sees at the last position."""
    state = seen[0][-1]
    for value in (value for group in seen[1:] for value in group):
        state = _absorb(state, value)
    return state


class StubSearch:
    """Beams that part, die and are doubled, by the states of all of them."""

    def __init__(self, width: int, num_steps: int, vocab_size: int = 2) -> None:
        self.width, self.num_chosen, self.num_steps, self.vocab_size = width, 0, num_steps, vocab_size
        self.rows: list[tuple[int, ...]] = [()]

    def choose(self, states: list[int]) -> Choice:
        candidates = [(i, token) for i in range(len(states)) for token in range(self.vocab_size)]
        candidates.sort(key=lambda c: _absorb(states[c[0]], c[1] + 7) >> 20)
        kept = [candidates[i % len(candidates)] for i in range(self.width)]
        self.rows = [(*self.rows[i], token) for i, token in kept]
        self.num_chosen += 1
        ends = self.num_chosen == self.num_steps
        return Choice(tuple(i for i, _ in kept), tuple(token for _, token in kept), self.rows[0] if ends else None)


def search_alone(request: Request, width: int, num_steps: int, reaches: tuple[Reach, ...] = (ALL,)) -> tuple[int, ...]:
    """The best beam of a StubSearch without any scheduler."""
    search = StubSearch(width, num_steps)
    choice = search.choose([_state((*request.prompt,), reaches)])
    while choice.best is None:
        choice = search.choose([_state((*request.prompt, *row), reaches) for row in search.rows])
    return choice.best


def _state(tokens: tuple[int, ...], reaches: tuple[Reach, ...]) -> int:
    states = list(itertools.accumulate(tokens, _absorb, initial=_SEED))[1:]
    return _mix([states[reach.first(len(tokens) - 1) :] for reach in reaches])


def output_alone(request: Request, vocab_size: int = 2, reaches: tuple[Reach, ...] = (ALL,)) -> list[int]:
    """What the request's output is without any scheduler."""
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        output.append(_next_token(_state((*request.prompt, *output), reaches), vocab_size))
        if output[-1] in request.eos_token_ids:
            break
    return output
