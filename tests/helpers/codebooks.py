"""Symbols and lossy schemes for tests that care about bytes and not about what is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers.strategies import bits
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import MAX_CODES, CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes import QuantizedState
from shrinkpoint.schemes.encode.records import encode_records
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, EncodedRecord, Role


def symbols_of(
    shape: tuple[int, ...],
    bins: int,
    first: int = 2,
    *,
    seed: int = 0,
    exact: torch.dtype = torch.bfloat16,
    special: float = 0.1,
    spread: float = 1.0,
) -> CodebookTensor:
    """Random symbols.

    Args:
        special: the share of codes below `first`; 1: all of them.
        spread: of the others, how much of the centers is used.
    """
    random = torch.Generator().manual_seed(seed)
    used = max(1, round(bins * spread))
    codes = first + torch.randint(0, used, shape, generator=random)
    if first:
        below = torch.randint(0, first, shape, generator=random)
        codes = torch.where(torch.rand(shape, generator=random) < special, below, codes)
    centers = torch.randn(bins, generator=random).mul(0.02).sort().values
    count = int((codes == first - 1).sum()) if first else 0
    values = torch.randn(count, generator=random).to(exact)
    return CodebookTensor(codes.to(torch.uint8), centers, values, first)


@st.composite
def symbols(draw: st.DrawFn, shape: tuple[int, ...], bins: int, first: int, exact: torch.dtype) -> CodebookTensor:
    """Symbols of any content: nothing special, everything, one code alone."""
    return symbols_of(
        shape,
        bins,
        first,
        seed=draw(st.integers(0, 999)),
        exact=exact,
        special=draw(st.sampled_from([0.0, 0.1, 1.0])),
        spread=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def moved(one: CodebookTensor, *, seed: int = 1, share: float = 0.1, bins: int | None = None) -> CodebookTensor:
    """Symbols some steps later: a share of the codes one center on, the centers a little elsewhere."""
    random = torch.Generator().manual_seed(seed)
    bins = one.bins if bins is None else bins
    steps = torch.rand(one.codes.shape, generator=random) < share
    codes = one.codes.long()
    codes = torch.where(codes < one.first_code, codes, (codes + steps).clamp(max=one.first_code + bins - 1))
    centers = one.centers * 1.001 if bins == one.bins else torch.randn(bins, generator=random).sort().values
    exact = (one.exact.float() * 1.01).to(one.exact.dtype)
    return CodebookTensor(codes.to(torch.uint8), centers, exact, one.first_code, one.residual, one.context_name)


def alike(a: CodebookTensor, b: CodebookTensor) -> bool:
    """True if every bit of two symbols is the same."""
    same = [bits(x) == bits(y) for x, y in ((a.codes, b.codes), (a.centers, b.centers), (a.exact, b.exact))]
    kinds = [(one.first_code, one.residual, one.codes.shape, one.exact.dtype) for one in (a, b)]
    return all(same) and kinds[0] == kinds[1]


@dataclass(frozen=True)
class Rounding:
    """A lossy scheme: floats that `picks` names go to the nearest of `bins` centers, those near 0 to none.

    Attributes:
        picks: beginnings of the names that are quantized.
        bins: at least 2.
        width: the centers lie from -width to width, the same at every save.
        loss: for the manifest.
    """

    picks: tuple[str, ...] = ("model/",)
    bins: int = 8
    width: float = 0.3
    coders: tuple[str, ...] = CODERS
    exact: torch.dtype = torch.bfloat16
    loss: JSON = field(default_factory=lambda: {"chosen": {"bins": 8}})
    id: str = "rounding"

    def symbols(self, x: Tensor) -> CodebookTensor:
        """Pruned below a hundredth of the width, protected beyond it."""
        centers = torch.linspace(-self.width, self.width, self.bins)
        flat = x.detach().cpu().float().reshape(-1)
        codes = 2 + torch.bucketize(flat, (centers[1:] + centers[:-1]) / 2)
        codes[flat.abs() < self.width / 100] = 0
        codes[flat.abs() > self.width] = 1
        return CodebookTensor(codes.to(torch.uint8).reshape(x.shape), centers, flat[codes == 1].to(self.exact))

    def names(self, flat: FlatState) -> Iterator[str]:
        for name, x in flat.tensors.items():
            if name.startswith(self.picks) and x.is_floating_point() and x.dtype != torch.bfloat16:
                yield name

    def quantize(self, flat: FlatState, reference: Reference | None) -> QuantizedState:
        symbols = {name: self.symbols(flat.tensors[name]) for name in self.names(flat)}
        tensors = {
            name: symbols[name].dequantize(x.dtype) if name in symbols else x for name, x in flat.tensors.items()
        }
        for name, info in flat.infos.items():  # narrow copies of a quantized master follow it
            master = "model/" + name.removeprefix("half/")
            if info.dtype == "BF16" and info.role is not Role.MOMENT1 and master in symbols:
                tensors[name] = tensors[master].bfloat16()
        return QuantizedState(replace(flat, tensors=tensors), symbols, self.loss)

    def encode(
        self,
        state: FlatState,
        reference: Reference | None,
        *,
        quantized: Mapping[str, CodebookTensor] | None = None,
        threads: int | None = None,
    ) -> Iterable[EncodedRecord]:
        return encode_records(state, reference, quantized=quantized, coders=self.coders, threads=threads)

    def expected(self, state: Any) -> Any:
        """What a reader gets of a state whose tensors this quantizes."""
        from shrinkpoint.tensors.flat_state import flatten, unflatten

        flat = flatten(state)
        return unflatten(flat.tree, self.quantize(flat, None).state.tensors)


ALL_CODERS = (*CODERS, "lzma")
"""Those that are taken only on request, too."""
ANY_BINS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 254, 255, 256]))


def most_bins(first: int) -> int:
    return MAX_CODES - first
