"""Quantizes tensors to the points of a lattice: to the nearest, with error feedback, or to powers of two."""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import (
    MAX_LATTICE_CODE,
    STEPS_PER_OCTAVE,
    ZERO_CODE,
    Lattice,
    LatticeTensor,
    Slab,
    as_matrix,
    code_bytes,
    exp2_eighths,
    matrix_shape,
    slab_pairs,
    slabs,
)
from shrinkpoint.device import kernels_for, run_kernels
from shrinkpoint.device.reads import Reading, Reads
from shrinkpoint.quantize.statistics import (
    LOG_UNITS_PER_OCTAVE,
    MAGNITUDE_MASK,
    float_bits,
    log2_units,
    relative_squares,
)
from shrinkpoint.tensors.dtypes import as_native_float

_MIN_POOLED_BYTES = 1 << 14  # of codes: fewer are not asked of the system at each save


class ErrorWeights(NamedTuple):
    """Weights of quantization errors and of their squares."""

    # `slopes`, `squares`: matrices of as many values, float32 or bfloat16; None: zero.
    slopes: Tensor | None = None
    squares: Tensor | None = None


class ErrorSums(NamedTuple):
    """Sums over the errors e of quantization, in float64: of slopes times e, of squares times e^2, and of e^2."""

    slope: float
    curvature: float
    squares: float


@Reading
def quantize_to_lattice(
    tensor: Tensor,
    lattice: Lattice,
    *,
    second_moment: LatticeTensor | None = None,
    relative_to: str = "",
    second_dtype: torch.dtype = torch.float32,
    previous_codes: Tensor | None = None,
    hysteresis: float = 0.5,
    threads: int | None = None,
) -> Reads[LatticeTensor | None]:
    """Quantize each value to its nearest point, or keep its previous code within `hysteresis` steps.

    Args:
        tensor: finite floats of 16 or 32 bits, any strides, on any device.
        lattice: of spacing "linear" or "relative".
        second_moment: with spacing "relative", the quantized second moment, of the shape of `tensor`.
        relative_to: the name of that second moment.
        second_dtype: its dtype, to which a reader rounds it.
        previous_codes: int8 or int16, the codes of the previous checkpoint on the same lattice; or None.
        hysteresis: at least 1/2.
        threads: native threads; None: as many as torch uses.

    Returns:
        The quantized tensor, with codes of one byte if all of them fit; None if some value lies beyond all points.
    """
    second = None if second_moment is None else (second_moment, second_dtype)
    if (found := (yield from _quantize_by_kernels(tensor, lattice, second, previous_codes, hysteresis))) is not None:
        return None if found[0] is None else LatticeTensor(found[0], lattice, relative_to)
    if not tensor.is_cpu or second_dtype != torch.float32:
        codes = _quantize_torch(tensor, lattice, second, previous_codes, hysteresis)
        return None if codes is None else LatticeTensor(codes.reshape(tensor.shape), lattice, relative_to)
    for dtype in (torch.int8, torch.int16):
        codes = empty_codes(tensor, dtype)
        width = _native.lattice_quantize(
            lattice.to_native(tuple(tensor.shape)),
            as_native_float(tensor),
            codes,
            seconds=None if second_moment is None else second_moment.to_native(),
            second_codes=None if second_moment is None else second_moment.codes,
            previous=previous_codes,
            hysteresis=hysteresis,
            threads=threads or torch.get_num_threads(),
        )
        if width <= dtype.itemsize:
            return LatticeTensor(codes, lattice, relative_to) if width else None
    return None


