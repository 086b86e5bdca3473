"""The registry of attention backends and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from steps import make_spec

from hf_cb.attention import backend
from hf_cb.attention.grouped import GroupedTorch
from hf_cb.attention.native import NativeCPUBackend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.errors import InvalidArgumentError

META = torch.device("meta")


class PickyBackend(ReferenceBackend):
    name = "picky"

    def why_not(self, spec):
        return None if spec.window else "only layers with a window"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_REGISTRY", dict(backend._REGISTRY))
    return


def test_the_order_of_choice() -> None:
    names = ("native_cpu", "flash_attn_3", "flash_attn_4", "flash_attn_2", "torch_varlen", "torch_grouped")
    assert backend.attention_backend_names() == (*names, "reference")


@pytest.mark.parametrize("name", backend.attention_backend_names())
def test_every_registered_backend_loads_under_its_name(name: str) -> None:
    loaded = backend.load_attention_backend(name)
    assert isinstance(loaded, backend.AttentionBackend)
    assert loaded.name == name


def test_a_cpu_model_gets_the_cpu_backend() -> None:
    chosen, reason = backend.choose_attention_backend([make_spec(), make_spec(window=4)])
    assert isinstance(chosen, NativeCPUBackend)
    assert reason == "native_cpu serves every layer"


def test_a_dtype_that_the_kernel_does_not_take_gets_the_next() -> None:
    chosen, reason = backend.choose_attention_backend([make_spec(), make_spec(dtype=torch.float64)])
    assert isinstance(chosen, GroupedTorch)
    assert reason.startswith("native_cpu: takes float32, bfloat16 or float16, not float64; ")


def test_the_reason_tells_who_refused() -> None:
    # One layer that it cannot serve is enough.
    chosen, reason = backend.choose_attention_backend([make_spec(), make_spec(device=META)])
    assert isinstance(chosen, ReferenceBackend)
    refusal = "runs on a CPU, not on meta"
    assert reason.startswith(f"native_cpu: {refusal}; flash_attn_3: runs on cuda, not on cpu; ")
    assert reason.endswith("; torch_grouped: the meta device has no memory; reference serves every layer")


def test_a_named_backend_is_taken() -> None:
    chosen, reason = backend.choose_attention_backend([make_spec()], "reference")
    assert isinstance(chosen, ReferenceBackend)
    assert reason == "named in the configuration"


def test_a_named_backend_that_cannot_serve_is_an_error_with_its_reason() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^attention_backend: .*native_cpu: runs on a CPU, not on meta"):
        backend.choose_attention_backend([make_spec(device=META)], "native_cpu")


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^attention_backend: takes one of native_cpu, .*, reference; got 'flash'"):
        backend.choose_attention_backend([make_spec()], "flash")


@pytest.mark.usefixtures("registry")
def test_a_registered_backend_can_be_named() -> None:
    backend.register_attention_backend("picky", f"{__name__}:PickyBackend")
    assert isinstance(backend.choose_attention_backend([make_spec(window=2)], "picky")[0], PickyBackend)
    with pytest.raises(InvalidArgumentError, match="picky: only layers with a window"):
        backend.choose_attention_backend([make_spec()], "picky")


@pytest.mark.usefixtures("registry")
def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^name: .*'native_cpu' is registered already"):
        backend.register_attention_backend("native_cpu", "somewhere:Else")


@pytest.mark.usefixtures("registry")
def test_a_class_of_another_kind_is_refused() -> None:
    backend.register_attention_backend("odd", "builtins:object")
    with pytest.raises(
        InvalidArgumentError, match=r"^attention_backend: takes a subclass of AttentionBackend; odd is a object"
    ):
        backend.load_attention_backend("odd")


class _Coarse(ReferenceBackend):
    name = "coarse"
    block_multiple = block_size = 256


@pytest.mark.usefixtures("registry")
def test_blocks_that_a_backend_does_not_take() -> None:
    backend.register_attention_backend("coarse", f"{__name__}:_Coarse")
    assert backend.choose_attention_backend([make_spec()], "coarse", 512)[0].name == "coarse"
    with pytest.raises(InvalidArgumentError, match="coarse: takes blocks of a multiple of 256 tokens, and block_size is 16"):
        backend.choose_attention_backend([make_spec()], "coarse", 16)
