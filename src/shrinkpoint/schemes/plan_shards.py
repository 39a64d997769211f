"""Plans the quantization of a state that is sharded over ranks; a collective of all ranks that write it."""

from __future__ import annotations

import zlib
from dataclasses import replace

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.plan import QuantizationPlan, plan_within_memory
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.sharding.shard_spec import ShardLayout
from shrinkpoint.tensors.flat_state import FlatState


def plan_shards(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    layout: ShardLayout,
    evaluator: ShardedModelEvaluator | None = None,
) -> Scheme:
    """Plan the quantization of this rank's shards from statistics of global tensors; a collective.

    All shards of one tensor get the same recipe, and decisions about all tensors are the same on all ranks. A rank
    that is alone, and has all of every tensor, decides as a process without shards.

    Args:
        scheme: of the same settings on every rank.
        state: this rank's tensors.
        reference: the decoded tensors of this rank's previous file; None if there is none. If any rank that has
            tensors has none, all ranks plan as if they had none.
        layout: where this rank's tensors lie in global tensors.
        evaluator: measures the model, for schemes that measure.

    Returns:
        The scheme that quantizes and encodes this rank's shards.

    Raises:
        PolicyError: the scheme cannot be planned by several ranks; before any rank waits for another.
        MismatchError: ranks have different schemes, or tensors of one name that differ.
        ShrinkpointError: an error of this rank or of another; on all ranks.
    """
    if isinstance(scheme, Lossless):
        return scheme
    check_shardable(scheme, measures=evaluator is not None)

    def plan(state: FlatState) -> Scheme:
        return layout.collectives.run_all_or_raise(lambda: _plan(scheme, state, reference, layout, evaluator))

    return plan_within_memory(plan, state, scheme, use_host=False)


def check_shardable(scheme: Scheme, *, measures: bool = False) -> None:
    """Check that several ranks can plan a scheme together; no collective.

    Args:
        measures: every rank has the model that is saved.

    Raises:
        PolicyError: they cannot.
    """
    if isinstance(scheme, Lossless):
        return
    if not isinstance(scheme, Planner | ResidualScheme):
        expected, do = "a scheme that several ranks can decide together", "take one of this library's"
        raise PolicyError("scheme", found=repr(scheme), expected=expected, do=do)
    if isinstance(scheme, Planner) and scheme.shares_trials:
        found, do = "ranks that share the trials of one state", "leave group= away: all ranks measure each trial"
        raise PolicyError("group", found=found, expected="None, where ranks have parts of the state", do=do)
    if isinstance(scheme, Planner) and scheme.needs_evaluation and not measures:
        found, do = "no model that is saved", "say which one it is, or how much may be lost without measuring"
        raise PolicyError("evaluate", found=found, expected="a model to measure on every rank", do=do)


def _plan(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    layout: ShardLayout,
    evaluator: ShardedModelEvaluator | None,
) -> QuantizationPlan:
    tensors = GlobalTensors(state, layout)
    lacks_reference = bool(state.tensors) and reference is None
    is_no_base = reference is not None and not reference.is_base
    description = f"{type(scheme).__name__}, {scheme!r}"
    reports = tensors.all_gather((zlib.crc32(description.encode()), lacks_reference, is_no_base))
    if len({digest for digest, *_ in reports}) > 1:
        found = " and ".join(sorted({*tensors.all_gather(description)}))
        raise MismatchError("scheme", found=found, expected="the same on all ranks", do="set all ranks up alike")
    if any(without_reference for _, without_reference, _ in reports):
        reference = None
    if reference is not None and any(without_base for *_, without_base in reports):
        reference = replace(reference, is_base=False)
    evaluator = ShardedModelEvaluator(state) if evaluator is None else evaluator
    evaluator.join(tensors)
    assert isinstance(scheme, Planner | ResidualScheme)
    return scheme.plan(state, reference, evaluator, tensors)
