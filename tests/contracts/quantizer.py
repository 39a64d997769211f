"""What every quantizer promises. Subclass `QuantizerSuite`, give `quantize` and `allowed`, get every test.

One under which decoded values stay what they are subclasses `StableQuantizerSuite` and gives `again`, too.
"""

from __future__ import annotations

import pytest
import torch
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _plain(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02


FORMS = {
    "0-d": lambda: _plain(),
    "empty": lambda: torch.empty(0),
    "empty matrix": lambda: torch.empty(3, 0, 2),
    "one": lambda: _plain(1),
    "two": lambda: torch.tensor([-1.0, 3.0]),
    "zeros": lambda: torch.tensor([0.0, -0.0, 0.0]),
    "constant": lambda: torch.full((3, 5), 0.37),
    "matrix": lambda: _plain(30, 40),
    "transposed": lambda: _plain(30, 40).t(),
    "strided": lambda: _plain(30, 40)[::3, 1::2],
    "expanded": lambda: _plain(4, 1).expand(4, 6),
    "heavy tail": lambda: _plain(2000) ** 3 * torch.linspace(-50, 50, 2000),
    "far from zero": lambda: 1000 + _plain(500),
    "needs grad": lambda: _plain(6, 7).requires_grad_(),
}
"""Tensors that quantizers get wrong, as float32."""
EXTREMES = {
    torch.bfloat16: [3.38e38, -3.38e38, 1e-38, 9.2e-41, -9.2e-41, 0.0, -0.0, 1.0],
    torch.float16: [65504.0, -65504.0, 65440.0, 6e-8, -6e-8, 0.0, -0.0, 1.0],
    torch.float32: [3.4028234e38, -3.4028234e38, 3.3961775e38, 1e-45, -1e-45, 0.0, -0.0, 1.0],
}
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


def cases(dtype: torch.dtype) -> dict[str, Tensor]:
    found = {name: make().to(dtype) for name, make in FORMS.items()}
    return found | {"extremes": torch.tensor(EXTREMES[dtype], dtype=dtype)}


def rounding(values: Tensor) -> Tensor:
    """How far a value may be from what was rounded to it: float64."""
    info = torch.finfo(values.dtype)
    return values.double().abs() * info.eps / 2 + info.smallest_normal * info.eps


class QuantizerSuite:
    """The tests; a subclass overrides what is here.

    Attributes:
        first: the code of the first center.
        bins: numbers of bins to try.
        refused: numbers of bins it does not take.
    """

    first = 0
    bins = (1, 2, 3, 16, 17, 18, 254, 256)
    refused = (-1, 0, 257)

    def quantize(self, x: Tensor, bins: int) -> CodebookTensor:
        raise NotImplementedError

    def allowed(self, x: Tensor, symbols: CodebookTensor) -> Tensor:
        """The stated bound of the error of every value of `x` (float64), before a reader rounds to its dtype."""
        raise NotImplementedError

    def suited(self, x: Tensor) -> Tensor:
        """Values that the quantizer takes, out of any."""
        return x

    def centers(self, bins: int) -> int:
        """How many centers so many bins are."""
        return bins

    @pytest.fixture(params=FLOATS)
    def xs(self, request) -> dict[str, Tensor]:
        return {name: self.suited(x) for name, x in cases(FLOATS[request.param]).items()}

    def keeps(self, x: Tensor, bins: int) -> CodebookTensor:
        symbols = self.quantize(x, bins)
        self.has_the_form(x, bins, symbols)
        self.takes_the_nearest(x, symbols)
        self.is_within_the_bound(x, symbols)
        return symbols

    def has_the_form(self, x: Tensor, bins: int, symbols: CodebookTensor) -> None:
        codes, centers, exact = symbols.codes, symbols.centers, symbols.exact
        assert (codes.dtype, codes.shape, codes.device) == (torch.uint8, x.shape, x.device)
        assert codes.is_contiguous() and not codes.requires_grad
        assert (symbols.first_code, symbols.bins) == (self.first, self.centers(bins))
        assert symbols.num_codes <= MAX_CODES and (not codes.numel() or int(codes.max()) < symbols.num_codes)
        assert centers.dtype == torch.float32 and centers.dim() == 1 and centers.isfinite().all()
        assert (centers.diff() >= 0).all()
        assert exact.shape == (int(symbols.protected.sum()),) and exact.isfinite().all() and not exact.requires_grad

    def takes_the_nearest(self, x: Tensor, symbols: CodebookTensor) -> None:
        coded = symbols.codes >= symbols.first_code
        values, codes = x.detach()[coded].double().cpu(), symbols.codes[coded].long().cpu() - symbols.first_code
        centers = symbols.centers.double().cpu()
        distances = (values[:, None] - centers).abs()
        assert (distances.gather(1, codes[:, None])[:, 0] <= distances.amin(1) * (1 + 1e-12)).all()

    def is_within_the_bound(self, x: Tensor, symbols: CodebookTensor) -> None:
        values = symbols.dequantize(x.dtype)
        assert (values.dtype, values.shape) == (x.dtype, x.shape) and values.isfinite().all()
        error = (values.double() - x.detach().double()).abs()
        assert (error <= self.allowed(x.detach().double(), symbols) + rounding(values)).all()

    def test_codes_are_the_nearest_and_values_within_the_bound(self, xs):
        for x in xs.values():
            for bins in self.bins:
                self.keeps(x, bins)

    def test_that_holds_for_any_finite_values(self):
        @settings(deadline=None, max_examples=60)
        @given(st.lists(FINITE, max_size=20), st.sampled_from(list(FLOATS.values())), st.sampled_from(self.bins))
        def holds(values, dtype, bins):
            limit = torch.finfo(dtype).max
            x = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)
            self.keeps(self.suited(x), bins)

        holds()  # not the method itself: hypothesis refuses one that several classes inherit

    def test_the_same_values_give_the_same_symbols_whatever_their_strides(self, xs):
        for x in xs.values():
            first, second = self.quantize(x, 16), self.quantize(x.detach().clone().contiguous(), 16)
            for one in ("codes", "centers", "exact"):
                assert torch.equal(getattr(first, one), getattr(second, one))

    def test_the_tensor_stays_as_it_is(self, xs):
        for x in xs.values():
            before = bits(x)
            symbols = self.quantize(x, 16)
            symbols.codes.zero_()
            symbols.exact.zero_()
            assert bits(x) == before

    def test_constant_tensor_is_kept(self, xs):
        x = xs["constant"]
        assert torch.equal(self.quantize(x, 16).dequantize(x.dtype), x)

    def test_so_many_bins_are_refused(self):
        for bins in self.refused:
            with pytest.raises(PolicyError, match=rf"bins: {bins}; expected"):
                self.quantize(self.suited(_plain(5)), bins)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_that_holds_on_a_gpu(self, xs):
        for x in xs.values():
            for bins in self.bins:
                self.keeps(x.detach().cuda(), bins)


class StableQuantizerSuite(QuantizerSuite):
    """And a test that decoded values stay when they are quantized again."""

    def again(self, x: Tensor, symbols: CodebookTensor) -> CodebookTensor:
        """Decoded values, quantized once more in the same way."""
        raise NotImplementedError

    def test_what_was_quantized_stays_when_it_is_quantized_again(self, xs):
        for x in xs.values():
            symbols = self.quantize(x, 16)
            values = symbols.dequantize(x.dtype)
            assert torch.equal(self.again(values, symbols).dequantize(x.dtype), values)
