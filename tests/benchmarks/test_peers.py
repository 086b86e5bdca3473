"""Each peer on a tiny random model: exactly the forced lengths, in the clock's order, and the same tokens."""

from __future__ import annotations

import threading

import pytest
import small
import torch
from transformers import LlamaForCausalLM

from benchmarks import alone, peers
from benchmarks.workload import Item, Workload

pytestmark = pytest.mark.timeout(20)

SIZES = ((9, 5), (3, 1), (14, 7), (9, 5))  # prompt, output


@pytest.fixture(scope="module")
def bare_model() -> LlamaForCausalLM:
    return small.llama(max_position_embeddings=128, initializer_range=0.35)


@pytest.fixture(scope="module")
def workload() -> Workload:
    generator = torch.Generator().manual_seed(1)
    return Workload(
        tuple(
            Item(i, tuple(torch.randint(0, 40, (prompt,), generator=generator).tolist()), output, arrival=0.02 * i)
            for i, (prompt, output) in enumerate(SIZES)
        )
    )


@pytest.fixture(scope="module")
def expected(bare_model, workload) -> dict[int, tuple[int, ...]]:
    """Greedy by hand, with nothing of generate's."""
    result = {}
    for item in workload.items:
        ids = list(item.prompt)
        for _ in range(item.output_length):
            with torch.no_grad():
                ids.append(int(bare_model(torch.tensor([ids])).logits[0, -1].argmax()))
        result[item.index] = tuple(ids[len(item.prompt) :])
    return result


@pytest.fixture(scope="module")
def model(bare_model, workload, expected) -> LlamaForCausalLM:
    """A model that would stop at the first request's first token, if that were not ignored."""
    first = workload.items[0]
    bare_model.config.eos_token_id = bare_model.generation_config.eos_token_id = expected[0][0]
    assert len(peers.static(bare_model, Workload((first,)), lambda _: None, 1).rows[0].tokens) == 1
    peers.ignore_end_of_sequence(bare_model)
    return bare_model


ELSEWHERE = ("generate_batch_flash",)  # it takes a GPU


@pytest.mark.parametrize("concurrency", [2, 4])
@pytest.mark.parametrize("name", [name for name in peers.PEERS if name not in ELSEWHERE])
def test_a_peer_gives_the_forced_lengths_and_the_greedy_tokens(name, concurrency, model, workload, expected):
    attributes, config, progress = set(vars(model)), model.config.to_dict(), []
    lock = threading.Lock()

    def count(tokens: int) -> None:
        with lock:
            progress.append(tokens)

    outcome = peers.PEERS[name](model, workload, count, concurrency).check(workload)

    assert {row.item.index: row.tokens for row in outcome.rows} == expected
    assert sum(progress) == workload.output_tokens
    for row in outcome.rows:
        assert row.sent_at < row.token_times[0]
        assert list(row.token_times) == sorted(row.token_times)
    assert max(row.token_times[-1] for row in outcome.rows) - min(row.sent_at for row in outcome.rows) <= outcome.wall_seconds
    assert max(item.output_length for item in workload.items) <= outcome.steps
    assert 0 <= outcome.kv_waste < 1
    assert set(vars(model)) == attributes  # the next peer finds the model as this one did
    assert model.config.to_dict() == config


def test_a_static_batch_runs_to_its_longest_row(model):
    items = tuple(Item(i, (1, 2, 3), output) for i, output in enumerate((2, 6)))
    outcome = peers.static(model, Workload(items), lambda _: None, 2)
    assert outcome.steps == 6
    # Held: two rows of 3..8 tokens. Used: the first row's 3 and 4, the second's 3..8.
    assert outcome.kv_waste == pytest.approx(1 - (7 + 33) / 66)


def test_a_static_batch_holds_only_those_that_have_come(model):
    items = tuple(Item(i, (1, 2, 3), 4, arrival=0.3 * i) for i in range(2))
    assert peers.static(model, Workload(items), lambda _: None, 2).steps == 8


def test_times_go_to_the_requests_of_the_same_length_in_order_of_sending():
    rows = [
        peers.Row(Item(i, (1,), length), sent, (0,) * length, ())
        for i, (length, sent) in enumerate(((2, 5.0), (1, 1.0), (2, 0.0)))
    ]
    matched = {row.item.index: row.token_times for row in peers._matched(rows, {11: [0.5, 1.0], 12: [1.5], 13: [6.0, 7.0]})}
    assert matched == {0: (6.0, 7.0), 1: (1.5,), 2: (0.5, 1.0)}
    with pytest.raises(RuntimeError, match="no request on record"):
        list(peers._matched(rows, {11: [0.5, 1.0]}))


def test_an_error_in_a_client_is_raised(model, workload):
    def call(item: Item) -> peers.Timed:
        raise KeyError(item.index)

    with pytest.raises(KeyError):
        peers._serve(workload, 2, call)


def test_one_request_alone_gives_the_same_tokens(model):
    result = alone.measure(model, range(1, 30), repeats=1, scale=0.1)
    assert result["same_tokens"]
    assert (result["prompt_tokens"], result["new_tokens"]) == (13, 6)
    rates = result["tokens_per_second"]
    assert result["ratios"] == pytest.approx({"plain": rates["hf_cb"] / rates["plain"], "hf_cb": 1})
