"""What codebooks and thresholds of whole tensors need to be known of, where several ranks have boxes of these."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec import Origin, Reference, Symbols
from shrinkpoint.codec.quantize.exponents import Buckets
from shrinkpoint.codec.quantize.logarithmic import SHARE, SHIFT, cells, ends_of, logarithmic
from shrinkpoint.record import Role
from shrinkpoint.schemes.candidate import Earlier
from shrinkpoint.schemes.layers import kind_by_name
from shrinkpoint.schemes.moments import is_moment
from shrinkpoint.schemes.picks import SMALLEST, Picks
from shrinkpoint.schemes.shardedpicks import picked
from shrinkpoint.schemes.unmoved import agreed, unmoved
from shrinkpoint.schemes.wholes import Wholes, merged_moments, moments_of
from shrinkpoint.state import FlatState
from shrinkpoint.statistics import LogHistogram

T = TypeVar("T")
_DIGITS = ((21, 10), (10, 11), (0, 10))
"""Where the digits of a magnitude's bits begin, and how many bits they have: the largest first."""


class Pooled:
    """Statistics of whole tensors, by their names; each method is a collective.

    Args:
        wholes: what all ranks have.
    """

    def __init__(self, wholes: Wholes) -> None:
        self.wholes = wholes
        self.all_kinds: dict[str, str] = {}
        self.titles: tuple[str, ...] = ()
        """Of all weights that were picked."""

    def title(self, name: str) -> str:
        """The name of the whole tensor that a tensor of this rank is of; no collective."""
        return self.wholes.title(name)

    def numel(self, name: str) -> int:
        """Of the whole tensor; no collective."""
        return self.wholes.mine[name].place.numel

    def seed(self, name: str, number: int) -> int:
        """Of chance that differs between the boxes of a tensor; no collective."""
        piece = self.wholes.mine[name]
        return piece.place.seed(number, piece.sizes)

    def picks(self, flat: FlatState, alive: Collection[str] | None) -> Picks:
        """Weights with two axes or more and at least `SMALLEST` values, all boxes of a tensor taken together."""
        found = picked(self.wholes, flat, alive, smallest=SMALLEST, axes=2)
        self.titles = found.titles
        return found.picks

    def unmoved(self, picks: Picks, flat: FlatState, reference: Reference | None) -> dict[str, Origin]:
        """As `unmoved.unmoved`, of picks of which no box has moved; they are no picks any more."""
        found = agreed(unmoved(picks.tensors, flat, reference), picks.tensors, self.wholes)
        titles = self.wholes.anywhere(found)
        self.titles = tuple(one for one in self.titles if one not in titles)
        return found

    def counts(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of histograms, of boxes to those of whole tensors; int64, on the CPU."""
        told = self.wholes.told({name: _sparse(x) for name, x in parts.items() if self.wholes.counts(name)})
        out = {}
        for title, found in told.items():
            sums = np.zeros(found[0][0], np.int64)
            for _, places, counts in found:
                sums[places] += counts
            out[title] = torch.from_numpy(sums)
        return out

    def kinds(self, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> dict[str, str]:
        """Kinds of layers, of boxes as of whole tensors; `all_kinds` has those of all."""
        told = self.wholes.told({name: found.get(name) for name in tensors})
        said = {title: next((one for one in ones if one is not None), None) for title, ones in told.items()}
        self.all_kinds = {
            title: said.get(title) or kind_by_name(title, len(self.wholes.shapes[title])) for title in self.titles
        }
        return {name: self.all_kinds[self.title(name)] for name in tensors}

    def sketches(self, parts: Mapping[str, LogHistogram], alpha: float = 0.01) -> dict[str, LogHistogram]:
        """The sketches of whole tensors, all of one `alpha`."""
        sums = self.counts({name: one.counts for name, one in parts.items()})
        return {title: LogHistogram(alpha, counts) for title, counts in sums.items()}

    def deviations(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation."""
        told = self.wholes.told({name: moments_of(x) for name, x in parts.items() if self.wholes.counts(name)})
        return {title: merged_moments(found) for title, found in told.items()}

    def most(self, parts: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The largest of each number that ranks say of boxes."""
        told = self.wholes.told(dict(parts))
        return {title: tuple(map(max, zip(*found, strict=True))) for title, found in told.items()}

    def ends(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The least and the largest value."""
        pairs = {name: [float(end) for end in torch.aminmax(x.detach())] for name, x in parts.items() if x.numel()}
        return {
            title: (-low, high) for title, (low, high) in self.most({n: (-a, b) for n, (a, b) in pairs.items()}).items()
        }

    def all(self, flags: Mapping[str, bool]) -> set[str]:
        """Tensors of which all boxes are flagged."""
        return self.wholes.all(flags)

    def agreed(self, thing: T) -> T | None:
        """What all ranks have; None where they differ."""
        first, *others = self.wholes.gather(thing)
        return first if all(other == first for other in others) else None

    def earlier(self, found: Earlier, tensors: Collection[str]) -> Earlier:
        """Centers of the checkpoint before, where all boxes of a tensor have the same ones."""
        marks = {name: found.centers[name].numpy().tobytes() if name in found.centers else b"" for name in tensors}
        told = self.wholes.told({name: zlib.crc32(mark) if mark else None for name, mark in marks.items()})
        alike = {title for title, ones in told.items() if len({*ones}) == 1 and ones[0] is not None}
        kept = [name for name in found.centers if self.title(name) in alike]
        return Earlier(
            {name: found.centers[name] for name in kept}, {name: found.codes[name] for name in kept},
            {name: found.used[name] for name in kept}, found.generation,
        )  # fmt: skip

    def moments(self, flat: FlatState) -> Iterator[tuple[str, Symbols]]:
        """As `moments.lossy`: levels of whole moments."""
        fit = {
            name: flat.tensors[name]
            for name, info in flat.infos.items()
            if is_moment(info.role, flat.tensors[name]) and self.wholes.mine[name].place.numel >= SMALLEST
        }
        usable = self.all({name: bool(x.isfinite().all()) for name, x in fit.items()})
        sizes = {
            name: fit[name].detach().float().abs() for name in fit if self.title(name) in usable and fit[name].numel()
        }
        counts = self.counts({name: _padded(cells(x)) for name, x in sizes.items()})
        ends = self.ends({name: x[x > 0] for name, x in sizes.items()})
        for name in sizes:
            least, largest = ends.get(self.title(name), (0.0, 0.0))
            whole = ends_of(least, largest, counts[self.title(name)], SHARE) if largest else (0.0, 0.0)
            yield name, logarithmic(fit[name], signed=flat.infos[name].role is Role.MOMENT1, whole=whole)

    def means(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean values, from sums in float64."""
        sums = self.wholes.told({name: _sum(x) for name, x in parts.items() if self.wholes.counts(name)})
        return {
            title: math.fsum(one for one, _ in found) / max(1, sum(count for _, count in found))
            for title, found in sums.items()
        }

    def buckets(self, parts: Mapping[str, Tensor], *, together: bool) -> dict[str, Buckets]:
        """Of differences, by tensor; `together`: the same of all."""
        told = self.wholes.told({name: _small(Buckets.of(x)) for name, x in parts.items() if self.wholes.counts(name)})
        found = {title: _joined(map(_large, ones)) for title, ones in told.items()}
        if together and found:
            every = _joined(found.values())
            return dict.fromkeys(found, every)
        return found

    def ranked(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """The medians of magnitudes, as torch has them, exactly.

        Args:
            parts: float32, finite.
        """
        return _ranked(parts, self.title, self.counts, lambda count: (count - 1) // 2)

    def highest(self, parts: Mapping[str, Tensor], count: int) -> float:
        """The least of the `count` largest magnitudes of all tensors together, exactly."""
        one = torch.cat([torch.empty(0), *(x.float().cpu() for x in parts.values())])
        found = _ranked({"": one}, str, self._summed, lambda total: total - count)
        return found[""]

    def _summed(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `counts`, of what is of no tensor."""
        return {name: torch.stack(self.wholes.gather(counts)).sum(0) for name, counts in parts.items()}


def _ranked(
    parts: Mapping[str, Tensor], title: Callable[[str], str],
    merged: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], rank: Callable[[int], int],
) -> dict[str, float]:  # fmt: skip
    """The magnitude of a rank, from 0: digit by digit, from counts of the values that begin alike.

    Args:
        title: of the whole tensor.
        merged: sums of counts, by title.
        rank: of how many values, which one.
    """
    bits = {name: x.detach().reshape(-1).abs().view(torch.int32) for name, x in parts.items()}
    found, left = dict[str, int](), dict[str, int]()
    for start, width in _DIGITS:
        every = merged({name: _digits(x, found.get(title(name), 0), start, width) for name, x in bits.items()})
        for name, count in every.items():
            upto = count.cumsum(0)
            here = left.setdefault(name, rank(int(upto[-1])))
            digit = int(torch.searchsorted(upto, here, right=True))
            left[name] = here - (int(upto[digit - 1]) if digit else 0)
            found[name] = found.get(name, 0) | digit << start
    return {name: float(torch.tensor(one, dtype=torch.int32).view(torch.float32)) for name, one in found.items()}


def _small(buckets: Buckets) -> tuple[Any, ...]:
    """Only those that hold something."""
    at = buckets.counts.nonzero().reshape(-1)
    every = (buckets.counts, buckets.sums, buckets.least, buckets.largest)
    return (buckets.counts.numel(), at.numpy(), *(one[at].numpy() for one in every))


def _large(small: tuple[Any, ...]) -> Buckets:
    size, at, *parts = small
    wide = [torch.zeros(size, dtype=torch.from_numpy(part).dtype) for part in parts]
    for one, part in zip(wide, parts, strict=True):
        one[torch.from_numpy(at)] = torch.from_numpy(part)
    return Buckets(*wide)


def _joined(buckets: Iterable[Buckets]) -> Buckets:
    first, *others = buckets
    return sum(others, first)


def _padded(counts: Tensor) -> Tensor:
    """To all cells that there are."""
    return torch.nn.functional.pad(counts, (0, (1 << 31 >> SHIFT) - counts.numel()))


def _sparse(counts: Tensor) -> tuple[int, Any, Any]:
    """Small to pickle: how many cells there are, which of them are not empty, and what they count."""
    flat = counts.reshape(-1).cpu().numpy()
    places = np.flatnonzero(flat)
    kind = np.uint16 if flat.size <= 1 << 16 else np.uint32
    wide = np.uint32 if flat.size == 0 or int(flat.max(initial=0)) < 1 << 32 else np.int64
    return flat.size, places.astype(kind), flat[places].astype(wide)


def _sum(x: Tensor) -> tuple[float, int]:
    return float(x.sum(dtype=torch.float64)), x.numel()


def _digits(bits: Tensor, prefix: int, start: int, width: int) -> Tensor:
    """How often each digit follows those that are known."""
    same = bits[bits >> (start + width) == prefix >> (start + width)]
    return torch.bincount((same >> start) & ((1 << width) - 1), minlength=1 << width)
