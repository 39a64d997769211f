"""Quantizes the differences of a fine-tune's weights to its base, for a file alone whose base is exact."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import Reference, RowSample
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.encode.records import encode_records
from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights
from shrinkpoint.schemes.fisher.feedback import FeedbackFactors
from shrinkpoint.schemes.fisher.steps import (
    MIN_RELATIVE_CURVATURE,
    SENSITIVE_STEP,
    QuantizedWeights,
    from_log_step,
    reference_curvature,
)

DEAD_ZONE = 0.5
"""Half the width of what becomes 0, in steps of its row, in the geometric mean over a weight."""
_STEP_EXPONENT = 1 / 2  # the power of the curvature by which steps fall between tensors
_ROW_EXPONENT = 1 / 4  # and between rows
_ZONE_EXPONENT = 1 / 4  # and by which dead zones do between columns
_MAX_OCTAVES = 4  # between the steps of two rows
_MAX_CODE = (MAX_CODES - RESERVED_CODES) // 2
_BLOCK = 128  # columns whose errors are fed back at once to those behind them


def exact_bases(weights: Mapping[str, Tensor], reference: Reference) -> dict[str, Tensor]:
    """The base's values of weights that have such, of their shape and dtype and not on a lattice, by name.

    Returns:
        Nothing if these are less than half of all values: the base is one of a chain then, whose points serve better.
    """
    bases = dict[str, Tensor]()
    for name, weight in weights.items():
        base = reference.get_like(name, tuple(weight.shape), weight.dtype)
        if base is not None and not isinstance(reference.quantized.get(name), LatticeTensor):
            bases[name] = base.to(weight.device)
    total = sum(weight.numel() for weight in weights.values())
    return bases if 2 * sum(base.numel() for base in bases.values()) > total else {}


def encoded_bytes(quantized: QuantizedState, reference: Reference) -> int:
    """Bytes of a quantized state's records in a delta to `reference`."""
    records = encode_records(quantized.state, reference, quantized=quantized.quantized, copies=quantized.copies)
    return sum(len(part) for record in records for part in record.parts.values())


class DifferenceCandidates:
    """Differences to a base, to be quantized with any step size: as `StepCandidates`, for one process.

    Multiples of a weight's step are added to the base: of one, two, four, ... steps in rows to which the loss is less
    sensitive. What is less than a dead zone becomes 0, which leaves the base's value.

    Args:
        weights: finite; of whole tensors.
        bases: the base's values of some of the weights, by name; others stay exact.
        curvatures: of each weight, by name.
        factors: for rounding with error feedback; None: errors are not fed back.

    Attributes:
        weights: that have a base, by name.
        curvatures, without_feedback: as of `StepCandidates`.
    """

    def __init__(
        self,
        weights: GlobalWeights,
        bases: Mapping[str, Tensor],
        curvatures: Mapping[str, Curvature],
        factors: FeedbackFactors | None,
    ) -> None:
        self._factors: FeedbackFactors | dict[str, Tensor | None] = {} if factors is None else factors
        self.without_feedback = set[str]()
        self._bases = bases
        differences = {name: weights.local[name].float() - base.float() for name, base in bases.items()}
        deviations = {name: float(difference.square().mean().sqrt()) for name, difference in differences.items()}
        self._differences = {name: x for name, x in differences.items() if 0 < deviations[name] < math.inf}
        self.weights = {name: weights.local[name] for name in self._differences}
        typical = reference_curvature(weights, curvatures)
        self.curvatures = dict(curvatures)
        self._steps, self._widths = dict[str, float](), dict[str, tuple[Tensor, Tensor]]()
        for name, difference in self._differences.items():
            curvature = curvatures[name]
            scale = 1.0 if difference.dim() > 1 else SENSITIVE_STEP
            if curvature.mean > 0 and typical > 0:
                scale *= (curvature.mean / typical) ** -_STEP_EXPONENT
            self._steps[name] = deviations[name] * scale
            self._widths[name] = _relative_widths(curvature, as_matrix(difference))

    def quantize(self, log_step: int) -> QuantizedWeights:
        results = map_tensors(
            lambda name, threads: self._quantize(name, log_step, self._factor(name)), dict(self._differences)
        )
        terms = [_rise_terms(self.curvatures[name], error) for name, (_, error) in results.items()]
        return QuantizedWeights(
            log_step,
            {name: points for name, (points, _) in results.items()},
            sum(slope for slope, _ in terms),
            sum(curvature for _, curvature in terms),
            0.5,
            (),
            {name: weight.dtype for name, weight in self.weights.items()},
            self._bases,
        )

    def lattice_starts(self, quantized: QuantizedWeights) -> dict[str, RowSample]:
        """Nothing: these weights have no lattices."""
        return {}

    def _factor(self, name: str) -> Tensor | None:
        if name not in self._factors:
            return None
        factor, columns = self._factors[name], as_matrix(self._differences[name]).shape[1]
        if factor is None or len(factor) != columns:
            self.without_feedback.add(name)
            return None
        return factor.to(self._differences[name].device)

    def _quantize(self, name: str, log_step: int, factor: Tensor | None) -> tuple[CodebookTensor, Tensor]:
        """The codes of one weight, and the errors of its differences as a matrix."""
        difference = as_matrix(self._differences[name])
        rows, columns = self._widths[name]
        octaves = (rows.log2() - math.log2(float(rows.min()))).round().clamp(max=_MAX_OCTAVES)
        strides = torch.exp2(octaves)[:, None]  # steps of a row, in those of the tensor
        step = self._steps[name] * from_log_step(log_step) * float(torch.exp2((rows.log2() - octaves).mean()))
        step = max(step, float(difference.abs().max()) / _MAX_CODE)
        scaled, zones, limits = difference / (step * strides), DEAD_ZONE * columns[None, :], _MAX_CODE // strides
        if factor is None:
            multiples = _round(scaled, zones, limits)
        else:
            with torch.autocast(scaled.device.type, enabled=False):  # its products are those of bfloat16
                multiples = _round_with_feedback(scaled, zones, limits, factor)
        multiples *= strides
        return _codebook(multiples, step, self._differences[name].shape), multiples * step - difference


