"""The space of settings that is searched: a grid whose axes are ordered by quality, for each of several variants.

It is the configuration cube of arXiv 2306.11800 sec. 3.4: bins, pruning and protection are axes; the pruning metric is
a variant, because neither metric is better everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shrinkpoint.errors import PolicyError

METRIC = "metric"  # The setting that names a point's variant


@dataclass(frozen=True)
class Axis:
    """The values of one setting, ordered by quality.

    Raises:
        PolicyError: no values, a duplicate value, or the reserved name "metric".
    """

    name: str  # of the setting
    # From the most aggressive to the safest: with everything else equal, quality never falls with the index.
    values: tuple[float | int, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            where, expected = f"Axis({self.name!r})", "different values, at least one"
            raise PolicyError(where, found=repr(self.values), expected=expected, do="pass such values")
        if self.name == METRIC:
            raise PolicyError("Axis", found=repr(self.name), expected="another name", do="pass metrics as variants")

    def nearest_safe_index(self, value: object) -> int | None:
        """The index of `value`, or of the nearest safer one; None if there is neither."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if value in self.values:
            return self.values.index(value)
        steps = [b > a for a, b in itertools.pairwise(self.values)]
        if not steps or any(steps) != all(steps):
            return None  # which of two numbers is safer is known only if the values are monotone
        safer = (i for i, other in enumerate(self.values) if (other > value if steps[0] else other < value))
        return next(safer, None)


@dataclass(frozen=True, order=True)
class Point:
    """One choice on every axis, for one variant."""

    variant: str  # one of the space's variants
    index: tuple[int, ...]  # the index of a value for each of the space's axes, in their order


@dataclass(frozen=True)
class Space:
    """A grid of points for each variant.

    Raises:
        PolicyError: a duplicate axis or variant, or no variant.
    """

    axes: tuple[Axis, ...]  # the settings that are ordered by quality
    # The values of a setting without such an order, as the pruning metric; ("",) if there is none.
    variants: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        for argument, names in (("axes", [axis.name for axis in self.axes]), ("variants", list(self.variants))):
            if len(set(names)) < len(names) or (argument == "variants" and not names):
                where, expected = f"Space({argument}=)", "different names"
                raise PolicyError(where, found=repr(names), expected=expected, do="pass each once")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis.values) for axis in self.axes)

    def points(self, variant: str) -> tuple[Point, ...]:
        """Every point of a variant, the most aggressive first and the safest last."""
        return tuple(Point(variant, index) for index in itertools.product(*map(range, self.shape)))

    def __contains__(self, point: Point) -> bool:
        inside = point.variant in self.variants and len(point.index) == len(self.axes)
        return inside and all(0 <= i < side for i, side in zip(point.index, self.shape, strict=True))

    def safest(self, variant: str) -> Point:
        return Point(variant, tuple(side - 1 for side in self.shape))

    def resolve_variants(self, variants: Sequence[str] | None) -> tuple[str, ...]:
        """The same variants without duplicates; None: all variants of this space.

        Raises:
            PolicyError: an unknown variant, or none at all.
        """
        if variants is None:
            return self.variants
        if not variants or not set(variants) <= set(self.variants):
            expected = "one of " + ", ".join(map(repr, self.variants))
            found, do = repr(tuple(variants)), "pass at least one of them"
            raise PolicyError("variants", found=found, expected=expected, do=do)
        return tuple(dict.fromkeys(variants))

    def settings(self, point: Point) -> dict[str, float | int | str]:
        """The settings of a point by name; its variant is "metric", unless the space has only the variant ""."""
        metric = {} if self.variants == ("",) else {METRIC: point.variant}
        return {axis.name: axis.values[i] for axis, i in zip(self.axes, point.index, strict=True)} | metric

    def point(self, settings: Mapping[str, object]) -> Point | None:
        """The point with these settings, which may come from a file and from another space.

        A value that an axis no longer has becomes the nearest safer one. Settings without an axis are ignored.

        Returns:
            None if an axis has neither the value nor a safer one, or if a setting or the variant is missing.
        """
        variant = settings.get(METRIC, "")
        index = [axis.nearest_safe_index(settings.get(axis.name, math.nan)) for axis in self.axes]
        if not isinstance(variant, str) or variant not in self.variants or None in index:
            return None
        return Point(variant, tuple(i for i in index if i is not None))

    def point_from_config(self, config: Mapping[str, Any]) -> Point:
        """The point with these settings, all of them values of this space; without a metric, its first variant.

        Raises:
            PolicyError: there is none.
        """
        point = self.point({METRIC: self.variants[0], **config}) if isinstance(config, Mapping) else None
        settings = {} if point is None else self.settings(point)
        if point is None or any(settings.get(name) != value for name, value in config.items()):
            expected = "a value for each of " + ", ".join(f"{axis.name} {axis.values}" for axis in self.axes)
            if self.variants != ("",):
                expected += f"; and a metric of {self.variants}, the first where none is named"
            raise PolicyError("config", found=repr(config), expected=expected, do="pass such values")
        return point


def is_dominated(a: Point, b: Point) -> bool:
    """True if `a` is another point of the same variant that is at least as aggressive as `b` on every axis."""
    return a != b and a.variant == b.variant and all(i <= j for i, j in zip(a.index, b.index, strict=True))
