"""A model without arithmetic: it sees its tokens through the block table alone, so a wrong table changes what it says."""

from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.request import Request

_SEED = 11


def _absorb(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 61)


def _next_token(state: int, vocab_size: int) -> int:
    return (state >> 37) % vocab_size


class StubModel:
    """What a slot holds is a hash of its token and of all before it, read from the slot before: as in a real KV cache."""

    def __init__(self, block_size: int, vocab_size: int = 2) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._host: dict[int, list[int | None]] = {}

    def swap(self, output: SchedulerOutput) -> None:
        """Copy the blocks that the output names, before anything is written."""
        size = self.block_size
        for block, host in output.swap_out:
            self._host[host] = [self._slots.get(block * size + i) for i in range(size)]
        for host, block in output.swap_in:
            for i, value in enumerate(self._host.pop(host)):
                self._slots.pop(block * size + i, None)
                if value is not None:
                    self._slots[block * size + i] = value

    def step(self, output: SchedulerOutput) -> StepResult:
        """Compute every row, write its slots, and sample where the row asks for it."""
        tokens = {}
        for row in output.rows:
            for position, token in enumerate(row.token_ids, row.start):
                before = _SEED if position == 0 else self._slots[self._slot(row.block_table, position - 1)]
                self._slots[self._slot(row.block_table, position)] = _absorb(before, token)
            if row.samples:
                last = self._slots[self._slot(row.block_table, row.start + len(row.token_ids) - 1)]
                tokens[row.request_id] = _next_token(last, self.vocab_size)
        return StepResult(tokens)

    def _slot(self, block_table: tuple[int, ...], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size


def output_alone(request: Request, vocab_size: int = 2) -> list[int]:
    """What the request's output is without any scheduler."""
    state = _SEED
    for token in request.prompt:
        state = _absorb(state, token)
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        output.append(_next_token(state, vocab_size))
        if output[-1] in request.eos_token_ids:
            break
        state = _absorb(state, output[-1])
    return output