def _relative_widths(curvature: Curvature, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Widths of steps by row and of dead zones by column, each 1 in the geometric mean; on the difference's device."""
    widths = []
    for axis, count, exponent in ((1, difference.shape[0], _ROW_EXPONENT), (0, difference.shape[1], _ZONE_EXPONENT)):
        means = curvature.mean_along(axis)
        logs = torch.zeros(count, dtype=torch.float32, device=difference.device)
        if means is not None and 0 < float(means.mean()) < math.inf:
            logs = means.to(difference.device).clamp(min=float(means.mean()) * MIN_RELATIVE_CURVATURE).log() * -exponent
        widths.append((logs - logs.mean()).exp())
    return widths[0], widths[1]


def _round(values: Tensor, zones: Tensor, limits: Tensor) -> Tensor:
    """The nearest integers up to a limit, 0 for values within their zones, and at least 1 or -1 for all others."""
    integers = values.round().clamp(-limits, limits)
    integers = torch.where(integers == 0, values.sign(), integers)
    return torch.where((values.abs() < zones) & (integers.abs() == 1), 0.0, integers)


def _round_with_feedback(values: Tensor, zones: Tensor, limits: Tensor, factor: Tensor) -> Tensor:
    """Integers whose errors cancel in the outputs of a layer (LDLQ, arXiv 2307.13304, section 3).

    Args:
        values: [rows, columns].
        zones: [1, columns].
        limits: [rows, 1].
        factor: of `quantize.lattice.feedback_factor`.
    """
    shares = factor.triu().flip(0, 1)  # row j: what column j gets of the errors of those before it
    shares = shares / shares.diagonal()[:, None]
    integers, errors = torch.zeros_like(values), torch.zeros_like(values)
    for begin in range(0, values.shape[1], _BLOCK):
        end = min(begin + _BLOCK, values.shape[1])
        targets = values[:, begin:end] - errors[:, :begin] @ shares[begin:end, :begin].T
        for column in range(begin, end):
            target = targets[:, column - begin] - errors[:, begin:column] @ shares[column, begin:column]
            integers[:, column] = _round(target, zones[:, column], limits[:, 0])
            errors[:, column] = integers[:, column] - values[:, column]
    return integers


def _codebook(multiples: Tensor, step: float, shape: torch.Size) -> CodebookTensor:
    """Codes of multiples of a step, and the step's multiples as centers, as few as these codes need."""
    largest = max(1, int(multiples.abs().max()))
    integers = torch.arange(-largest, largest + 1, device=multiples.device)
    centers = integers[integers != 0].to(torch.float32) * step
    codes = torch.where(multiples < 0, multiples + largest, multiples + largest - 1) + RESERVED_CODES
    codes = torch.where(multiples == 0, 0, codes).to(torch.uint8).reshape(shape).contiguous()
    return CodebookTensor(codes, centers, centers.new_empty(0), residual=True)


def _rise_terms(curvature: Curvature, errors: Tensor) -> tuple[float, float]:
    """The two terms of the rise that errors [rows, columns] cause."""
    slope, squares = curvature.slope, curvature.squares
    first = 0.0 if slope is None else float((slope.to(errors.device) * errors).sum(dtype=torch.float64))
    second = 0.0 if squares is None else float((squares.to(errors.device) * errors.square()).sum(dtype=torch.float64))
    return first, second / 2