def empty_codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A CPU tensor for codes of values; a large one from the pool, since each save asks for as much again."""
    if (size := values.numel() * dtype.itemsize) < _MIN_POOLED_BYTES:
        return torch.empty_like(values, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    return torch.from_numpy(_native.empty(size)).view(dtype).view(values.shape)


@Reading
def quantize_with_errors(
    tensor: Tensor,
    lattice: Lattice,
    weights: ErrorWeights,
    *,
    previous_codes: Tensor | None = None,
    hysteresis: float = 0.5,
    origin: Tensor | None = None,
    gain: float = 1.0,
    threads: int | None = None,
) -> Reads[tuple[LatticeTensor, ErrorSums] | None]:
    """Quantize as `quantize_to_lattice` does, and sum the errors in the same pass over the values.

    Args:
        lattice: of spacing "linear".
        weights: of the errors.
        origin, gain: of the quantized tensor; errors are those of its values, codes are chosen as without a gain.
    """
    errors = weights, origin if gain != 1 else None, gain
    found = yield from _quantize_by_kernels(tensor, lattice, None, previous_codes, hysteresis, errors)
    if found is not None:
        held, errors_of_values = found
        return None if held is None else (LatticeTensor(held, lattice, origin=origin, gain=gain), errors_of_values)
    if not tensor.is_cpu:
        points = quantize_to_lattice(tensor, lattice, previous_codes=previous_codes, hysteresis=hysteresis)
        if points is None:
            return None
        points = replace(points, origin=origin, gain=gain)
        return points, quantization_error_sums(tensor, points, weights)
    form, values = lattice.to_native(tuple(tensor.shape)), as_native_float(tensor)
    if origin is not None and gain != 1:
        form = form.with_gain(code_bytes(origin), gain)
    arrays = {"previous": previous_codes, **weights._asdict()}
    for dtype in (torch.int8, torch.int16):
        codes = empty_codes(tensor, dtype)
        width, sums = _native.lattice_quantize_with_errors(
            form, values, codes, **arrays, hysteresis=hysteresis, threads=threads or torch.get_num_threads()
        )
        if width <= dtype.itemsize:
            points = LatticeTensor(codes, lattice, origin=origin, gain=gain)
            return (points, ErrorSums(*sums)) if width else None
    return None


def _quantize_by_kernels(
    tensor: Tensor,
    lattice: Lattice,
    second: tuple[LatticeTensor, torch.dtype] | None,
    previous_codes: Tensor | None,
    hysteresis: float,
    errors: tuple[ErrorWeights, Tensor | None, float] | None = None,
) -> Reads[tuple[Tensor | None, ErrorSums] | None]:
    """Codes, None if some value lies beyond all points, and sums of errors; None if kernels do not run on the tensor.

    Args:
        second: the second moment, and the dtype that a reader rounds it to.
        errors: their weights, the codes of an origin, and the gain. None: they are not summed.
    """
    if kernels_for(tensor.device) is None or not tensor.numel():
        return None
    seconds = None
    if second is not None:
        points, dtype = second
        if points.lattice.rows.numel() != lattice.rows.numel() or dtype not in (torch.float32, torch.bfloat16):
            return None
        seconds = points.codes, points.lattice, dtype == torch.bfloat16
    previous = None if previous_codes is None or hysteresis <= 0.5 else (previous_codes, hysteresis)
    weighed = None
    if errors is not None:
        weights, origin, gain = errors
        weighed = *weights, origin, float(np.float32(gain) - np.float32(1))
    for dtype in (torch.int8, torch.int16):
        quantize = methodcaller("quantize_points", tensor, lattice, dtype, seconds, previous, weighed)
        made: tuple[Tensor, Tensor] | None = run_kernels(tensor.device, quantize)
        if made is None:
            return None
        codes, parts = made
        table = yield parts
        sums = table.sum(0).tolist()
        if (need := int(table[:, 0].max())) <= dtype.itemsize:
            return codes.view(tensor.shape), ErrorSums(*sums[1:])
        if need > torch.int16.itemsize:
            break
    return None, ErrorSums(0.0, 0.0, 0.0)


def _quantize_torch(
    tensor: Tensor,
    lattice: Lattice,
    second: tuple[LatticeTensor, torch.dtype] | None,
    previous_codes: Tensor | None,
    hysteresis: float,
) -> Tensor | None:
    shape = lattice.matrix_shape(tuple(tensor.shape))
    values, out = tensor.reshape(shape), torch.empty(shape, dtype=torch.int8, device=tensor.device)
    for slab, other in slab_pairs(shape, None if second is None else second[0]):
        squares = None if second is None else second[0].slab_values(other).to(second[1])
        positions = _slab_positions(values, lattice, slab, squares)
        codes = positions.round()
        if previous_codes is not None and hysteresis > 0.5:
            previous = slab.of(previous_codes.reshape(shape)).to(positions.device, torch.float32)
            codes = torch.where((positions - previous).abs() <= hysteresis, previous, codes)
        fits = (positions.abs() < MAX_LATTICE_CODE).all()
        low, high, inside = torch.stack([*torch.aminmax(codes), fits.to(torch.float32)]).cpu().tolist()
        if not inside:
            return None
        if low < -128 or high > 127:
            out = out.to(torch.int16)
        slab.of(out).copy_(codes)
    return out


def quantization_error_sums(
    weight: Tensor, quantized: LatticeTensor, weights: ErrorWeights, threads: int | None = None
) -> ErrorSums:
    """Sum the errors of a quantized weight.

    Args:
        weight: floats of 16 or 32 bits; errors are those of the decoded float32 values.
        quantized: of spacing "linear", on the device of `weight`.
        weights: of the errors.
        threads: native threads; None: as many as torch uses.
    """
    if weight.is_cpu:
        sums = _native.quantization_error_sums(
            quantized.to_native(),
            quantized.codes,
            as_native_float(weight),
            **weights._asdict(),
            threads=threads or torch.get_num_threads(),
        )
        return ErrorSums(*sums)
    shape = quantized.lattice.matrix_shape(tuple(weight.shape))
    totals = torch.zeros(3, dtype=torch.float64, device=weight.device)
    for slab in slabs(shape):
        errors = quantized.slab_values(slab) - slab.of(weight.reshape(shape)).to(torch.float32)
        wide = errors.to(torch.float64)
        totals[2] += wide.square().sum()
        for index, (factors, powers) in enumerate(((weights.slopes, wide), (weights.squares, wide.square()))):
            if factors is not None:
                totals[index] += (slab.of(factors.reshape(shape)).to(wide.device) * powers).sum()
    return ErrorSums(*totals.cpu().tolist())


def movement_sums(
    rows: Tensor,
    points: LatticeTensor,
    earlier: tuple[Tensor, Tensor],
    indices: range,
    max_hysteresis: float,
    levels: int,
) -> list[float]:
    """Sum how far a weight has moved, and how much of that is written as codes move, by the hysteresis that allows it.

    Args:
        rows: some rows of the weight, viewed as a matrix; 2-d, on the CPU.
        points: of the whole weight in the parent checkpoint, of spacing "linear".
        earlier: the same rows at two times where a movement began.
        indices: which rows these are.
        max_hysteresis: in steps, above 1/2.
        levels: the number of equal parts of the range from 1/2 to `max_hysteresis`.

    Returns:
        For each time the squared movement; the movement times that of the points since `first_codes`; and the movement
        times what is written of it with the hysteresis of level 0, 1, ... `levels`.
    """
    form = points.lattice.to_native(tuple(points.codes.shape))
    values, start, originals = (as_native_float(matrix) for matrix in (rows, *earlier))
    arrays = points.codes, points.first_codes, values, start, originals
    runs = _runs(indices, rows.shape[1])
    sums: list[float] = _native.movement_sums(
        form, *arrays, *runs, max_hysteresis=max_hysteresis, levels=levels
    ).tolist()
    return sums


def are_near_first_points(points: LatticeTensor, rows: Tensor, indices: range, max_steps: float) -> bool:
    """True if rows of a weight lie at most `max_steps` steps from the points with which its lattice began.

    Args:
        points: of the whole weight, of spacing "linear".
        rows: some rows of the weight, viewed as a matrix, on the CPU.
        indices: which rows these are.
    """
    first, runs = points.first_codes, _runs(indices, rows.shape[1])
    form = points.lattice.to_native(tuple(first.shape))
    return _native.near_points(form, first, as_native_float(rows), *runs, max_steps=max_steps)


def _runs(rows: range, width: int) -> tuple[int, int, int, int]:
    """Rows of a matrix as runs of positions: the first position, length of a run, distance of two, and their number."""
    return rows.start * width, width, rows.step * width, len(rows)


def lattice_positions(tensor: Tensor, lattice: Lattice) -> Tensor:
    """Return the fractional code of each value: float32, of the matrix's shape; -dither where the scale is 0."""
    values = tensor.reshape(shape := lattice.matrix_shape(tuple(tensor.shape)))
    out = torch.empty(shape, dtype=torch.float32, device=tensor.device)
    for slab in slabs(shape):
        slab.of(out).copy_(_slab_positions(values, lattice, slab))
    return out


