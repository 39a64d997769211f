"""What every compressor promises. Subclass `CompressorContract`, give `compressors`, get every test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.comm import EF, EF21, Compressor, CompressorContext, EFMixed
from shrinkpoint.comm.error_feedback import MessageInfo
from shrinkpoint.errors import MismatchError, PolicyError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = (
    (),
    (0,),
    (0, 4),
    (3, 0, 2),
    (1,),
    (2,),
    (63,),
    (64,),
    (65,),
    (3, 5),
    (4, 64),
    (3, 130),
    (2, 3, 4, 5),
    (2, 16, 8, 8),
)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
ANY = st.floats(width=32)


def noise(shape: Sequence[int], seed: int = 1) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


FORMS = {
    "transposed": lambda: noise((30, 40)).t(),
    "strided": lambda: noise((30, 40))[::3, 1::2],
    "expanded": lambda: noise((4, 1)).expand(4, 6),
    "channels last": lambda: noise((2, 16, 6, 5)).to(memory_format=torch.channels_last),
    "offset": lambda: noise((100,))[3:],
    "needs grad": lambda: noise((6, 7)).requires_grad_(),
}
"""Tensors that lie in memory otherwise than row by row, or that autograd watches."""


def mean_errors(arrived: Callable[[int], Tensor], sent: Tensor, counts: Sequence[int]) -> list[float]:
    """The error of the mean of what has arrived after each count of messages, relative to the mean that was sent.

    Args:
        arrived: sends the message of this index, and returns what has arrived.
        sent: the mean of what is sent.
    """
    total, errors = torch.zeros_like(sent, dtype=torch.float64), []
    for index in range(max(counts)):
        total += arrived(index)
        if index + 1 in counts:
            errors.append(float((total / (index + 1) - sent).norm() / sent.norm()))
    return errors


class CompressorContract:
    """The tests; a subclass overrides what is here.

    Attributes:
        compressors: to try; fast ones, a few.
        native: whether there is a native path; then compressors have `_encode_torch(x, context)` and
            `_decode_torch(wire, out, context)`, or the suite overrides what calls them.
        exact: whether what is decoded is what was encoded.
        dense: whether every position crosses.
        feeds_back: whether feedback makes up for what is lost.
    """

    compressors: tuple[Compressor, ...] = ()
    native = True
    exact = False
    dense = True
    feeds_back = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.native:  # nothing to compare
            for name in [name for name in dir(cls) if name.startswith("test_both_ways")]:
                setattr(cls, name, None)

    def context(self, x: Tensor, compressor: Compressor) -> CompressorContext:
        """What both ends know of a message of `x`."""
        return CompressorContext(key=0x9E3779B1)

    def encode_torch(self, compressor: Compressor, x: Tensor, context: CompressorContext) -> Tensor:
        return compressor._encode_torch(x, context)  # type: ignore[attr-defined]

    def decode_torch(self, compressor: Compressor, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        return compressor._decode_torch(wire, out, context)  # type: ignore[attr-defined]

    @pytest.fixture
    def xs(self) -> list[Tensor]:
        plain = [noise(shape).to(dtype) for shape in SHAPES for dtype in FLOATS]
        return plain + [make() for make in FORMS.values()]

    def round_trip(self, compressor: Compressor, x: Tensor) -> Tensor:
        """`x` there and back, every promise about the message checked on the way."""
        context, before = self.context(x, compressor), bits(x)
        wire = compressor.encode(x, context)
        assert (wire.dtype, wire.dim(), wire.device) == (torch.uint8, 1, x.device)
        assert wire.is_contiguous() and not wire.requires_grad
        assert wire.numel() == compressor.wire_bytes(x.shape, x.dtype, context)
        out = torch.full_like(x.detach(), torch.nan, memory_format=torch.contiguous_format)
        message = bits(wire)
        assert compressor.decode(wire, out, context) is out
        assert bits(x) == before and bits(wire) == message
        return out

    def test_whatever_the_shape_and_dtype_it_comes_back_as_it_was_and_is_as_long_as_was_said(self, xs):
        for compressor in self.compressors:
            for x in xs:
                out = self.round_trip(compressor, x)
                assert (out.shape, out.dtype) == (x.shape, x.dtype) and out.isfinite().all()
                if self.exact:
                    assert bits(out) == bits(x)

    def test_no_values_are_no_bytes(self):
        for compressor in self.compressors:
            for x in (torch.empty(0), torch.empty(3, 0, 2)):
                assert compressor.encode(x, self.context(x, compressor)).numel() == 0

    def test_the_same_values_are_the_same_message_whatever_their_strides(self):
        for compressor in self.compressors:
            for make in FORMS.values():
                x = make()
                context, twin = self.context(x, compressor), x.detach().clone(memory_format=torch.contiguous_format)
                assert bits(compressor.encode(x, context)) == bits(compressor.encode(twin, context))

    def test_a_message_is_read_into_any_strides(self):
        for compressor in self.compressors:
            x = noise((2, 16, 6, 5))
            context = self.context(x, compressor)
            wire, expected = compressor.encode(x, context), self.round_trip(compressor, x)
            around = torch.full((2, 16, 6, 7), 5.0)
            for out in (around[..., 1:-1], torch.empty_like(x, memory_format=torch.channels_last)):
                assert bits(compressor.decode(wire, out, context)) == bits(expected)
            assert (around[..., 0] == 5).all() and (around[..., -1] == 5).all()

    def test_a_message_may_lie_anywhere_in_a_buffer(self):
        for compressor in self.compressors:
            x = noise((3, 130))
            context = self.context(x, compressor)
            wire = compressor.encode(x, context)
            buffer = torch.cat([wire.new_zeros(1), wire])
            assert bits(compressor.decode(buffer[1:], torch.empty_like(x), context)) == bits(
                self.round_trip(compressor, x)
            )

    def test_what_was_in_the_output_before_does_not_matter(self):
        for compressor in self.compressors:
            x = noise((3, 130))
            context = self.context(x, compressor)
            wire = compressor.encode(x, context)
            outs = [compressor.decode(wire, torch.full_like(x, fill), context) for fill in (0.0, 7.0, torch.nan)]
            assert bits(outs[0]) == bits(outs[1]) == bits(outs[2])

    def test_a_message_does_not_change_with_the_tensor(self):
        for compressor in self.compressors:
            x = noise((3, 130))
            context = self.context(x, compressor)
            wire = compressor.encode(x, context)
            before = bits(wire)
            x.zero_()
            assert bits(wire) == before

    def test_an_output_that_requires_grad_is_filled(self):
        for compressor in self.compressors:
            x = noise((5, 7))
            context = self.context(x, compressor)
            wire, out = compressor.encode(x, context), torch.empty_like(x).requires_grad_()
            with torch.no_grad():
                compressor.decode(wire, out, context)
            assert out.is_leaf and bits(out) == bits(self.round_trip(compressor, x))

    def test_both_ways_of_computing_give_the_same_bits(self):
        @settings(deadline=None, max_examples=40)
        @given(st.sampled_from(self.compressors), st.sampled_from(SHAPES), st.data())
        def holds(compressor, shape, data):
            scale, seed = data.draw(st.sampled_from([1.0, 1e-30, 1e-42, 1e30, 1e38])), data.draw(st.integers(0, 999))
            x = noise(shape, seed) * scale
            values = data.draw(st.lists(ANY, max_size=8))
            x.view(-1)[: len(values)] = torch.tensor(values)[: x.numel()]
            self.computes_alike(compressor, x.to(data.draw(st.sampled_from(FLOATS))))

        holds()

    def test_both_ways_of_computing_give_the_same_bits_for_many_values(self):
        for compressor in self.compressors:
            self.computes_alike(compressor, noise((5, 64_000)))

    def test_both_ways_of_computing_give_the_same_bits_on_narrower_machines(self):
        for compressor in self.compressors:
            try:
                for most in (0, 1):
                    _native._use_simd(most)
                    for count in (1, 100, 5000):
                        self.computes_alike(compressor, noise((3, count)))
            finally:
                _native._use_simd(2)

    def computes_alike(self, compressor: Compressor, x: Tensor) -> None:
        context = self.context(x, compressor)
        wire = compressor.encode(x, context)
        assert bits(wire) == bits(self.encode_torch(compressor, x, context))
        outs = torch.empty_like(x), torch.empty_like(x)
        compressor.decode(wire, outs[0], context)
        self.decode_torch(compressor, wire, outs[1], context)
        assert bits(outs[0].nan_to_num(1.25)) == bits(outs[1].nan_to_num(1.25))
        assert torch.equal(outs[0].isnan(), outs[1].isnan())

    def test_a_value_that_is_not_finite_does_not_become_finite(self):
        for compressor in self.compressors:
            for dtype in FLOATS:
                for bad in (torch.nan, torch.inf, -torch.inf):
                    for place in (0, 70, 389):
                        x = noise((3, 130)).to(dtype)
                        x.view(-1)[place] = bad
                        out = self.round_trip(compressor, x)
                        assert not out.isfinite().all()
                        assert not self.dense or not out.view(-1)[place].isfinite()

    def test_a_message_of_a_value_that_is_not_finite_does_not_prove_the_opposite(self):
        for compressor in self.compressors:
            for dtype in FLOATS:
                for bad in (torch.nan, torch.inf, -torch.inf):
                    for place in (0, 70, 389):
                        x = noise((3, 130)).to(dtype)
                        x.view(-1)[place] = bad
                        context = self.context(x, compressor)
                        assert not compressor.proves_finite(compressor.encode(x, context), x.shape, dtype, context)

    @pytest.mark.parametrize("kind", [EF, EF21, EFMixed])
    def test_with_feedback_the_mean_of_what_arrives_becomes_the_mean_of_what_was_sent(self, kind):
        x = noise((2, 256))
        for compressor in self.compressors if self.feeds_back else ():
            is_unfit = kind is EFMixed and not hasattr(compressor, "share")
            if is_unfit or getattr(compressor, "scaled", False):
                with pytest.raises(PolicyError):
                    kind(compressor)
                continue
            context, out = self.context(x, compressor), torch.empty_like(x)
            if (self.round_trip(compressor, x) - x).norm() >= x.norm():
                continue  # one bit between the ends of a range: no feedback makes up for that
            sender, receiver = (kind(compressor).new_state() for _ in range(2))

            def arrived(index, sender=sender, receiver=receiver, out=out, context=context):
                info = MessageInfo(index=index, context=replace(context, key=index + 1))
                return receiver.unpack(sender.pack(x, info).wire, out, info)

            early, late = mean_errors(arrived, x, (50, 200))
            assert late < max(early * 0.75, 1e-3), (kind, compressor)

    def test_finite_values_stay_finite_in_narrow_dtypes(self):
        for compressor in self.compressors:
            for dtype in FLOATS[1:3]:
                most = torch.finfo(dtype).max
                x = noise((3, 130)).clamp(-0.01, 0.01).mul(most * 0.1).to(dtype)
                x[0, 0], x[1, 3] = most / 4, -most / 4
                assert self.round_trip(compressor, x).isfinite().all()

    def test_a_message_of_another_size_is_refused(self):
        for compressor in self.compressors:
            x = noise((3, 130))
            context, out = self.context(x, compressor), torch.zeros_like(x)
            wire = compressor.encode(x, context)
            for wrong in (wire[:-1], torch.cat([wire, wire[:1]]), wire[:0], wire.view(torch.int8), wire[None]):
                with pytest.raises(MismatchError, match="the same compressor, shape and dtype"):
                    compressor.decode(wrong, out, context)
            assert (out == 0).all()

    def test_the_default_dtype_does_not_matter(self):
        x = noise((3, 130)).to(torch.bfloat16)
        for compressor in self.compressors:
            expected = self.round_trip(compressor, x)
            torch.set_default_dtype(torch.float64)
            try:
                assert bits(self.round_trip(compressor, x)) == bits(expected)
                if self.native:
                    self.computes_alike(compressor, x)
            finally:
                torch.set_default_dtype(torch.float32)

    def test_equal_settings_are_equal_compressors(self):
        for compressor in self.compressors:
            twin = type(compressor)(**{name: getattr(compressor, name) for name in compressor.__dataclass_fields__})
            assert twin == compressor and hash(twin) == hash(compressor) and str(compressor) == compressor.spec

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_gives_the_same_bits(self, xs):
        for compressor in self.compressors:
            for x in xs:
                context = self.context(x, compressor)
                wire, there = compressor.encode(x, context), compressor.encode(x.detach().cuda(), context)
                assert bits(wire) == bits(there)
                out = compressor.decode(there, torch.empty_like(x.detach().cuda()), context)
                assert bits(out) == bits(self.round_trip(compressor, x))
