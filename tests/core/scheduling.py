"""Making and running schedulers in tests."""

from stub_model import StubModel

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import UNKNOWN
from hf_cb.core.pacing import Pacer
from hf_cb.core.reach import ALL
from hf_cb.core.scheduler import Scheduler
from hf_cb.core.slot_pool import SlotPool
from hf_cb.core.state_manager import StateManager
from hf_cb.request import FinishReason, Request


def make_scheduler(
    num_blocks=64,
    block_size=4,
    max_batch_tokens=32,
    max_batch_size=8,
    prefix_cache=False,
    num_host_blocks=0,
    reaches=(ALL,),
    target_itl=None,
    num_state_slots=0,
    **options,
) -> Scheduler:
    """A small one. Without a prefix cache unless asked for: the prompts of `make_request` all begin alike."""
    blocks = (block_size, prefix_cache, num_host_blocks, reaches, max_batch_tokens)
    memory = KVManager(BlockPool(num_blocks), *blocks)
    if num_state_slots:
        host = {"num_host_slots": num_host_blocks // 2}
        memory = StateManager(BlockPool(num_blocks), SlotPool(num_state_slots), *blocks, **host)
    pacer = None if target_itl is None else Pacer(target_itl, block_size)
    return Scheduler(memory, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size, pacer=pacer, **options)


def tokens_of(scheduler: Scheduler, request_id: int) -> tuple[int, ...]:
    """Prompt and output so far of a request that is here, without what the step underway samples."""
    return tuple(token for token in scheduler._sequences[request_id].tokens if token != UNKNOWN)


def make_request(num_prompt_tokens: int, max_new_tokens: int = 4, **options) -> Request:
    return Request(tuple(i % 2 for i in range(num_prompt_tokens)), max_new_tokens, **options)


def run(scheduler: Scheduler, model: StubModel, steps: int = 1000) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    """Step until nothing is left. Returns outputs and reasons by request id, in the order in which they ended."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    while scheduler.has_work:
        steps -= 1
        assert steps >= 0, "no end"
        output = scheduler.schedule()
        for emission in scheduler.update(output, model.step(output)):
            tokens.setdefault(emission.request_id, []).extend(emission.tokens)
            if emission.finish_reason is not None:
                ended[emission.request_id] = emission.finish_reason
        scheduler.check()
    return tokens, ended