def _slab_positions(values: Tensor, lattice: Lattice, slab: Slab, second_moments: Tensor | None = None) -> Tensor:
    """`lattice_positions` of a slab of a matrix, and of the second moments of the slab."""
    part, x = slab.of_lattice(lattice), slab.of(values).to(torch.float32)
    squares = None if second_moments is None else second_moments.to(x.device, torch.float32).reshape(x.shape)
    scales = part.scales(squares, x.device)
    positions = torch.where(scales > 0, x / scales, 0.0)
    return positions - part.dither((x.shape[0], x.shape[1]), x.device, slab.first)


DAMPING = 0.03
"""Damping added to the diagonal of the second moments, in means of it: less fits their noise, more feeds back less."""
_MAX_DAMPING = 1.0


def feedback_factor(second_moments: Tensor) -> Tensor | None:
    """The upper Cholesky factor R of damped second moments whose columns are in reverse order: R' R is these.

    Row i, divided by its diagonal, is what column n - 1 - i gets of the errors of the columns before it. The
    damping grows tenfold, up to the mean of the diagonal, where rounding makes the moments indefinite.

    Args:
        second_moments: [columns, columns], symmetric, in any unit, on any device, where it is factored in float32.

    Returns:
        float32 [columns, columns] on the CPU, arbitrary below the diagonal; None if the moments have no such factor:
        they are zero, not finite, or far from positive definite.
    """
    mean = float(second_moments.diagonal().to(torch.float64).mean()) if second_moments.numel() else 0.0
    if not 0 < mean < float("inf"):
        return None
    reversed_moments, damping = second_moments.to(torch.float32).flip(0, 1), 0.0
    while damping < _MAX_DAMPING:
        added = max(DAMPING, 10 * damping)
        reversed_moments.diagonal().add_((added - damping) * mean)
        damping = added
        lower, info = torch.linalg.cholesky_ex(reversed_moments)
        if int(info) == 0:
            factor = lower.mT.cpu().contiguous()  # no copy: LAPACK has columns in memory
            return factor if bool(factor.sum().isfinite()) else None
    return None


