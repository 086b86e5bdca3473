"""The emulation of CUDA graphs: what was baked in stays, what was not is read anew, and what a device refuses is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import graph_emulator
import pytest
import torch
from graph_emulator import CaptureError, Device


@pytest.fixture
def device() -> Iterator[Device]:
    with graph_emulator.emulated() as device, torch.inference_mode():
        yield device


def capture(compute: Callable[[], object], pool: object = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        compute()
    return graph


def test_a_capture_computes_nothing_and_a_replay_everything(device: Device) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    graph = capture(lambda: out.copy_((x.view(2, 2) * 2 + 1).reshape(-1)))
    assert out.tolist() == [0, 0, 0, 0]
    graph.replay()
    assert out.tolist() == [1, 3, 5, 7]
    x.fill_(10)
    graph.replay()
    assert out.tolist() == [21] * 4


def test_python_values_are_baked_in(device: Device) -> None:
    scale, x, out = [2], torch.ones(2), torch.zeros(2)
    graph = capture(lambda: out.copy_(x * scale[0]))
    scale[0] = 7
    graph.replay()
    assert out.tolist() == [2, 2]


def test_addresses_are_baked_in(device: Device) -> None:
    weight, out = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.zeros(2)
    graph = capture(lambda: out.copy_(weight * 3))
    weight.data.fill_(2)
    graph.replay()
    assert out.tolist() == [6, 6]
    weight.data = torch.full((2,), 5.0)
    graph.replay()
    assert out.tolist() == [6, 6], "the graph reads where the weight was"


def test_graphs_of_one_pool_spoil_each_others_results(device: Device) -> None:
    pool, x, kept = torch.cuda.graph_pool_handle(), torch.ones(2), []
    first = capture(lambda: kept.append(x * 2), pool)
    assert kept[0].isnan().all(), "nothing is computed yet"
    first.replay()
    assert kept[0].tolist() == [2, 2]
    capture(lambda: kept.append(x * 3), pool).replay()
    assert kept[0].isnan().all()
    assert kept[1].tolist() == [3, 3]


def test_a_kernel_is_launched_with_what_it_was_given(device: Device) -> None:
    def kernel(x: torch.Tensor, longest: int) -> torch.Tensor:
        assert x.tolist()[0] <= longest  # an emulated kernel may look at its numbers
        return x + longest

    x, out = torch.ones(2), torch.zeros(2)
    graph = capture(lambda: out.copy_(device.launch(kernel, x, longest=4)))
    graph.replay()
    assert out.tolist() == [5, 5]
    x.fill_(9)
    with pytest.raises(AssertionError):
        graph.replay()


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: 1.0 in x,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x.int()),
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
)
def test_what_the_host_waits_for_is_refused(device: Device, waits: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="not permitted"):
        capture(lambda: waits(x))
    waits(x)  # outside it is fine
    out = torch.zeros(2)
    capture(lambda: out.copy_(x + 1)).replay()  # and a capture that failed leaves nothing behind
    assert out.tolist() == [2, 2]


def test_memory_counts(device: Device) -> None:
    x, free = torch.ones(256), device.free
    graph = capture(lambda: x * 2)
    assert torch.cuda.mem_get_info(0)[0] == free - 1024
    del graph
    assert torch.cuda.mem_get_info(0)[0] == free
