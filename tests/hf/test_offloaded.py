"""Models whose weights accelerate keeps on the disk or on the host, and loads for each call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crowd
import inside
import models
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_cb
from hf_cb.hf.twins.dispatched import offloaded_modules, offloaded_tensors
from hf_cb.hf.twins.fingerprint import Fingerprint
from hf_cb.hf.twins.twin import make_twin

pytestmark = pytest.mark.timeout(20)

NEW = 6
Make = Callable[[PreTrainedModel, Path], PreTrainedModel]


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in (3, 17, 9)]


def plain(model: PreTrainedModel) -> list[list[int]]:
    return [type(model).generate(model, p, max_new_tokens=NEW)[0].tolist() for p in prompts()]


def with_map(**where: str) -> Make:
    """Loaded by transformers with a device for each part: layers 0 to 2, and the rest."""

    def make(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
        model.save_pretrained(folder / "model")
        rest, head = where.get("rest", "cpu"), where.get("head", "cpu")
        device_map = {"model.embed_tokens": rest, "model.norm": rest, "model.rotary_emb": rest, "lm_head": head}
        device_map |= {f"model.layers.{i}": where[f"layer{i}"] for i in range(3)}
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            folder / "model", device_map=device_map, offload_folder=folder / "offload", dtype=torch.float32
        )

    return make


HOW: dict[str, Make] = {
    "two layers on the disk": with_map(layer0="cpu", layer1="disk", layer2="disk"),
    "the head too": with_map(layer0="disk", layer1="disk", layer2="disk", head="disk"),
    "all on the disk": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "all on the host": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
}


@pytest.fixture(params=HOW)
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    model = HOW[request.param](models.tiny("llama"), tmp_path)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def on_the_host() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and the same with its weights offloaded to the host."""
    return models.tiny("llama"), cpu_offload(models.tiny("llama"), execution_device=torch.device("cpu"))


def ask(model: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> list[int]:
    tokens: list[int] = model.generate(prompt, max_new_tokens=NEW, **options)[0].tolist()
    return tokens


def test_same_tokens(offloaded: PreTrainedModel) -> None:
    """Alone and in company, in one piece and in chunks; nothing is packed, for there is nothing to pack."""
    want = plain(models.tiny("llama"))
    assert plain(offloaded) == want
    with hf_cb.continuous_batching(offloaded, max_batch_tokens=8, fallback="error") as engine:
        assert engine.unsupported_reason is None
        assert [ask(offloaded, prompt) for prompt in prompts()] == want
        assert crowd.answers(engine, [lambda p=p: ask(offloaded, p) for p in prompts()]) == want
        assert engine.stats().native_calls == {}
        assert engine.stats().packed_bytes == 0
    assert plain(offloaded) == want


def test_plain_calls_in_between(offloaded: PreTrainedModel) -> None:
    """The user's own calls load and drop the user's weights: no reason for another twin."""
    want = plain(models.tiny("llama"))
    with hf_cb.continuous_batching(offloaded) as engine:
        worker = inside.worker(engine)
        assert worker is not None
        core = worker.core
        for prompt, tokens in zip(prompts(), want, strict=True):
            assert ask(offloaded, prompt) == tokens
            assert type(offloaded).generate(offloaded, prompt, max_new_tokens=NEW)[0].tolist() == tokens
        assert worker.core is core
        with ThreadPoolExecutor(4) as threads:  # both at the same time
            engines = [threads.submit(ask, offloaded, prompt) for prompt in prompts()]
            ours = threads.submit(plain, offloaded)  # one of them: two would take each other's weights away
            assert [future.result() for future in engines] == want
            assert ours.result() == want
        assert worker.core is core


def test_the_twin_takes_no_memory(on_the_host: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model = on_the_host[1]
    held = offloaded_tensors(model)
    assert sum(tensor.nbytes for tensor in held) == sum(tensor.nbytes for tensor in on_the_host[0].parameters())
    twin = make_twin(model)
    assert {id(tensor) for tensor in offloaded_tensors(twin)} == {id(tensor) for tensor in held}
    assert len(offloaded_modules(twin.modules())) == len(offloaded_modules(model.modules())) > 20


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_tied_weights(offload: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """One tensor for embedding and head: accelerate notes where it is loaded, the twin keeps notes of its own."""
    want = plain(models.tiny("gpt2"))
    where = {} if offload is cpu_offload else {"offload_dir": tmp_path}
    model = offload(models.tiny("gpt2"), execution_device=torch.device("cpu"), **where)
    assert plain(model) == want
    with hf_cb.continuous_batching(model, fallback="error") as engine:
        assert crowd.answers(engine, [lambda p=p: ask(model, p) for p in prompts()]) == want
    assert plain(model) == want


def test_a_weight_on_the_host_that_is_written_to(on_the_host: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Counts from the next step on, and what was computed before is not taken for a prefix."""
    whole, model = on_the_host
    prompt = prompts()[1]
    with hf_cb.continuous_batching(model, block_size=4, fallback="error") as engine:
        before = ask(model, prompt)
        assert ask(model, prompt) == before
        assert engine.stats().cached_tokens == 16
        with torch.no_grad():
            for mine, theirs in zip(whole.parameters(), offloaded_tensors(model)[: len(list(whole.parameters()))], strict=True):
                assert mine.shape == theirs.shape
                mine.mul_(1.5) if mine.dim() > 1 else None
                theirs.mul_(1.5) if theirs.dim() > 1 else None
        want = whole.generate(prompt, max_new_tokens=NEW)[0].tolist()
        assert ask(model, prompt) == want != before
        assert engine.stats().cached_tokens == 16


def test_the_fingerprint(on_the_host: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    whole, model = on_the_host
    mark, own = Fingerprint.of(model), Fingerprint.of(whole)
    plain(model)
    assert mark.matches(Fingerprint.of(model))
    model.model.layers[1].mlp = models.tiny("llama").model.layers[1].mlp
    assert not mark.matches(Fingerprint.of(model))
    cpu_offload(whole, execution_device=torch.device("cpu"))
    assert not own.matches(Fingerprint.of(whole))
