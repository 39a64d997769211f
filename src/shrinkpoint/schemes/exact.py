"""Which tensors of a state a lossy scheme left as they are, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from shrinkpoint.record import JSON, Role, TensorInfo
from shrinkpoint.schemes.picks import DTYPES
from shrinkpoint.state import FlatState

_ROLES = {Role.BUFFER: "a buffer", Role.GRADIENT: "a gradient", Role.OTHER: "not known to be a weight"}
_MOMENTS = (Role.MOMENT1, Role.MOMENT2)
_OPTIMIZER = "of the optimizer"
_NAMES = 4
"""Names that are said of each reason, the largest first."""


def reasons(
    flat: FlatState, lossy: Collection[str], refused: Collection[str], smallest: int, axes: int
) -> dict[str, str]:
    """Why each tensor of floats that is not lossy stays exact, by name.

    Args:
        lossy: names of those that are.
        refused: names of weights that are not finite.
        smallest, axes: how many values and axes a weight has at least that the scheme quantizes.
    """
    homes = {name.rpartition("/")[0] for name, info in flat.infos.items() if info.role in _MOMENTS}
    out: dict[str, str] = {}
    for name, info in flat.infos.items():
        x = flat.tensors[name]
        if name in lossy or not (x.is_floating_point() or x.is_complex()):
            continue
        if info.role in _MOMENTS or name.rpartition("/")[0] in homes:
            out[name] = _OPTIMIZER
        else:
            out[name] = "not finite" if name in refused else _reason(info, x, smallest, axes)
    return out


def grouped(exact: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> dict[str, JSON]:
    """The same for a manifest: of each reason how many tensors and bytes, and the names of the largest."""
    out: dict[str, JSON] = {}
    for reason in dict.fromkeys(exact.values()):
        names = sorted((name for name, why in exact.items() if why == reason), key=lambda name: -infos[name].nbytes)
        nbytes = sum(infos[name].nbytes for name in names)
        out[reason] = {"tensors": len(names), "bytes": nbytes, "largest": names[:_NAMES]}
    return out


def _reason(info: TensorInfo, x: Tensor, smallest: int, axes: int) -> str:
    if info.role in _ROLES:
        return _ROLES[info.role]
    if x.dtype not in DTYPES:
        return f"of dtype {info.dtype}"
    if x.numel() < smallest or x.dim() < axes:
        return "too small"
    return "left by the scheme"
