"""The cache of a result: plain generate's when it is read, and a call can go on from it, read or not."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crowd
import models
import pytest
import seam
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import hf_cb
from hf_cb.hf.calls.result_cache import contents_of

NEW = 6
DICT = {"return_dict_in_generate": True, "pad_token_id": 0}
BATCH = seam.left_padded(seam.prompts(6, 9, 3))
PROMPT = {"input_ids": seam.prompts(6)[0][None]}


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made


def same_cache(got: Any, want: Any) -> None:
    assert type(got) is type(want) or contents_of(got) is not None
    assert got.get_seq_length() == want.get_seq_length()
    assert len(got) == len(want)
    assert type(got) is type(want)
    assert vars(got).keys() == vars(want).keys()
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        assert type(ours) is type(theirs)
        assert vars(ours).keys() == vars(theirs).keys()
        for name in ("keys", "values"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a.shape, a.dtype, a.is_inference()) == (b.shape, b.dtype, b.is_inference())
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def same_result(duo: seam.Duo, **call: Any) -> tuple[Any, Any]:
    """Of plain generate and of the engine, after comparing them, caches unread."""
    want = duo.plain.generate(**call)
    with duo.native_calls() as reasons:
        got = duo.served.generate(**call)
    assert not reasons
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert torch.equal(got.sequences, want.sequences)
    return got, want


CALLS: dict[str, dict[str, Any]] = {
    "one row": PROMPT,
    "rows that end apart": {**BATCH, "eos_token_id": list(range(20, 45))},
    "a static one": {**BATCH, "cache_implementation": "static"},
    "samples of a prompt": {**PROMPT, "num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "beams": {**PROMPT, "num_beams": 3, "eos_token_id": list(range(20, 30))},
    "beams of several prompts": {**BATCH, "num_beams": 3, "eos_token_id": list(range(20, 45)), "num_return_sequences": 2},
    "beams that stop early": {**BATCH, "num_beams": 2, "eos_token_id": list(range(20, 60)), "early_stopping": True},
    "positions": {**BATCH, "position_ids": (BATCH["attention_mask"].cumsum(-1) - 1).abs()},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_read(duo: seam.Duo, call: dict[str, Any]) -> None:
    got, want = same_result(duo, **call, **DICT, max_new_tokens=2 * NEW)
    assert contents_of(got.cache) is not None
    same_cache(got.cache, want.cache)


@pytest.mark.parametrize("name", ["gemma3_text", "llama4_text", "gpt2"])
def test_other_layers(name: str) -> None:
    with seam.duo(name) as duo:
        for options in ({}, {"cache_implementation": "static"}):
            got, want = same_result(duo, **BATCH, **DICT, **options, max_new_tokens=2 * NEW)
            same_cache(got.cache, want.cache)
        turns(duo, BATCH, last_alone=True)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_keys_under_the_mask(name: str) -> None:
    """Eager attention makes a padding token the mean of all tokens of its forward."""
    with seam.duo(name) as duo:
        for model in (duo.plain, duo.served):
            model.set_attn_implementation("eager")
        got, want = same_result(duo, **BATCH, **DICT, max_new_tokens=NEW)
        same_cache(got.cache, want.cache)
        turns(duo, BATCH, last_alone=True)


def test_none_without_a_cache(duo: seam.Duo) -> None:
    got, want = same_result(duo, **PROMPT, **DICT, use_cache=False, max_new_tokens=NEW)
    assert got.cache is want.cache is None


def test_what_is_done_to_it(duo: seam.Duo) -> None:
    got, want = same_result(duo, **BATCH, **DICT, max_new_tokens=NEW)
    unread = copy.deepcopy(got.cache)
    assert contents_of(unread) is not None
    assert contents_of(got.cache) is not None
    same_cache(pickle.loads(pickle.dumps(copy.deepcopy(unread))), want.cache)
    for cache in (got.cache, want.cache):
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 1, 3, 3, 2]))
    same_cache(got.cache, want.cache)
    assert contents_of(unread) is not None


def test_inference_mode(duo: seam.Duo) -> None:
    with torch.inference_mode():
        got, want = same_result(duo, **PROMPT, **DICT, max_new_tokens=NEW)
    same_cache(got.cache, want.cache)


def test_modes_of_the_reader(duo: seam.Duo) -> None:
    """They are not the call's: one would have made fakes of the keys and values."""
    got, want = same_result(duo, **PROMPT, **DICT, max_new_tokens=NEW)
    with FakeTensorMode():
        assert len(got.cache.layers) == len(want.cache.layers)
    same_cache(got.cache, want.cache)


