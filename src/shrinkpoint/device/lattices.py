"""Kernels for points of lattices, of weights and moments, and for the sums that decide their steps.

A program has a tile of a matrix. It stores its part of a sum where no other program does, so that sums do not depend on
which one is done first. Codes have the bits of native code; sums of float64 are added up in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import as_float, as_word, dither, load_values, nearest_brief
from shrinkpoint.device.rows import launch, signed

if TYPE_CHECKING:
    from shrinkpoint.codec.lattice import Lattice

MAX_CODE = tl.constexpr((1 << 15) - 2)
"""The largest code: `codec.lattice.MAX_LATTICE_CODE`."""
ZERO_CODE = tl.constexpr(-127)
"""The code of a second moment that is zero."""
_TILE, _WIDTH = 4096, 1024  # the most values and columns of a tile
_SUMMED_ROWS = 256  # of a program that sums, about
_SMALLEST_BITS = tl.constexpr((127 - 120) << 23)
_INFINITY_BITS, _MAGNITUDE_MASK = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
_LOG_BITS = tl.constexpr(12)


@triton.jit
def tile_places(rows, columns, segments, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows [ROWS, 1] and columns [1, WIDTH] of a program's tile, and which of its values are in the matrix."""
    block, segment = tl.program_id(0).to(tl.int64) // segments, tl.program_id(0).to(tl.int64) % segments
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = segment * WIDTH + tl.arange(0, WIDTH)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def rounded(values):
    """Round float32 below 2^22 to int32, halves to even."""
    return as_word(values + _ROUNDER) - _ROUNDER_BITS


@triton.jit
def divide(values, divisors):
    """values / divisors, rounded once, but for quotients that are denormal; see `inverse_of`."""
    is_small = ((tl.abs(values) < 2.0**-126) & (values != 0)) | (tl.abs(divisors) < 2.0**-126)
    if tl.max(tl.max(is_small.to(tl.int32), axis=1), axis=0) > 0:
        quotient = (values.to(tl.float64) / divisors.to(tl.float64)).to(tl.float32)
    else:
        quotient = tl.div_rn(values, divisors)
    return quotient


@triton.jit
def power_words(exponents):
    """The bits of 2^(exponent / 8) as float32, as codec/lattice.py has them."""
    octave = tl.minimum(tl.maximum(exponents >> 3, -126), 127)
    low, middle, high = (exponents & 1) != 0, (exponents & 2) != 0, (exponents & 4) != 0
    first = tl.where(middle, tl.where(low, 0x3FA5FED7, 0x3F9837F0), tl.where(low, 0x3F8B95C2, 0x3F800000))
    second = tl.where(middle, tl.where(low, 0x3FEAC0C7, 0x3FD744FD), tl.where(low, 0x3FC5672A, 0x3FB504F3))
    return tl.where(high, second, first) + (octave << 23)


@triton.jit
def load_exponents(sides, row, column, rows, columns, by_column):
    """The exponents of a lattice's rows [ROWS, 1] and columns [1, WIDTH], which lie one after the other."""
    of_rows = tl.load(sides + row, mask=row < rows, other=0).to(tl.int32)
    return of_rows, tl.load(sides + rows + column * by_column, mask=column < columns, other=0).to(tl.int32)


@triton.jit
def load_steps(sides, row, column, rows, columns, by_column):
    """The steps of a lattice's rows and columns: float32 [ROWS, WIDTH]."""
    of_rows, of_columns = load_exponents(sides, row, column, rows, columns, by_column)
    return as_float(power_words(of_rows)) * as_float(power_words(of_columns))


@triton.jit
def multiples_of(code, shift, origin, excess, places, mask):
    """The numbers of steps that codes stand for, with a gain if there is an origin."""
    multiple = code.to(tl.float32) + shift
    if origin is not None:
        moved = code.to(tl.float32) - tl.load(origin + places, mask=mask, other=0).to(tl.float32)
        multiple = multiple + moved * excess
    return multiple


