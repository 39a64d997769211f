"""What the second moments of activations say of weights: their curvature, and how to round them with error feedback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.schemes.evaluate import strip_wrapper_prefix
from shrinkpoint.schemes.fisher.activations import LayerStatistics
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.sharding.global_tensors import matches_parameter

MIN_FEEDBACK_COLUMNS = 2
"""With fewer columns there is none to feed an error back to."""


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
    """Whether all that was recorded of a layer is of the shape of this weight."""
    if weight.dim() < 2 or not weight.is_floating_point():
        return False
    rows, columns = as_matrix(weight).shape
    sizes = ((layer.inputs, columns), (layer.outputs, rows), (layer.frequencies, rows), (layer.lookups, columns))
    return all(average.total is None or len(average.total) == size for average, size in sizes)


def input_moments(weights: Mapping[str, Tensor], layers: Mapping[str, LayerStatistics]) -> dict[str, Tensor]:
    """What errors of a row cost together, up to a factor, by name of the weights that are wide enough for feedback."""
    moments = {name: _row_costs(weights[name], layer) for name, layer in layers.items()}
    return {
        name: costs
        for name, costs in moments.items()
        if costs is not None and as_matrix(weights[name]).shape[1] >= MIN_FEEDBACK_COLUMNS
    }


def _row_costs(weight: Tensor, layer: LayerStatistics) -> Tensor | None:
    """The second moments of a layer's inputs; if its weight is also an embedding, with the cost of errors there."""
    inputs, frequencies = layer.inputs.mean, layer.frequencies.mean
    if inputs is None or frequencies is None:
        return inputs
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
    inputs, outputs = layer.inputs.mean, layer.outputs.mean
    if inputs is not None and outputs is not None:
        total = torch.outer(outputs, inputs.diagonal())
    frequencies, lookups = layer.frequencies.mean, layer.lookups.mean
    if frequencies is not None and lookups is not None:
        looked_up = torch.outer(frequencies, lookups)
        total = looked_up if total is None else total + looked_up
    if total is None or not 0 < float(total.mean()) < math.inf:
        return None
    return total.to(weight.device)


def _by_column(curvature: Curvature, layer: LayerStatistics | None) -> Curvature:
    """A curvature that was probed, and so is the same for all values of a tensor, by column as inputs are."""
    inputs = None if layer is None else layer.inputs.mean
    if not curvature.probed or curvature.second is None or inputs is None:
        return curvature
    powers = inputs.diagonal().to(curvature.second.device)
    return replace(curvature, second=curvature.second * (powers / powers.mean()), second_sums=None)


def _relative_to_outputs(weight: Tensor, layer: LayerStatistics) -> Curvature:
    """The squared error of outputs relative to their mean square, as a curvature that is comparable but has no unit."""
    total = torch.zeros_like(as_matrix(weight), dtype=torch.float32)
    inputs, frequencies = layer.inputs.mean, layer.frequencies.mean
    power, looked_up = _output_powers(weight, layer)
    if inputs is not None and power > 0:
        total += inputs.diagonal().to(total.device)[None, :] / power
    if frequencies is not None and looked_up > 0:
        total += frequencies.to(total.device)[:, None] / looked_up
    return Curvature(total, relative_only=True) if bool(total.isfinite().all()) else Curvature()
