"""Selects the weights of a state that are quantized."""

from __future__ import annotations

from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.fisher.moment_lattices import MIN_LATTICE_NUMEL
from shrinkpoint.schemes.select import TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.optimizers import MomentKind


def select_weights(
    state: FlatState, reference: Reference | None, evaluator: TrialEvaluator | None, tensors: GlobalTensors
) -> tuple[TensorSelection, dict[str, QuantizedTensor]]:
    """The weights to quantize, and the points of those that have not changed since the parent.

    None of LBFGS: the error of a restore would be in its next difference of gradients. It has no sharded form in torch.
    """
    quantizable = None if evaluator is None else evaluator.quantizable
    if tensors.is_complete and MomentKind.HISTORY in state.moment_kinds.values():
        quantizable = frozenset()
    selection = select_tensors(
        state,
        tensors,
        quantizable,
        min_numel=MIN_LATTICE_NUMEL,
        min_dims=1,
        optimized_names=state.optimizer_info.keys(),
    )
    selection.warn_nonfinite()
    unchanged = unchanged_tensors([*selection.tensors], state, reference, tensors)
    return selection.exclude(unchanged, tensors), unchanged
