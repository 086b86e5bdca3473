"""What a call is given: positional or named ids, masks, nothing at all; and what comes back: shapes, dtypes, pads."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import models
import pytest
import seam
import torch
import transformers

import hf_cb

NEW = 10


ROWS = seam.prompts(5, 12, 1, 9)


def alone(duo: seam.Duo, row: torch.Tensor) -> list[int]:
    return duo.plain.generate(row[None], max_new_tokens=NEW)[0, len(row) :].tolist()


def test_the_ways_to_pass_ids(duo: seam.Duo) -> None:
    ids = ROWS[0][None]
    positional = duo.same(ids, max_new_tokens=NEW)
    for given in ({"inputs": ids}, {"input_ids": ids}, {"inputs": ids.int()}):
        assert torch.equal(duo.same(**given, max_new_tokens=NEW), positional)


def test_arguments_given_twice_or_too_many(duo: seam.Duo) -> None:
    for model in (duo.plain, duo.served):
        with pytest.raises(TypeError, match="inputs"):
            model.generate(seam.PROMPT, inputs=seam.PROMPT)
        with pytest.raises(TypeError, match="positional"):
            model.generate(*[None] * 30)


def test_no_inputs_start_from_bos(duo: seam.Duo) -> None:
    assert duo.same(max_new_tokens=NEW)[0, 0] == duo.plain.generation_config.bos_token_id


def test_without_inputs_or_bos_transformers_refuses() -> None:
    with seam.duo(bos_token_id=None) as duo:
        for model in (duo.plain, duo.served):
            with pytest.raises(ValueError, match=r"`bos_token_id` has to be defined"):
                model.generate(max_new_tokens=NEW)


def test_left_padded_batch(duo: seam.Duo) -> None:
    batch = seam.left_padded(ROWS)
    got = duo.same(**batch, max_new_tokens=NEW)
    assert [row[12:].tolist() for row in got] == [alone(duo, row) for row in ROWS]
    for other in ({"use_cache": False}, {"attention_mask": batch["attention_mask"].bool()}, {"return_dict_in_generate": True}):
        assert torch.equal(duo.same(**{**batch, **other}, max_new_tokens=NEW), got)


def test_masked_ids_do_not_matter(duo: seam.Duo) -> None:
    batch = seam.left_padded(ROWS)
    other = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 77)
    assert torch.equal(
        duo.same(other, attention_mask=batch["attention_mask"], max_new_tokens=NEW)[:, 12:],
        duo.same(**batch, max_new_tokens=NEW)[:, 12:],
    )


def test_batch_without_a_mask(duo: seam.Duo) -> None:
    same_length = torch.stack(seam.prompts(8, 8, 8))
    duo.same(same_length, max_new_tokens=NEW)
    # transformers infers a mask from pad ids, unless the pad id also ends sequences.
    padded = seam.left_padded(ROWS)["input_ids"]
    inferred = duo.same(padded, max_new_tokens=NEW)
    assert [row[12:].tolist() for row in inferred] == [alone(duo, row) for row in ROWS]
    taken_as_tokens = duo.same(padded, max_new_tokens=NEW, eos_token_id=seam.PAD)
    assert taken_as_tokens[0, 12:].tolist()[: len(alone(duo, ROWS[0]))] != alone(duo, ROWS[0])


@pytest.mark.parametrize(
    ("place", "value"),
    [((1, 6), 0), ((1, slice(-2, None)), 0), (2, 0), (1, 2)],
    ids=["a hole", "padded on the right", "an empty row", "another value"],
)
def test_other_masks_run_natively(duo: seam.Duo, place: Any, value: int) -> None:
    batch = seam.left_padded(ROWS)
    batch["attention_mask"][place] = value
    duo.same(**batch, max_new_tokens=NEW, native="attention mask")


def test_the_callers_tensors_stay_as_they_are(duo: seam.Duo) -> None:
    batch = seam.left_padded(ROWS)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    out = duo.served.generate(**batch, max_new_tokens=NEW)
    out.fill_(models.VOCAB)
    assert all(torch.equal(tensor, before[name]) for name, tensor in batch.items())


def test_generate_looks_like_the_original(duo: seam.Duo) -> None:
    assert inspect.signature(duo.served.generate) == inspect.signature(duo.plain.generate)
    assert duo.served.generate.__doc__ == duo.plain.generate.__doc__
    assert duo.served.generate.__name__ == "generate"


def test_more_rows_that_end_together_than_seats() -> None:
    scores = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": NEW}
    for seats, native in ((len(ROWS), None), (len(ROWS) - 1, "than run at a time")):
        with seam.duo(options={"max_batch_size": seats}, eos_token_id=[5, 60, 90], pad_token_id=0) as made:
            made.same(**seam.left_padded(ROWS), **scores, native=native)
            made.same(**seam.left_padded(ROWS[:-1]), **scores)


def test_token_types_that_are_all_zero() -> None:
    """ELECTRA adds its first type's embedding with and without them; GPT-2 adds the first token's, but for None."""
    ids, zeros = ROWS[0][None], torch.zeros_like(ROWS[0])[None]
    sizes = {"hidden_size": 48, "embedding_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ElectraConfig(vocab_size=models.VOCAB, is_decoder=True, pad_token_id=0, **sizes)
    plain = transformers.ElectraForCausalLM(config).eval()
    models._add_noise(plain)
    served = copy.deepcopy(plain)
    with hf_cb.continuous_batching(served) as engine:
        made = seam.Duo(plain, served, engine)
        usual = made.same(ids, max_new_tokens=NEW)
        assert torch.equal(made.same(ids, token_type_ids=zeros, max_new_tokens=NEW), usual)
        made.same(ids, token_type_ids=zeros + 1, max_new_tokens=NEW, native="token_type_ids")
    with seam.duo("gpt2") as made:
        usual = made.same(ids, max_new_tokens=NEW)
        assert not torch.equal(made.same(ids, token_type_ids=zeros, max_new_tokens=NEW, native="token_type_ids"), usual)
