"""The kernels for what layers are made of besides attention: against plain torch, and what they promise about bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hf_cb.kernels.extension import load

OPS = torch.ops.hf_cb
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SILU, GELU, GELU_TANH = 1, 2, 3
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    SILU: F.silu,
    GELU: F.gelu,
    GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
DEPTHS = (1, 2, 3, 64, 65)  # with pairs: half of one, one, one and a half; a few rounds of the loop, with and without a rest
DEEP = (2048, 2050, 4097, 6147)  # steps of one number or of two: one block and several, a rest of every kind

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    load()


def panel() -> int:
    """Columns of a panel."""
    return int(OPS.pack(torch.zeros(1, 1)).shape[2])


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Layer:
    """A linear layer, plain and packed."""

    weight: Tensor
    bias: Tensor | None
    packed: Tensor
    packed_bias: Tensor | None

    def product(self, x: Tensor, matrix: bool = False) -> Tensor:
        return OPS.linear(x, self.packed, self.packed_bias, len(self.weight), matrix)  # type: ignore[no-any-return]

    def gated(self, x: Tensor, activation: int = SILU, swapped: bool = False, matrix: bool = False) -> Tensor:
        half = len(self.weight) // 2
        return OPS.gated(x, self.packed, self.packed_bias, half, matrix, activation, swapped)  # type: ignore[no-any-return]

    def exact(self, x: Tensor) -> Tensor:
        """In float64."""
        product = x.double() @ self.weight.double().t()
        return product if self.bias is None else product + self.bias.double()

    def slack(self, x: Tensor) -> Tensor:
        """By how much float32 sums may be wrong, and results in a dtype: half a unit in its last place."""
        sums = x.double().abs() @ self.weight.double().abs().t()
        return 1e-6 * sums + 0.51 * torch.finfo(x.dtype).eps * self.exact(x).abs() + 1e-7

    def check(self, x: Tensor, out: Tensor) -> None:
        assert (out.dtype, out.shape) == (x.dtype, (*x.shape[:-1], len(self.weight)))
        assert bool(((out.double() - self.exact(x)).abs() <= self.slack(x)).all())  # NaN is less than nothing

    def check_gated(self, x: Tensor, out: Tensor, activation: int, swapped: bool) -> None:
        gate, up = self.exact(x).to(x.dtype).chunk(2, -1)
        if swapped:
            gate, up = up, gate
        expected = ACTIVATIONS[activation](gate.double()).to(x.dtype) * up
        tolerance = 8 * torch.finfo(x.dtype).eps if x.dtype != torch.float32 else 2e-5
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def make_layer(width: int, depth: int, dtype: torch.dtype, bias: bool = False, seed: int = 1) -> Layer:
    weight = (noise(width, depth, dtype=torch.float32, seed=seed) / max(depth, 1) ** 0.5).to(dtype)
    packed = OPS.pack(weight)
    if not bias:
        return Layer(weight, None, packed, None)
    own = noise(width, dtype=dtype, seed=seed + 1)
    return Layer(weight, own, packed, F.pad(own.float(), (0, packed.shape[0] * packed.shape[2] - width)))


# -- products ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_products(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    layer = make_layer(
        data.draw(st.integers(1, 200)),
        data.draw(st.integers(1, 200)),
        dtype,
        data.draw(st.booleans()),
        data.draw(st.integers(1, 99)),
    )
    x = noise(data.draw(st.integers(1, 20) | st.integers(1, 250)), layer.weight.shape[1], dtype=dtype)
    layer.check(x, layer.product(x))


@each_dtype
def test_every_tile_of_rows_and_columns(dtype: torch.dtype) -> None:
    for width in (1, panel() - 1, panel(), panel() + 1, 2 * panel(), 3 * panel() - 5):
        for depth in DEPTHS:
            layer = make_layer(width, depth, dtype, bias=width % 2 == 1)
            for rows in (*range(1, 14), 96, 97):  # up to two tiles and one row; a block of rows, and two
                x = noise(rows, depth, dtype=dtype, seed=rows)
                layer.check(x, layer.product(x))


@each_dtype
@pytest.mark.parametrize("depth", DEEP)
def test_depths_of_several_blocks(depth: int, dtype: torch.dtype) -> None:
    layer, both = make_layer(2 * panel() + 3, depth, dtype, bias=True), make_layer(2 * panel(), depth, dtype, bias=True)
    for rows in (1, 5, 9, 110):
        x = noise(rows, depth, dtype=dtype)
        layer.check(x, layer.product(x))
        both.check_gated(x, both.gated(x), SILU, False)


@each_dtype
@pytest.mark.parametrize("swapped", [False, True], ids=["gate first", "gate second"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products(activation: int, swapped: bool, dtype: torch.dtype) -> None:
    for panels in (1, 3):
        for bias in (False, True):
            layer = make_layer(2 * panels * panel(), 70, dtype, bias)
            for rows in (*range(1, 14), 97):
                x = 3 * noise(rows, 70, dtype=dtype, seed=rows)
                layer.check_gated(x, layer.gated(x, activation, swapped), activation, swapped)


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_from_zero(activation: int, dtype: torch.dtype) -> None:
    """What plain torch gives for numbers as large as there are."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 20, -20, 90, -90, 6e4, -6e4, largest, -largest, torch.nan]).to(dtype)[:, None]
    layer = make_layer(2 * panel(), 1, dtype)
    layer.weight.fill_(1)
    layer = Layer(layer.weight, None, OPS.pack(layer.weight), None)
    # The other half is the gate's argument itself: large ones overflow alike.
    expected = ACTIVATIONS[activation](x) * x
    torch.testing.assert_close(
        layer.gated(x, activation)[:, :1], expected, equal_nan=True, rtol=8 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("depth", [64, 65, 2049, 4100])
def test_products_through_the_matrix_unit_s_door(depth: int) -> None:
    """Whole tiles of rows by the library's kernels, the others by ours."""
    dtype = torch.bfloat16
    layer = make_layer(3 * panel() - 5, depth, dtype, bias=True)
    both = make_layer(4 * panel(), depth, dtype, bias=True)
    for rows in (1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 70, 100, 200) if depth < 100 else (17, 48, 110):
        x = noise(rows, depth, dtype=dtype, seed=rows)
        layer.check(x, layer.product(x, matrix=True))
        both.check_gated(x, both.gated(x, matrix=True), SILU, False)
        both.check_gated(x, both.gated(x, GELU, swapped=True, matrix=True), GELU, True)


@each_dtype
def test_rows_wherever_they_lie(dtype: torch.dtype) -> None:
    layer = make_layer(50, 24, dtype)
    plain = noise(2, 3, 24, dtype=dtype)
    expected = layer.product(plain)
    odd = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view(2, 3, 24)  # pairs not where pairs lie otherwise
    strided = torch.cat([plain, plain], -1)[..., :24]
    turned = plain.transpose(0, 2).contiguous().transpose(0, 2)
    for x in (odd, strided, turned):
        assert torch.equal(layer.product(x), expected)
    layer.check(plain, expected)
    assert torch.equal(layer.product(plain[0, 0]), expected[0, 0])


@each_dtype
def test_products_of_nothing(dtype: torch.dtype) -> None:
    layer = make_layer(40, 8, dtype)
    assert layer.product(noise(2, 0, 8, dtype=dtype)).shape == (2, 0, 40)
    assert make_layer(0, 8, dtype).product(noise(3, 8, dtype=dtype)).shape == (3, 0)
    deepless = make_layer(40, 0, dtype, bias=True)
    assert torch.equal(deepless.product(noise(3, 0, dtype=dtype)), deepless.exact(noise(3, 0, dtype=dtype)).to(dtype))
    assert not make_layer(40, 0, dtype).product(noise(3, 0, dtype=dtype)).any()


# -- norms and turns ---------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("late", [False, True], ids=["rounded twice", "rounded once"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float, late: bool, dtype: torch.dtype) -> None:
    for size in (1, 2, panel() - 1, panel(), panel() + 1, 576, 1003):
        for scale in (1.0, 1e-3):  # the second: eps counts
            x, weight = noise(2, 5, size, dtype=dtype) * scale, noise(size, dtype=dtype, seed=1)
            wide = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
            expected = (wide if late else wide.to(dtype).double()) * (weight.double() + offset)
            tolerance = max(2e-6, 2 * torch.finfo(dtype).eps)
            out = OPS.rms_norm(x, weight, 1e-5, offset, late)
            torch.testing.assert_close(out, expected.to(dtype), rtol=tolerance, atol=tolerance * scale)
            assert torch.equal(OPS.rms_norm(x.transpose(0, 1), weight, 1e-5, offset, late), out.transpose(0, 1))
    for shape in ((3, 0), (0, 7)):
        assert OPS.rms_norm(noise(*shape, dtype=dtype), noise(shape[1], dtype=dtype), 1e-5, offset, late).shape == shape


@each_dtype
@pytest.mark.parametrize("size", [2, 6, 16, 30, 40, 64, 66, 80, 128, 256])
def test_turns_have_the_bits_of_transformers_own(size: int, dtype: torch.dtype) -> None:
    """The first heads of each row, and no other number."""
    heads, turned, tokens = 5, 3, 4
    x, cos, sin = (
        noise(1, tokens, heads * size + 3, dtype=dtype),
        *(noise(1, tokens, size, dtype=dtype, seed=s) for s in (1, 2)),
    )
    expected = x.clone()
    part = expected[..., : turned * size].view(1, tokens, turned, size)
    left, right = part.chunk(2, -1)
    part.copy_(part * cos[:, :, None] + torch.cat([-right, left], -1) * sin[:, :, None])
    OPS.rotate(x, cos, sin, turned)
    assert torch.equal(x, expected)


# -- layers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A decoder layer of width 50: two query heads and one of keys and of values, of size 18."""

    dtype: torch.dtype
    bias: bool = False
    heads: int = 3  # that turn

    def parts(self) -> tuple[Layer, Layer, Layer, Layer]:
        """Queries, keys and values; output; gate and up; down."""
        shapes = ((72, 50), (50, 36), (4 * panel(), 50), (50, 2 * panel()))
        return tuple(make_layer(*shape, self.dtype, self.bias, seed=seed) for seed, shape in enumerate(shapes, 1))  # type: ignore[return-value]

    def norm(self, seed: int) -> tuple[Tensor, float, float, bool]:
        return noise(50, dtype=self.dtype, seed=seed), 1e-5, 1.0, seed == 7

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        joined = self.parts()[0]
        return OPS.before_attention(  # type: ignore[no-any-return]
            x, *self.norm(7), joined.packed, joined.packed_bias, 72, False, cos, sin, self.heads
        )

    def after(self, attended: Tensor, x: Tensor, activation: int = SILU, swapped: bool = False, matrix: bool = False) -> Tensor:
        _, out, inner, down = self.parts()
        return OPS.after_attention(  # type: ignore[no-any-return]
            *(attended, x, out.packed, out.packed_bias, *self.norm(8), inner.packed, inner.packed_bias, 2 * panel()),
            *(activation, swapped, down.packed, down.packed_bias, matrix),
        )

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, cos, sin, attended: [1, rows, ...]."""
        return tuple(noise(1, rows, size, dtype=self.dtype, seed=i) for i, size in enumerate((50, 18, 18, 36)))  # type: ignore[return-value]


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_whole_layers_have_the_bits_of_their_parts(bias: bool, dtype: torch.dtype) -> None:
    decoder = Decoder(dtype, bias)
    joined, out, inner, down = decoder.parts()
    for rows in (1, 4, 7, 100):
        x, cos, sin, attended = decoder.inputs(rows)
        expected = joined.product(OPS.rms_norm(x, *decoder.norm(7)))
        OPS.rotate(expected, cos, sin, decoder.heads)
        assert torch.equal(decoder.before(x, cos, sin), expected)
        middle = x + out.product(attended)
        normed = OPS.rms_norm(middle, *decoder.norm(8))
        for activation, swapped in ((SILU, False), (GELU_TANH, True)):
            expected = middle + down.product(inner.gated(normed, activation, swapped))
            assert torch.equal(decoder.after(attended, x, activation, swapped), expected)
            strided = torch.cat([x, x], -1)[..., :50]
            assert torch.equal(decoder.after(attended, strided, activation, swapped), expected)


def test_whole_layers_through_the_matrix_unit_s_door() -> None:
    decoder = Decoder(torch.bfloat16, bias=True)
    for rows in (16, 40, 100):
        x, _, _, attended = decoder.inputs(rows)
        through, own = decoder.after(attended, x, matrix=True), decoder.after(attended, x)
        torch.testing.assert_close(through, own, rtol=3e-2, atol=3e-2)


@dataclass(frozen=True)
class Stacked:
    """Three decoder layers of width 50, two query heads and one of keys and of values, of size 18; four rows, of which one is a
    prompt of five tokens, over blocks of 16."""

    dtype: torch.dtype

    NORM = (1e-5, 1.0, True)
    STARTS = torch.tensor([0, 1, 6, 7, 8], dtype=torch.int32)
    KEY_LENS = torch.tensor([20, 37, 1, 70], dtype=torch.int32)

    def numbers(self) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """Norms, weights and biases."""
        shapes = ((72, 50), (50, 36), (4 * panel(), 50), (50, 2 * panel()))
        parts = [make_layer(*shape, self.dtype, i % 4 < 2, seed=i) for i, shape in enumerate(3 * shapes)]
        norms = [noise(50, dtype=self.dtype, seed=50 + i) for i in range(6)]
        return norms, [part.packed for part in parts], [part.packed_bias for part in parts]

    def caches(self) -> list[Tensor]:
        return [noise(17, 16, 1, 18, dtype=self.dtype, seed=80 + i) for i in range(6)]

    def step(self) -> tuple[Tensor, ...]:
        """Slots, block table, and what `plan` made."""
        table = torch.arange(1, 17, dtype=torch.int32).view(4, 4)
        table = torch.cat([table, table[:, -1:].flip(0)], 1)  # five blocks for the longest
        slots = [
            int(table[row, position // 16]) * 16 + position % 16
            for row in range(4)
            for position in range(int(self.KEY_LENS[row] - self.STARTS[row + 1] + self.STARTS[row]), int(self.KEY_LENS[row]))
        ]
        return torch.tensor(slots), table, *OPS.plan(self.STARTS, self.KEY_LENS, 1, 2, 18, 30, None)

    def turns(self) -> tuple[Tensor, Tensor]:
        return noise(1, 8, 18, dtype=self.dtype, seed=1), noise(1, 8, 18, dtype=self.dtype, seed=2)

    def together(self, x: Tensor, caches: list[Tensor], wanted: Tensor | None = None, **others: Any) -> Tensor:
        norms, weights, biases = self.numbers()
        given = {"norms": norms, "weights": weights, "biases": biases, "joined_width": 72, "heads": 2, **others}
        return OPS.layers(  # type: ignore[no-any-return]
            *(x, *self.turns(), given["norms"], *self.NORM, given["weights"], given["biases"], given["joined_width"]),
            *(2 * panel(), False, SILU, False, given["heads"], caches, *self.step(), 0.2, 30, None, 2.5, wanted),
        )

    def apart(self, x: Tensor, caches: list[Tensor]) -> Tensor:
        norms, weights, biases = self.numbers()
        for i in range(3):
            w, b = weights[4 * i : 4 * i + 4], biases[4 * i : 4 * i + 4]
            joined = OPS.before_attention(x, norms[2 * i], *self.NORM, w[0], b[0], 72, False, *self.turns(), 3)
            q, k, v = joined.view(8, 4, 18).split((2, 1, 1), 1)
            attended = OPS.attend(q, k, v, *caches[2 * i : 2 * i + 2], *self.step(), None, 0.2, 30, None, 2.5)
            x = OPS.after_attention(
                *(attended.view(1, 8, 36), x, w[1], b[1], norms[2 * i + 1], *self.NORM, w[2], b[2], 2 * panel()),
                *(SILU, False, w[3], b[3], False),
            )
        return x


@each_dtype
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(dtype: torch.dtype) -> None:
    stacked, x = Stacked(dtype), noise(1, 8, 50, dtype=dtype)
    caches, others = stacked.caches(), stacked.caches()
    expected = stacked.apart(x, others)
    assert torch.equal(stacked.together(x, caches), expected)
    assert all(map(torch.equal, caches, others))
    for strided in (torch.cat([x, x], -1)[..., :50], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(stacked.together(strided, stacked.caches()), expected)


@each_dtype
def test_what_nobody_wants_of_the_last_layer_is_zero(dtype: torch.dtype) -> None:
    stacked, x = Stacked(dtype), noise(1, 8, 50, dtype=dtype)
    caches, others = stacked.caches(), stacked.caches()
    expected = stacked.apart(x, others)
    for wanted in ([0, 5, 6, 7], [7, 0, 0], []):
        out = stacked.together(x, caches, torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(out[:, wanted], expected[:, wanted])
        assert not out[:, [i for i in range(8) if i not in wanted]].any()
        assert all(map(torch.equal, caches, others))  # keys and values are those of all tokens


# -- bits --------------------------------------------------------------------------------------------------------------------


def every_op(dtype: torch.dtype, rows: int, deep: bool) -> list[tuple[list[Tensor], Callable[..., Tensor]]]:
    """Inputs of `rows` rows, and what each op makes of them."""
    depth = 4200 if deep else 75
    layer, both = make_layer(3 * panel() - 7, depth, dtype, bias=True), make_layer(4 * panel(), depth, dtype)
    weight, decoder = noise(depth, dtype=dtype, seed=5), Decoder(dtype)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = x.clone()
        OPS.rotate(turned, cos, sin, 3)
        return turned

    x = noise(rows, depth, dtype=dtype)
    hidden, cos, sin, attended = (tensor[0] for tensor in decoder.inputs(rows))
    return [
        ([x], layer.product),
        ([x], both.gated),
        ([x], lambda x: OPS.rms_norm(x, weight, 1e-5, 0.0, False)),
        ([noise(rows, 72, dtype=dtype), cos, sin], rotated),
        ([hidden, cos, sin], decoder.before),
        ([attended, hidden], decoder.after),
    ]


def chosen(inputs: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    return [tensor[list(rows)] for tensor in inputs]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_is_bit_equal_in_any_company(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 14) | st.integers(2, 130))
    company = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=30))
    for inputs, op in every_op(data.draw(st.sampled_from(DTYPES)), rows, deep=data.draw(st.integers(0, 5)) == 0):
        together = op(*inputs)
        assert torch.equal(op(*chosen(inputs, company)), together[company])
        assert torch.equal(op(*chosen(inputs, company[:1])), together[company[:1]])


@each_dtype
@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    for rows, deep in ((1, True), (7, True), (200, False)):
        for inputs, op in every_op(dtype, rows, deep):
            outs = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                outs.append(op(*inputs))
            assert all(torch.equal(out, outs[0]) for out in outs[1:])


@each_dtype
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_without_numbers_spoils_no_other(poison: float, dtype: torch.dtype) -> None:
    for rows in (2, 6, 20):
        for inputs, op in every_op(dtype, rows, deep=False):
            clean, victims = op(*inputs), [row for row in range(rows) if row != 1]
            for tensor in inputs:
                tensor[1] = poison
            assert torch.equal(op(*inputs)[victims], clean[victims])


@each_dtype
def test_a_column_without_numbers_spoils_no_other(dtype: torch.dtype) -> None:
    plain = make_layer(3 * panel() - 7, 65, dtype)
    x = noise(9, 65, dtype=dtype)
    weight = plain.weight.clone()
    weight[[2, -1]] = torch.nan
    out = OPS.linear(x, OPS.pack(weight), None, len(weight), False)
    spoilt = out.isnan().all(0)
    assert spoilt.nonzero().flatten().tolist() == [2, len(weight) - 1]
    assert torch.equal(out[:, ~spoilt], plain.product(x)[:, ~spoilt])


# -- refusals ----------------------------------------------------------------------------------------------------------------


def refusals() -> list[tuple[str, Callable[[], object]]]:
    """What each message starts with."""
    zeros, half, wide = torch.zeros, torch.float16, torch.float64
    layer = make_layer(3 * panel(), 8, torch.float32)
    x, cos, x16 = zeros(3, 8), zeros(3, 4), zeros(3, 8, dtype=half)

    def linear(x: Tensor = x, packed: Tensor = layer.packed, bias: Tensor | None = None, width: int = 3 * panel()) -> Tensor:
        return OPS.linear(x, packed, bias, width, False)  # type: ignore[no-any-return]

    def gated(width: int, activation: int, panels: int = 2) -> Tensor:
        return OPS.gated(x, OPS.pack(zeros(panels * panel(), 8)), None, width, False, activation, False)  # type: ignore[no-any-return]

    def after(residual: Tensor) -> Tensor:
        decoder = Decoder(torch.float32)
        return decoder.after(decoder.inputs(3)[3], residual)

    stacked = Stacked(torch.float32)

    def layers(**others: Any) -> Tensor:
        return stacked.together(zeros(1, 8, 50), stacked.caches()[others.pop("skip", 0) :], **others)

    return [
        ("norms, weights, biases, caches:", lambda: layers(norms=stacked.numbers()[0][1:])),
        ("norms, weights, biases, caches:", lambda: layers(weights=stacked.numbers()[1][:-1])),
        ("norms, weights, biases, caches:", lambda: layers(biases=[])),
        ("norms, weights, biases, caches:", lambda: layers(norms=[], weights=[], biases=[], skip=6)),
        ("norms, weights, biases, caches:", lambda: layers(skip=1)),
        ("joined_width:", lambda: layers(joined_width=71)),
        ("joined_width:", lambda: layers(heads=4)),
        ("joined_width:", lambda: layers(heads=1)),
        ("joined_width:", lambda: layers(heads=0)),
        ("weight:", lambda: OPS.pack(zeros(4))),
        ("weight:", lambda: OPS.pack(zeros(4, 5).t())),
        ("weight:", lambda: OPS.pack(zeros(4, 5, dtype=torch.int32))),
        ("packed:", lambda: linear(x16)),
        ("packed:", lambda: linear(zeros(()))),
        ("packed:", lambda: linear(packed=zeros(3, 8, 1, 1))),
        ("packed:", lambda: linear(packed=layer.packed.flatten(2))),
        ("packed:", lambda: linear(packed=layer.packed.transpose(0, 1))),
        ("x:", lambda: linear(zeros(3, 9))),
        ("x:", lambda: linear(zeros(3, 0))),
        ("x:", lambda: linear(x.to(wide), layer.packed.to(wide))),
        ("width:", lambda: linear(width=3 * panel() + 1)),
        ("width:", lambda: linear(width=2 * panel())),
        ("bias:", lambda: linear(bias=zeros(3 * panel() - 1))),
        ("bias:", lambda: linear(bias=zeros(3 * panel(), dtype=half))),
        ("activation:", lambda: gated(panel(), 0)),
        ("activation:", lambda: gated(panel(), 4)),
        ("width:", lambda: gated(panel() - 1, SILU)),
        ("width:", lambda: gated(panel(), SILU, panels=3)),
        ("residual:", lambda: after(zeros(1, 2, 50))),
        ("residual:", lambda: after(zeros(1, 3, 50, dtype=half))),
        ("weight:", lambda: OPS.rms_norm(x, zeros(7), 1e-5, 0.0, False)),
        ("weight:", lambda: OPS.rms_norm(x, zeros(8, dtype=half), 1e-5, 0.0, False)),
        ("x:", lambda: OPS.rms_norm(x.to(wide), zeros(8, dtype=wide), 1e-5, 0.0, False)),
        ("heads:", lambda: OPS.rotate(x, cos, cos, 3)),
        ("heads:", lambda: OPS.rotate(x, cos, cos, -1)),
        ("heads:", lambda: OPS.rotate(x, cos, cos, 2**62)),  # times 4 it is 0
        ("x:", lambda: OPS.rotate(x[:2], cos, cos, 2)),
        ("x:", lambda: OPS.rotate(zeros(8, 3).t(), cos, cos, 2)),
        ("x:", lambda: OPS.rotate(x, zeros(3, 3), zeros(3, 3), 2)),
        ("cos, sin:", lambda: OPS.rotate(x, cos, zeros(3, 2), 2)),
        ("cos, sin:", lambda: OPS.rotate(x, cos.to(half), cos.to(half), 2)),
    ]


def test_what_is_refused() -> None:
    for start, op in refusals():
        with pytest.raises(RuntimeError, match=f"^{start}"):
            op()


@pytest.mark.parametrize("size", [0, 1, 3, 255, 256, 257, (1 << 20) - 1, (1 << 21) + 5])
def test_checksums_see_every_byte(size: int) -> None:
    octets = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (whole,) = torch.ops.hf_cb.checksums([octets]).tolist()
    assert torch.ops.hf_cb.checksums([octets[:0], octets.clone()]).tolist() == [0, whole]
    for place in {0, size // 2, size - 1} if size else ():
        changed = octets.clone()
        changed[place] += 1
        assert torch.ops.hf_cb.checksums([changed]).tolist() != [whole]
    if size > 512:
        others = torch.ops.hf_cb.checksums([octets ^ 0x80, octets.roll(256)]).tolist()  # signs alone, places alone
        assert whole not in others
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.ops.hf_cb.checksums([torch.zeros(4, 4).t()])
    with pytest.raises(RuntimeError, match="on a CPU"):
        torch.ops.hf_cb.checksums([torch.zeros(4, device="meta")])