@triton.jit
def log2_units(bits):
    """log2 of positive floats, given their bits, in 1/4096 of an octave, as quantize/statistics.py has it."""
    bits = tl.maximum(bits, _SMALLEST_BITS)
    f = (bits >> 8) & 0x7FFF
    slope = ((((f * 2691) >> 15) - 7833) * f >> 15) + 14376
    log = ((bits >> 23) - 127) * 0x8000 + f + (((f * (0x8000 - f)) >> 15) * slope >> 15)
    return (log + 4) >> 3


@triton.jit
def sum_of(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def store_error_sums(parts, errors, places, mask, slopes, squares):
    """Store the sums of slopes times errors, of squares times their squares, and of these."""
    errors = errors.to(tl.float64)
    part = parts + tl.program_id(0).to(tl.int64) * 4
    if slopes is not None:
        tl.store(part + 1, sum_of(load_values(slopes, places, mask, None).to(tl.float64) * errors))
    else:
        tl.store(part + 1, 0.0)
    if squares is not None:
        tl.store(part + 2, sum_of(load_values(squares, places, mask, None).to(tl.float64) * (errors * errors)))
    else:
        tl.store(part + 2, 0.0)
    tl.store(part + 3, sum_of(errors * errors))


@triton.jit(do_not_specialize=["seed", "rows", "segments", "by_column", "second_step", "second_by_column"])
def _quantize_points(
    x,
    sides,
    seconds,
    second_sides,
    second_step,
    second_by_column,
    previous,
    hysteresis,
    origin,
    excess,
    slopes,
    squares,
    codes,
    parts,
    seed,
    rows,
    columns,
    segments,
    by_column,
    DITHER: tl.constexpr,
    BRIEF: tl.constexpr,
    ERRORS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the codes of a tile of values, what they need, and the sums of their errors. Program (tile, 0).

    With `seconds`, steps are relative to the roots of second moments, which are rounded to bfloat16 if BRIEF.
    """
    row, column, mask = tile_places(rows, columns, segments, ROWS, WIDTH)
    places = row * columns + column
    scale = load_steps(sides, row, column, rows, columns, by_column)
    if seconds is not None:
        of_rows, of_columns = load_exponents(second_sides, row, column, rows, columns, second_by_column)
        second = tl.load(seconds + places, mask=mask, other=ZERO_CODE).to(tl.int32)
        square = as_float(tl.where(second == ZERO_CODE, 0, power_words(of_rows + of_columns + second_step * second)))
        scale = scale * tl.sqrt_rn(nearest_brief(square) if BRIEF else square)
    else:
        scale = scale + tl.zeros(mask.shape, tl.float32)
    shift = dither(places, seed) if DITHER else tl.zeros(mask.shape, tl.float32)
    values, has_step = load_values(x, places, mask, None), scale > 0
    position = tl.where(has_step, divide(values, tl.where(has_step, scale, 1.0)), 0.0) - shift
    fits = tl.abs(position) < MAX_CODE
    code = rounded(tl.where(fits, position, 0.0))
    if previous is not None:
        before = tl.load(previous + places, mask=mask, other=0).to(tl.int32)
        code = tl.where(tl.abs(position - before.to(tl.float32)) <= hysteresis, before, code)
    need = tl.where(fits, tl.where((code >= -128) & (code <= 127), 1, 2), 3)
    tl.store(parts + tl.program_id(0).to(tl.int64) * 4, tl.max(tl.max(tl.where(mask, need, 1), axis=1), axis=0))
    tl.store(codes + places, code.to(codes.dtype.element_ty), mask=mask)
    if ERRORS:
        errors = multiples_of(code, shift, origin, excess, places, mask) * scale - values
        store_error_sums(parts, tl.where(mask, errors, 0.0), places, mask, slopes, squares)


@triton.jit(do_not_specialize=["seed", "rows", "segments", "by_column"])
def _decode_points(
    codes,
    sides,
    origin,
    excess,
    out,
    seed,
    rows,
    columns,
    segments,
    by_column,
    DITHER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the values of a tile of codes, rounded to the dtype of `out` as torch rounds. Program (tile, 0)."""
    row, column, mask = tile_places(rows, columns, segments, ROWS, WIDTH)
    places = row * columns + column
    shift = dither(places, seed) if DITHER else tl.zeros(mask.shape, tl.float32)
    code = tl.load(codes + places, mask=mask, other=0)
    multiple = multiples_of(code, shift, origin, excess, places, mask)
    values = multiple * load_steps(sides, row, column, rows, columns, by_column)
    if out.dtype.element_ty == tl.bfloat16:  # by bits: the interpreter drops denormals else
        values = (as_word(nearest_brief(values)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "segments", "by_column", "step", "earlier_step", "earlier_by_column"])
def _quantize_powers(
    v,
    m,
    sides,
    earlier,
    earlier_sides,
    earlier_step,
    earlier_by_column,
    codes,
    parts,
    step,
    scale,
    per_step,
    dead,
    above,
    below,
    rows,
    columns,
    segments,
    by_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the codes of a tile of second moments, and sums by row of `m^2 / v'`. Program (tile, 0)."""
    row, column, mask = tile_places(rows, columns, segments, ROWS, WIDTH)
    places = row * columns + column
    of_rows, of_columns = load_exponents(sides, row, column, rows, columns, by_column)
    exponents, bits = of_rows + of_columns, as_word(load_values(v, places, mask, None))
    present = bits > 0
    if m is not None:
        first = load_values(m, places, mask, None)
        present |= (as_word(first) & _MAGNITUDE_MASK) != 0
    position = (log2_units(bits) * 8 - (exponents << _LOG_BITS)).to(tl.float32) * scale
    code = rounded(tl.minimum(tl.maximum(position, -200.0), 200.0))
    code = tl.where(tl.abs(position) < dead, 0, code)
    if earlier is not None:
        of_rows, of_columns = load_exponents(earlier_sides, row, column, rows, columns, earlier_by_column)
        before = tl.load(earlier + places, mask=mask, other=ZERO_CODE).to(tl.int32)
        nearest = rounded((of_rows + of_columns + earlier_step * before - exponents).to(tl.float32) * per_step)
        beyond = position - nearest.to(tl.float32)
        code = tl.where((before != ZERO_CODE) & (beyond < above) & (beyond > -below), nearest, code)
    code = tl.where(present, tl.minimum(tl.maximum(code, ZERO_CODE + 1), -ZERO_CODE), ZERO_CODE)
    tl.store(codes + places, code.to(tl.int8), mask=mask)
    if m is not None:
        powers = as_float(power_words(exponents + step * code))
        held = mask & (code != ZERO_CODE)
        relative = tl.where(held, divide(first * first, tl.where(held, powers, 1.0)), 0.0)
        relative = tl.where(relative < float("inf"), relative, 0.0).to(tl.float64)
        segment = tl.program_id(0).to(tl.int64) % segments
        tl.store(parts + segment * rows + row, tl.sum(relative, axis=1)[:, None], mask=row < rows)


@triton.jit(do_not_specialize=["rows", "segments", "blocks"])
def _sum_moments(
    v,
    m,
    parts,
    flags,
    rows,
    columns,
    segments,
    blocks,
    SQUARED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Store parts of the sums of logarithms, counts and values of second moments: of rows, then of columns.

    Columns have none without BY_COLUMN. With SQUARED, second moments are the squares of the values.

    Program (column segments of row blocks, 0). A flag has bit 0 if a value is not finite, bit 1 if one is below zero.
    """
    program = tl.program_id(0).to(tl.int64)
    block, segment = program // segments, program % segments
    column = segment * WIDTH + tl.arange(0, WIDTH)[None, :]
    by_row, by_column = tl.cast(segments, tl.int64) * rows, tl.cast(blocks, tl.int64) * columns
    logs, counts = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    sums, flag = tl.zeros([WIDTH], tl.float64), tl.zeros([WIDTH], tl.int32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        places, mask = row * columns + column, (row < rows) & (column < columns)
        values = load_values(v, places, mask, None)
        if SQUARED:
            values = values * values
        bits = as_word(values)
        first = bits if m is None else as_word(load_values(m, places, mask, None))
        sizes, first = bits & _MAGNITUDE_MASK, first & _MAGNITUDE_MASK
        present = ((bits > 0) | (first != 0)).to(tl.int32)
        log, exact = log2_units(bits) * present, values.to(tl.float64)
        infinite = ((sizes >= _INFINITY_BITS) | (first >= _INFINITY_BITS)).to(tl.int32)
        flag |= tl.max(infinite, axis=0) | (tl.max(((bits < 0) & (sizes != 0)).to(tl.int32), axis=0) << 1)
        here, inside = parts + segment * rows + row, row < rows
        tl.store(here, tl.sum(log, axis=1)[:, None].to(tl.float64), mask=inside)
        tl.store(here + by_row, tl.sum(present, axis=1)[:, None].to(tl.float64), mask=inside)
        tl.store(here + 2 * by_row, tl.sum(exact, axis=1)[:, None], mask=inside)
        logs += tl.sum(log, axis=0)
        counts += tl.sum(present, axis=0)
        sums += tl.sum(exact, axis=0)
    if BY_COLUMN:
        column = segment * WIDTH + tl.arange(0, WIDTH)
        there, inside = parts + 3 * by_row + block * columns + column, column < columns
        tl.store(there, logs.to(tl.float64), mask=inside)
        tl.store(there + by_column, counts.to(tl.float64), mask=inside)
        tl.store(there + 2 * by_column, sums, mask=inside)
    infinite, negative = tl.max(flag & 1, axis=0), tl.max(flag & 2, axis=0)
    tl.store(flags + program, (infinite | negative).to(tl.float64))


@triton.jit(do_not_specialize=["rows", "columns", "segments", "blocks"])
def _merge_sums(parts, out, rows, columns, segments, blocks, BLOCK: tl.constexpr):
    """Add up parts of sums, in their order: three of rows, then three of columns. Program (block, which sum)."""
    which = tl.program_id(1)
    kind, is_column = which % 3, which >= 3
    length, count = tl.where(is_column, columns, rows).to(tl.int64), tl.where(is_column, blocks, segments)
    first = tl.where(is_column, 3 * tl.cast(segments, tl.int64) * rows, 0) + kind * (count * length)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for part in range(count):
        total += tl.load(parts + first + part * length + place, mask=place < length, other=0.0)
    tl.store(out + tl.where(is_column, 3 * rows, 0) + kind * length + place, total, mask=place < length)


@triton.jit(do_not_specialize=["numel"])
def _sum_values(x, parts, numel, BLOCK: tl.constexpr):
    """Store the largest bits of magnitudes, and sums of distances from the first value and of their squares."""
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    values, origin = load_values(x, place, place < numel, None), load_values(x, place * 0, place >= 0, None)
    distance = tl.where(place < numel, values.to(tl.float64) - origin.to(tl.float64), 0.0)
    tl.store(parts + program * 4, tl.max(as_word(values) & _MAGNITUDE_MASK, axis=0).to(tl.float64))
    tl.store(parts + program * 4 + 1, tl.sum(distance, axis=0))
    tl.store(parts + program * 4 + 2, tl.sum(distance * distance, axis=0))
    tl.store(parts + program * 4 + 3, tl.sum(tl.where(tl.arange(0, BLOCK) == 0, origin, 0.0), axis=0).to(tl.float64))


def _tiling(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and how many tiles lie side by side."""
    width = min(triton.next_power_of_2(columns), _WIDTH)
    return min(triton.next_power_of_2(rows), _TILE // width), width, -(-columns // width)


def _sides(lattice: Lattice, device: torch.device) -> tuple[Tensor, int]:
    """The exponents of rows, then of columns, on the device; and 1 if columns have exponents of their own."""
    sides = torch.cat([lattice.rows, lattice.columns])
    sides = sides.pin_memory() if device.type == "cuda" else sides
    return sides.to(device, non_blocking=True), int(lattice.columns.numel() > 1)


def _flat(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.detach().reshape(-1).to(device)


def quantize_points(
    values: Tensor,
    lattice: Lattice,
    dtype: torch.dtype,
    second: tuple[Tensor, Lattice, bool] | None = None,
    previous: tuple[Tensor, float] | None = None,
    errors: tuple[Tensor | None, Tensor | None, Tensor | None, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize values to the nearest points of a lattice of spacing "linear" or "relative".

    Args:
        values: floats of any shape, at least one.
        dtype: of the codes.
        second: codes and lattice of second moments, and whether these are bfloat16; the lattices have as many rows.
        previous: codes that stay within a distance in steps.
        errors: slopes and squares that weigh errors, the codes of an origin, and the gain less 1; None: errors are not
            summed.

    Returns:
        The codes, 1-d; and float64 of shape (programs, 4): the bytes that codes need, 3 if they do not reach;
        and the sums of `quantize.lattice.ErrorSums`.
    """
    device, (rows, columns) = values.device, lattice.matrix_shape(tuple(values.shape))
    tall, wide, segments = _tiling(rows, columns)
    programs = -(-rows // tall) * segments
    codes = torch.empty(values.numel(), dtype=dtype, device=device)
    parts = torch.empty(programs, 4, dtype=torch.float64, device=device)
    sides, by_column = _sides(lattice, device)
    seconds: tuple[Any, ...] = (None, None, 0, 0)
    if second is not None:
        seconds = _flat(second[0], device), *_sides(second[1], device)
        seconds = *seconds[:2], second[1].step, seconds[2]
    before, hysteresis = (None, 0.5) if previous is None else previous
    slopes, squares, origin, excess = errors or (None, None, None, 0.0)
    others = _flat(before, device), hysteresis, _flat(origin, device), excess
    weights = _flat(slopes, device), _flat(squares, device)
    sizes = signed(lattice.seed), rows, columns, segments, by_column
    arguments = _flat(values, device), sides, *seconds, *others, *weights, codes, parts, *sizes
    options = {"DITHER": bool(lattice.seed), "BRIEF": second is not None and second[2], "ERRORS": errors is not None}
    launch(_quantize_points, (programs, 1), device, *arguments, **options, ROWS=tall, WIDTH=wide)
    return codes, parts


def decode_points(codes: Tensor, lattice: Lattice, dtype: torch.dtype, origin: Tensor | None, excess: float) -> Tensor:
    """Decode codes, at least one, on a lattice of spacing "linear": values of their shape.

    Args:
        dtype: float32, or of 16 bits.
        origin, excess: codes of an origin, and the gain less 1.
    """
    device, (rows, columns) = codes.device, lattice.matrix_shape(tuple(codes.shape))
    tall, wide, segments = _tiling(rows, columns)
    out = torch.empty(codes.shape, dtype=dtype, device=device)
    sides, by_column = _sides(lattice, device)
    arguments = _flat(codes, device), sides, _flat(origin, device), excess, out, signed(lattice.seed)
    options = {"DITHER": bool(lattice.seed), "ROWS": tall, "WIDTH": wide}
    grid = -(-rows // tall) * segments, 1
    launch(_decode_points, grid, device, *arguments, rows, columns, segments, by_column, **options)
    return out


def quantize_powers(
    v: Tensor, m: Tensor | None, lattice: Lattice, zones: Sequence[float], parent: tuple[Tensor, Lattice] | None
) -> tuple[Tensor, Tensor]:
    """Quantize second moments to powers of two.

    Args:
        v: of any shape, at least one value.
        m: first moments, of the same shape.
        lattice: of spacing "log".
        zones: as of `quantize.lattice.PowerZones`.
        parent: codes of one byte, and their lattice, of as many rows.

    Returns:
        The codes, 1-d int8; and float64 of shape (segments, rows): parts of the sums by row of `m^2 / v'`.
    """
    device, (rows, columns) = v.device, lattice.matrix_shape(tuple(v.shape))
    tall, wide, segments = _tiling(rows, columns)
    codes = torch.empty(v.numel(), dtype=torch.int8, device=device)
    parts = torch.empty(0 if m is None else segments, rows, dtype=torch.float64, device=device)
    sides, by_column = _sides(lattice, device)
    earlier: tuple[Any, ...] = (None, None, 0, 0)
    if parent is not None:
        earlier_sides, earlier_by_column = _sides(parent[1], device)
        earlier = _flat(parent[0], device), earlier_sides, parent[1].step, earlier_by_column
    one = torch.ones((), dtype=torch.float32, device="cpu")  # reciprocals are rounded to float32
    factors = float(one / (lattice.step << _LOG_BITS.value)), float(one / lattice.step)
    arguments = _flat(v, device), _flat(m, device), sides, *earlier, codes, parts, lattice.step, *factors, *zones
    grid = -(-rows // tall) * segments, 1
    launch(_quantize_powers, grid, device, *arguments, rows, columns, segments, by_column, ROWS=tall, WIDTH=wide)
    return codes, parts


def sum_moments(v: Tensor, m: Tensor | None, shape: tuple[int, int], squared: bool, by_column: bool) -> Tensor:
    """Sum second moments by row and by column of a matrix of this shape, which has values.

    Args:
        squared: the second moments are the squares of `v`.
        by_column: False for one row alone.

    Returns:
        float64: sums of logarithms, counts and values by row; the same by column; then flags: bit 0 is set in one if
        some value is not finite, bit 1 if some second moment is below zero. Without columns, shape (4, segments): parts
        of these three sums, and flags.
    """
    device, (rows, columns) = v.device, shape
    tall, wide, segments = _tiling(rows, columns)
    steps = max(1, min(_SUMMED_ROWS, triton.next_power_of_2(rows)) // tall)
    blocks = -(-rows // (tall * steps))
    size = 3 * (rows + columns) if by_column else 3 * segments
    out = torch.empty(size + segments * blocks, dtype=torch.float64, device=device)
    part_count = 3 * (segments * rows + blocks * columns)
    parts = torch.empty(part_count, dtype=torch.float64, device=device) if by_column else out
    arguments = _flat(v, device), _flat(m, device), parts, out[size:], rows, columns, segments, blocks
    options = {"SQUARED": squared, "BY_COLUMN": by_column, "ROWS": tall, "WIDTH": wide, "STEPS": steps}
    launch(_sum_moments, (segments * blocks, 1), device, *arguments, **options)
    if not by_column:
        return out.view(4, segments)
    block = min(256, triton.next_power_of_2(max(rows, columns)))
    grid = -(-max(rows, columns) // block), 6
    launch(_merge_sums, grid, device, parts, out, rows, columns, segments, blocks, BLOCK=block)
    return out


def sum_values(values: Tensor) -> Tensor:
    """Sum distances from the first value, of at least one, and their squares.

    Returns:
        float64, shape (programs, 4): the bits of the largest magnitude, both sums, and the first value.
    """
    programs = -(-values.numel() // _TILE)
    parts = torch.empty(programs, 4, dtype=torch.float64, device=values.device)
    arguments = _flat(values, values.device), parts, values.numel()
    launch(_sum_values, (programs, 1), values.device, *arguments, BLOCK=_TILE)
    return parts