def test_several_readers(duo: seam.Duo) -> None:
    got, want = same_result(duo, **BATCH, **DICT, max_new_tokens=NEW)
    with ThreadPoolExecutor(6) as pool:
        read = list(pool.map(lambda _: got.cache.layers[1].keys, range(6)))
    torch.testing.assert_close(read[0], want.cache.layers[1].keys, atol=1e-4, rtol=1e-4)
    assert all(keys is got.cache.layers[1].keys for keys in read)


def test_what_cannot_be_read() -> None:
    with seam.duo() as duo:
        caches = [duo.served.generate(**PROMPT, **DICT, max_new_tokens=NEW).cache for _ in range(2)]
        duo.served.train()
        with pytest.raises(hf_cb.CacheLostError, match="training mode"):
            len(caches[0])
        duo.served.eval()
        assert len(caches[0]) == 3  # a read that failed is made up for
        with torch.no_grad():
            duo.served.lm_head.weight.mul_(0.5)
        with pytest.raises(hf_cb.CacheLostError, match="has changed since"):
            caches[1].crop(-1)
        later = duo.served.generate(**PROMPT, **DICT, max_new_tokens=NEW).cache
        with pytest.raises(hf_cb.CacheLostError, match="has changed since"):
            duo.served.generate(**PROMPT, cache=caches[1], max_new_tokens=NEW)
    assert len(later) == 3  # uninstalled


def test_the_model_is_gone() -> None:
    served = models.tiny("llama")
    with hf_cb.continuous_batching(served):
        cache = served.generate(**PROMPT, **DICT, max_new_tokens=NEW).cache
    del served
    gc.collect()
    with pytest.raises(hf_cb.CacheLostError, match="no longer exists"):
        len(cache)


TURN = torch.tensor([[9, 30, 31], [40, 41, 42], [8, 7, 6]])


class Low(LogitsProcessor):
    """Looks at all of its history."""

    supports_continuous_batching = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, scores.gather(1, input_ids) - 3.0)


def turns(duo: seam.Duo, first: dict[str, torch.Tensor], last_alone: bool, cache: bool = False, **options: Any) -> None:
    """Three calls, each from the cache of the one before: of both, to the token, without a native call."""
    rows = len(first["input_ids"])
    seeds: dict[str, Any] = {"seed": 5} if options.get("do_sample") else {}
    outs = []
    for model in (duo.plain, duo.served):
        ids, mask = first["input_ids"], first.get("attention_mask", torch.ones_like(first["input_ids"]))
        kept: Any = {"cache": DynamicCache(config=model.config)} if cache else {}
        whole, given, found = ids, ids, []
        for turn in range(3):
            call = {"input_ids": given, "attention_mask": mask, **kept, **DICT, "max_new_tokens": NEW + turn, **options}
            if model is duo.plain:
                torch.manual_seed(5)
                out = model.generate(**call)
            else:
                with duo.native_calls() as reasons:
                    out = model.generate(**call, **seeds)
                assert not reasons
                assert contents_of(out.cache) is not None
            if kept:
                assert out.cache is kept["cache"]
            found.append(out.sequences)
            new = out.sequences[:, given.shape[1] :]
            whole = torch.cat([whole, new, TURN[:rows]], dim=1)
            mask = torch.cat([mask, mask.new_ones(rows, new.shape[1] + 3)], dim=1)
            given, kept = whole[:, -4:] if last_alone else whole, {"cache": out.cache}
        outs.append((found, out.cache))
    for got, want in zip(outs[1][0], outs[0][0], strict=True):
        assert torch.equal(got, want)
    same_cache(outs[1][1], outs[0][1])


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": list(range(20, 45))},
    "penalty": {"repetition_penalty": 1.5},
    "least length": {"min_new_tokens": 3, "eos_token_id": list(range(20, 45))},
    "least length and ids": {"min_length": 8, "eos_token_id": list(range(20, 45))},
    "no repeats": {"no_repeat_ngram_size": 1},
    "own": {"logits_processor": LogitsProcessorList([Low()])},
    "from an empty cache": {"cache": True},
    "scores": {"output_scores": True, "eos_token_id": list(range(20, 45))},
}