def quantize_with_feedback(
    tensor: Tensor, lattice: Lattice, factor: Tensor, *, threads: int | None = None
) -> LatticeTensor | None:
    """Quantize a tensor, seen as a matrix, to points whose errors cancel in the outputs of its layer.

    Args:
        tensor: finite floats of 16 or 32 bits, any strides, on any device; of at least two columns.
        lattice: of spacing "linear".
        factor: of `feedback_factor`, for as many columns, float32 and contiguous.
        threads: native threads; None: as many as torch uses.

    Returns:
        The quantized tensor, with codes on the CPU; None if some value lies beyond all points.
    """
    rows, columns = matrix_shape(tuple(tensor.shape))
    if factor.shape != (columns, columns):
        raise ValueError(f"factor: {tuple(factor.shape)} for a matrix of {columns} columns")
    codes = torch.from_numpy(_native.empty(2 * tensor.numel())).view(torch.int16)
    values = as_native_float(as_matrix(tensor))
    fits = _native.quantize_with_feedback(
        lattice.to_native((rows, columns)),
        values,
        factor,
        codes,
        threads=threads or torch.get_num_threads(),
    )
    return LatticeTensor(codes.reshape(tensor.shape), lattice).narrow() if fits else None


class PowerZones(NamedTuple):
    """The distance that a second moment may have from the power of two that it becomes, in steps.

    Attributes:
        dead: from the mean of its row and column.
        above, below: from the point nearest to its value in the parent checkpoint, where the moment is larger than that
            point, and where it is smaller.
    """

    dead: float
    above: float = 0.0
    below: float = 0.0


