"""Curvature of weights from second moments of activations, and rounding with error feedback by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import cast

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.lattice import feedback_factor
from shrinkpoint.schemes.evaluate import ModelStateGuard, strip_wrapper_prefix
from shrinkpoint.schemes.fisher.activations import Activations, Calibrate, LayerStatistics, record_calibration
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.sharding.global_tensors import matches_parameter
from shrinkpoint.tensors.flat_state import FlatState, unflatten

MIN_FEEDBACK_COLUMNS = 2
"""With fewer columns there is none to feed an error back to."""


def find_layers(
    calibrate: Calibrate | None, activations: Activations | None, state: FlatState
) -> dict[str, LayerStatistics]:
    """Statistics of the layers of a state's weights, by name in the state.

    Raises:
        PolicyError: `calibrate` raised or ran another model, or the recorder has seen none of the weights.
    """
    if calibrate is not None:
        guard = ModelStateGuard(state.tensors.values(), ())
        try:
            argument = unflatten(state.tree, state.tensors, where="a calibration")
            layers = record_calibration(calibrate, argument, state.tensors)
        finally:
            guard.restore()
        return {name: layer for name, layer in layers.items() if fits_weight(layer, state.tensors[name])}
    if activations is None:
        return {}
    layers = layers_by_state_name(activations.layers, state.tensors)
    if not layers:
        expected, do = "one that has seen batches of the saved model", "make it before the loop, with the same model"
        raise PolicyError("activations", found="a recorder of none of these weights", expected=expected, do=do)
    return layers


def layers_by_state_name(
    layers: Mapping[str, LayerStatistics], tensors: Mapping[str, Tensor]
) -> dict[str, LayerStatistics]:
    """Statistics by name in a state, given those by name in a model; without those whose shape is another one."""
    plain = {strip_wrapper_prefix(name): layer for name, layer in layers.items()}
    matches = dict[str, LayerStatistics]()
    for name, layer in plain.items():
        stored = [stored for stored in tensors if matches_parameter(stored, name)]
        if len(stored) == 1 and fits_weight(layer, tensors[stored[0]]):
            matches[stored[0]] = layer
    return matches


def fits_weight(layer: LayerStatistics, weight: Tensor) -> bool:
    """True if all that was recorded of a layer is of the shape of this weight."""
    if weight.dim() < 2 or not weight.is_floating_point():
        return False
    rows, columns = as_matrix(weight).shape
    sizes = ((layer.inputs, columns), (layer.outputs, rows), (layer.frequencies, rows), (layer.lookups, columns))
    return all(average.total is None or len(average.total) == size for average, size in sizes)


class FeedbackFactors:
    """The factors for rounding weights with error feedback, each computed once, when it is first asked for.

    Layers with the same inputs (queries, keys and values of attention) share one. Thread-safe.

    Args:
        weights: by name; those of fewer than `MIN_FEEDBACK_COLUMNS` columns have no factor.
        layers: what was recorded of them.
    """

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, LayerStatistics]) -> None:
        self._factors: dict[str, _Factor] = {}
        distinct: list[_Factor] = []
        for name, layer in layers.items():
            costs = _row_costs(weights[name], layer)
            if costs is None or len(costs) < MIN_FEEDBACK_COLUMNS:
                continue
            equal = next((factor for factor in distinct if factor.is_of(costs)), None)
            if equal is None:
                distinct.append(equal := _Factor(costs))
            self._factors[name] = equal

    def __contains__(self, name: str) -> bool:
        return name in self._factors

    def __getitem__(self, name: str) -> Tensor | None:
        """See `feedback_factor`."""
        return self._factors[name].compute()


class _Factor:
    """The factor of second moments, computed when it is first asked for."""

    def __init__(self, moments: Tensor) -> None:
        self._moments: Tensor = moments
        self._first_row = moments[0].tolist()
        self._lock, self._factor, self._is_computed = Lock(), cast("Tensor | None", None), False

    def is_of(self, moments: Tensor) -> bool:
        """True if it is that of these moments."""
        if len(moments) != len(self._first_row) or moments.device != self._moments.device:
            return False
        return moments[0].tolist() == self._first_row and torch.equal(moments, self._moments)

    def compute(self) -> Tensor | None:
        with self._lock:
            if not self._is_computed:
                self._factor, self._is_computed = feedback_factor(self._moments), True
            return self._factor


def _row_costs(weight: Tensor, layer: LayerStatistics) -> Tensor | None:
    """Cost of the errors of a row together, up to a factor; None if inputs were not recorded.

    That is the second moments of a layer's inputs; if its weight is also an embedding, with the cost of errors there.
    """
    frequencies = layer.frequencies.mean
    if layer.inputs.total is None or frequencies is None:
        return layer.inputs.total
    inputs = layer.inputs.total / layer.inputs.weight
    outputs, lookups = layer.outputs.mean, layer.lookups.mean
    if outputs is not None and lookups is not None:
        costs = lookups * (frequencies.mean() / outputs.mean())
    else:
        power, looked_up = _output_powers(weight, layer)
        costs = (frequencies.mean() * power / max(looked_up, 1e-30)).expand(len(inputs))
    return inputs + costs.to(inputs.device).diag() if bool(costs.isfinite().all()) else inputs


def _output_powers(weight: Tensor, layer: LayerStatistics) -> tuple[float, float]:
    """The mean squares of the outputs of a linear layer, and of an embedding, with this weight; 0 if there is none."""
    matrix = as_matrix(weight).to(torch.float32)
    inputs, frequencies = layer.inputs.mean, layer.frequencies.mean
    power = looked_up = 0.0
    if inputs is not None:
        with torch.autocast(matrix.device.type, enabled=False):
            power = float(((matrix @ inputs.to(matrix.device)) * matrix).sum()) / len(matrix)
    if frequencies is not None:
        looked_up = float((matrix.square().mean(1) * frequencies.to(matrix.device)).sum())
    return power, looked_up


def layer_curvatures(
    weights: Mapping[str, Tensor], curvatures: Mapping[str, Curvature], layers: Mapping[str, LayerStatistics]
) -> dict[str, Curvature]:
    """Curvatures in which layers take the place of what is known less well; others are returned as they are.

    Where gradients of outputs were recorded, the squared gradient of a weight is the one of its output times that of
    its input (K-FAC, arXiv 1503.05671, section 2, its diagonal), in the unit of Adam's second moments: those of other
    weights stay, and the two are brought to one scale by the weights that have both. Where only inputs were, they
    distribute what is known of a tensor over its columns; if nothing is known of any tensor, errors count relative to
    the outputs that they change.
    """
    products = {name: _squared_gradients(weights[name], layer) for name, layer in layers.items()}
    factored = {name: squares for name, squares in products.items() if squares is not None}
    known = {name: c.mean for name, c in curvatures.items() if 0 < c.mean < math.inf and not c.relative_only}
    if factored:
        common = [math.log(known[name] / float(squares.mean())) for name, squares in factored.items() if name in known]
        scale = math.exp(sum(common) / len(common)) if common else 1.0
        layered = {
            name: Curvature(
                squares, curvatures[name].first, second_factor=scale, first_factor=curvatures[name].first_factor
            )
            for name, squares in factored.items()
        }
        others = {name: c if name in known else replace(c, second=None) for name, c in curvatures.items()}
        return {**others, **layered}
    if any(0 < curvature.mean < math.inf for curvature in curvatures.values()):
        return {name: _by_column(c, layers.get(name)) for name, c in curvatures.items()}
    return {
        name: _relative_to_outputs(weights[name], layers[name]) if name in layers else curvature
        for name, curvature in curvatures.items()
    }


def _squared_gradients(weight: Tensor, layer: LayerStatistics) -> Tensor | None:
    """Mean squared gradients of a weight, float32 [rows, columns]; None without gradients of outputs."""
    total = None
    powers, outputs = layer.inputs.mean_diagonal, layer.outputs.mean
    if powers is not None and outputs is not None:
        total = torch.outer(outputs, powers)
    frequencies, lookups = layer.frequencies.mean, layer.lookups.mean
    if frequencies is not None and lookups is not None:
        looked_up = torch.outer(frequencies, lookups)
        total = looked_up if total is None else total + looked_up
    if total is None or not 0 < float(total.mean()) < math.inf:
        return None
    return total.to(weight.device)


def _by_column(curvature: Curvature, layer: LayerStatistics | None) -> Curvature:
    """A curvature that was probed, and so is the same for all values of a tensor, by column as inputs are."""
    powers = None if layer is None else layer.inputs.mean_diagonal
    if not curvature.probed or curvature.second is None or powers is None:
        return curvature
    powers = powers.to(curvature.second.device)
    return replace(curvature, second=curvature.second * (powers / powers.mean()), second_sums=None)


def _relative_to_outputs(weight: Tensor, layer: LayerStatistics) -> Curvature:
    """The squared error of outputs relative to their mean square, as a curvature that is comparable but has no unit."""
    total = torch.zeros_like(as_matrix(weight), dtype=torch.float32)
    powers, frequencies = layer.inputs.mean_diagonal, layer.frequencies.mean
    power, looked_up = _output_powers(weight, layer)
    if powers is not None and power > 0:
        total += powers.to(total.device)[None, :] / power
    if frequencies is not None and looked_up > 0:
        total += frequencies.to(total.device)[:, None] / looked_up
    return Curvature(total, relative_only=True) if bool(total.isfinite().all()) else Curvature()