@pytest.mark.parametrize("last_alone", [False, True], ids=["all ids", "last ids"])
@pytest.mark.parametrize("options", CHATS.values(), ids=CHATS)
def test_turns(duo: seam.Duo, options: dict[str, Any], last_alone: bool) -> None:
    turns(duo, BATCH, last_alone, **options)


@pytest.mark.parametrize("last_alone", [False, True], ids=["all ids", "last ids"])
def test_turns_that_are_drawn(duo: seam.Duo, last_alone: bool) -> None:
    turns(duo, PROMPT, last_alone, do_sample=True, temperature=1.3)


def test_the_samples_of_a_prompt_go_on_apart(duo: seam.Duo) -> None:
    """Two rows that have the same ids now, and had others before."""
    call = {**seam.left_padded(seam.prompts(7, 7)), **DICT, "max_new_tokens": NEW}
    (got, want), last = same_result(duo, **call), torch.tensor([[11]])
    mask = torch.ones(1, want.sequences.shape[1], dtype=torch.long)
    more = {"input_ids": last, "attention_mask": mask, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    with duo.native_calls() as reasons:
        a, b = (m.generate(**more, cache=out.cache, max_new_tokens=NEW) for m, out in ((duo.plain, want), (duo.served, got)))
    assert torch.equal(a, b)
    assert not reasons


def test_chats_at_once(duo: seam.Duo) -> None:
    def chat(model: Any, prompt: torch.Tensor) -> torch.Tensor:
        out = model.generate(prompt[None], **DICT, max_new_tokens=NEW)
        for _ in range(2):
            mask = torch.ones(1, out.cache.get_seq_length() + 1, dtype=torch.long)
            out = model.generate(out.sequences[:, -1:], attention_mask=mask, cache=out.cache, **DICT, max_new_tokens=NEW)
        return out.sequences

    prompts = seam.prompts(5, 17, 30, 8, 3, 22)
    with duo.native_calls() as reasons:
        got = crowd.answers(duo.engine, [lambda p=p: chat(duo.served, p) for p in prompts])
    assert not reasons
    for row, prompt in zip(got, prompts, strict=True):
        assert torch.equal(row, chat(duo.plain, prompt))


ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "other ids": ("other tokens", {"input_ids": torch.full((3, 20), 7), "attention_mask": torch.ones(3, 20, dtype=torch.long)}),
    "go on from": ("go on from", {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 15, dtype=torch.long)}),
    "another mask": ("another mask", {"input_ids": TURN[:, :1], "attention_mask": torch.ones(3, 15, dtype=torch.long)}),
}


@pytest.mark.parametrize(("reason", "call"), ODD.values(), ids=ODD)
def test_odd_calls_run_natively(duo: seam.Duo, reason: str, call: dict[str, Any]) -> None:
    got, want = same_result(duo, **BATCH, **DICT, max_new_tokens=NEW)
    answers = []
    for model, out in ((duo.plain, want), (duo.served, got)):
        with duo.native_calls() as reasons:
            try:
                answers.append(model.generate(**call, cache=out.cache, max_new_tokens=NEW).tolist())
            except (RuntimeError, ValueError, IndexError) as error:
                answers.append(type(error))
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert answers[0] == answers[1]


def test_one_that_was_read(duo: seam.Duo) -> None:
    got, want = same_result(duo, **PROMPT, **DICT, max_new_tokens=NEW)
    got.cache.crop(-3)
    want.cache.crop(-3)
    ids = want.sequences[:, :-2]
    with duo.native_calls() as reasons:
        a, b = (m.generate(ids, cache=out.cache, max_new_tokens=NEW) for m, out in ((duo.plain, want), (duo.served, got)))
    assert torch.equal(a, b)
    assert reasons == ["a cache that was looked into, or is none of a result's"]


def test_nothing_is_made_before_it_is_read(duo: seam.Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    cache = duo.served.generate(**PROMPT, **DICT, max_new_tokens=NEW).cache
    monkeypatch.setattr(type(duo.served), "_prefill", never)
    assert copy.deepcopy(cache).get_seq_length() == 6 + NEW - 1
    with pytest.raises(AssertionError):
        len(cache)