@Reading
def quantize_second_moment(
    v: Tensor,
    m: Tensor | None,
    lattice: Lattice,
    zones: PowerZones,
    parent: LatticeTensor | None = None,
    threads: int | None = None,
) -> Reads[tuple[LatticeTensor, Tensor | None]]:
    """Quantize a finite second moment to powers of two; where it is not present it stays zero.

    Args:
        v: float32 or bfloat16, from zero on.
        m: the first moment, of the same shape: what is not zero there counts as present in `v`. None: unknown.
        lattice: of spacing "log".
        zones: where a moment becomes another point than the nearest one.
        parent: of the parent checkpoint, of the same shape, with codes of one byte; None: nothing is known of it.
        threads: native threads; None: as many as torch uses.

    Returns:
        The quantized tensor, and the sums by row (float64) of `m^2 / v'` where that is finite, v' being the decoded
        second moment; None without `m`.
    """
    if v.numel() and (parent is None or parent.lattice.rows.numel() == lattice.rows.numel()):
        before = None if parent is None else (parent.codes, parent.lattice)
        found = run_kernels(v.device, lambda kernels: kernels.quantize_powers(v, m, lattice, zones, before))
        if found is not None:
            codes, parts = found
            relative_sums = None if m is None else (yield parts).sum(0)
            return LatticeTensor(codes.view(v.shape), lattice), relative_sums
    if not v.is_cpu:
        shape = lattice.matrix_shape(tuple(v.shape))
        matrices = v.reshape(shape), None if m is None else m.reshape(shape)
        points, relative_sums = _quantize_second_moment_torch(*matrices, lattice, zones, parent)
        return replace(points, codes=points.codes.reshape(v.shape)), relative_sums
    codes = empty_codes(v, torch.int8)
    earlier, earlier_codes = (None, None) if parent is None else parent.cpu().native_values()
    sums = _native.quantize_second_moments(
        lattice.to_native(tuple(v.shape)),
        lattice.rows.numel(),
        v,
        codes,
        firsts=m,
        dead_zone=zones.dead,
        earlier=earlier,
        earlier_codes=earlier_codes,
        above=zones.above,
        below=zones.below,
        threads=threads or torch.get_num_threads(),
    )
    return LatticeTensor(codes, lattice), None if m is None else torch.from_numpy(sums)


def _quantize_second_moment_torch(
    v: Tensor, m: Tensor | None, lattice: Lattice, zones: PowerZones, parent: LatticeTensor | None
) -> tuple[LatticeTensor, Tensor | None]:
    out = torch.empty(v.shape, dtype=torch.int8, device=v.device)
    sums = torch.zeros(v.shape[0], dtype=torch.float64, device=v.device)
    for slab, other in slab_pairs((v.shape[0], v.shape[1]), parent):
        part, first = slab.of_lattice(lattice), None if m is None else slab.of(m)
        before = None
        if parent is not None:
            shape = parent.lattice.matrix_shape(tuple(parent.codes.shape))
            before = other.of(parent.codes.reshape(shape)).to(v.device, torch.int32), other.of_lattice(parent.lattice)
        codes, decoded = _slab_powers(slab.of(v), first, part, zones, before)
        slab.of(out).copy_(codes)
        if first is not None:
            sums[slab.rows].add_(relative_squares(first, decoded).sum(1, dtype=torch.float64))
    return LatticeTensor(out, lattice), None if m is None else sums.cpu()


def _slab_powers(
    v: Tensor, m: Tensor | None, lattice: Lattice, zones: PowerZones, parent: tuple[Tensor, Lattice] | None
) -> tuple[Tensor, Tensor]:
    """The codes of a slab of second moments, and their values; the parent has codes, int32, and a lattice."""
    bits = float_bits(v)
    present = (bits > 0) | (float_bits(v if m is None else m) & MAGNITUDE_MASK != 0)
    exponents = lattice.exponents(v.device)
    distances = log2_units(bits) * STEPS_PER_OCTAVE - exponents * LOG_UNITS_PER_OCTAVE
    # Times float32 reciprocals, as the native core does, so that the same values are rounded up.
    one = torch.tensor(1.0, dtype=torch.float32, device="cpu")
    scale, per_step = float(one / (lattice.step * LOG_UNITS_PER_OCTAVE)), float(one / lattice.step)
    positions = distances.to(torch.float32) * scale
    codes = positions.clamp(-200, 200).round().masked_fill(positions.abs() < zones.dead, 0)
    if parent is not None:
        before, earlier = parent
        moved = (earlier.exponents(v.device) + earlier.step * before).reshape(v.shape) - exponents
        nearest = (moved.to(torch.float32) * per_step).round()
        beyond = positions - nearest
        stays = (before.reshape(v.shape) != ZERO_CODE) & (beyond < zones.above) & (beyond > -zones.below)
        codes = torch.where(stays, nearest, codes)
    codes = codes.clamp(ZERO_CODE + 1, -ZERO_CODE).to(torch.int32)
    decoded = exp2_eighths(exponents + lattice.step * codes).masked_fill(~present, 0)
    return codes.masked_fill(~present, ZERO_CODE).to(torch.int8), decoded
