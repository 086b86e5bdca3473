"""The pipeline benchmark in small: the real command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from benchmarks import pipeline

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(models.VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    tokenizer.chat_template = "w5 {{ messages[0]['content'] }} w7"
    models.tiny("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--prompts", "12", "--new-tokens", "6", "--repeats", "2", "--padded", "4", "--json", str(file)]
    pipeline.main(["--model", str(folder), *arguments])
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert list(figures["medians"]) == ["plain", "plain, batch_size=4", "hf_cb"]
    for name, values in figures["medians"].items():
        assert values["equal_texts"] == 12
        assert values["seconds"] > 0
        assert name in printed
    assert figures["medians"]["plain"]["ratio_to_plain"] == 1
    assert all(round_["hf_cb"]["native_calls"] == {} for round_ in figures["rounds"])
    assert len(set(figures["texts"]["hf_cb"])) > 6
    assert max(figures["prompt_tokens"]) > 2 * min(figures["prompt_tokens"])


def test_prompts_repeat(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    first, again, other = (pipeline.mixed_prompts(tokenizer, 20, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_medians_are_of_ratios_within_a_round() -> None:
    rounds = [{"plain": {"seconds": p}, "hf_cb": {"seconds": h}} for p, h in ((10, 1), (30, 10), (40, 5))]
    summary = pipeline.summarize({"rounds": rounds, "texts": {"plain": ["a", "b"], "hf_cb": ["a", "c"]}})
    assert summary["hf_cb"] == {"seconds": 5, "ratio_to_plain": 8, "equal_texts": 1}
    assert "1 of 2" in pipeline.table(summary, 2)
