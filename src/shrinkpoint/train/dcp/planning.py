"""Plans for lossy schemes over all ranks that save together: every shard of a tensor gets the same recipe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.schemes.plan_shards import check_shardable, plan_shards
from shrinkpoint.schemes.sharded_evaluator import ShardedModelEvaluator
from shrinkpoint.sharding.collectives import AllGather, gather_single, make_all_gather
from shrinkpoint.sharding.shard_spec import ShardLayout, ShardSpec
from shrinkpoint.train.dcp.chain_registry import ChainState
from shrinkpoint.train.dcp.collect import CollectedState


def plan_across_ranks(
    scheme: Scheme,
    collect: Callable[[], CollectedState],
    chain: ChainState,
    *,
    world_size: int,
    group: dist.ProcessGroup | None,
    model: Any,
    is_sent: bool,
) -> tuple[Scheme, CollectedState]:
    """The plan for what this rank writes, and the collected state.

    Args:
        scheme: decides; the same on all ranks.
        collect: collects the state of this rank; may raise on one rank alone.
        chain: the state of this rank's chain.
        world_size: number of ranks that save together.
        group: the process group of these ranks.
        model: the model whose state is saved; None if there is none to evaluate.
        is_sent: whether the state was sent to another process than the model's.

    Raises:
        PolicyError: a scheme that cannot be used here.
        whatever any rank raised, on all of them.
    """
    gather = _make_all_gather(group, world_size)
    try:  # an error on this rank is sent to the others, which wait for it
        is_concurrent = is_sent or threading.current_thread().name.startswith("AsyncCheckpointExecutor")
        evaluate = _check_evaluate(scheme, is_concurrent=is_concurrent)
        check_shardable(scheme, measures=model is not None or is_sent)
        collected = collect()
        specs = {name: ShardSpec(shard.fqn, shard.size, shard.offsets) for name, shard in collected.shards.items()}
        evaluator = None if is_concurrent or model is None else ShardedModelEvaluator(collected.state, evaluate, model)
    except Exception as error:
        with suppress(ShrinkpointError):  # of another rank
            gather(error)
        raise
    gather(None)
    # A planning scheme uses the last checkpoint even if this one is a keyframe; others only code differences to it.
    reference = (
        chain.delta_writer.last_reference if isinstance(scheme, PlanningScheme) else chain.delta_writer.reference
    )
    return plan_shards(scheme, collected.state, reference, ShardLayout(specs, gather), evaluator), collected


def _check_evaluate(scheme: Scheme, *, is_concurrent: bool) -> Any:
    evaluate = getattr(scheme, "evaluate", None)
    if is_concurrent and evaluate is not None:  # the model is being trained meanwhile, or is in another process
        found, do = "async_save with a scheme that evaluates the model", "use dcp.save, or a scheme without evaluate="
        raise PolicyError("Writer", found=found, expected="a model that waits", do=do)
    return evaluate


def _make_all_gather(group: dist.ProcessGroup | None, world_size: int) -> AllGather:
    if world_size == 1:
        return gather_single
    if dist.get_world_size(group) != world_size:
        found = f"{dist.get_world_size(group)} ranks in its group, while {world_size} save"
        raise PolicyError("Writer", found=found, do="pass group=, the same as process_group= of dcp.save")
    return make_all_gather(group)
