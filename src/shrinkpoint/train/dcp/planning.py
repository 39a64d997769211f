"""Lossy schemes over the ranks that save together: each tensor gets one recipe, whoever has which part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.schemes.sharded import check, settle
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.sharding.shard_spec import AllGather, ShardLayout, ShardSpec, gather_single, make_all_gather
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
    """The scheme as it was decided for what this rank writes, and that.

    Args:
        collect: what may fail on one rank.
        world_size: ranks that save together.
        group: over which they do.
        model: whose state is saved; None: nothing can be measured.
        is_sent: the state has been sent to another process than the model is in.

    Raises:
        PolicyError: a scheme that cannot be used here.
        whatever any rank raised, on all of them.
    """
    gather = _make_all_gather(group, world_size)
    try:  # whatever is wrong on this rank alone, the others are waiting
        beside = is_sent or threading.current_thread().name.startswith("AsyncCheckpointExecutor")
        evaluate = _check_evaluate(scheme, is_concurrent=beside)
        check(scheme, measures=model is not None or is_sent)
        collected = collect()
        places = {name: ShardSpec(box.fqn, box.size, box.offsets) for name, box in collected.shards.items()}
        target = None if beside or model is None else ShardTarget(collected.state, evaluate, model)
    except Exception as error:
        with suppress(ShrinkpointError):  # of another rank
            gather(error)
        raise
    gather(None)
    # What is decided for a keyframe looks at the checkpoint before, too; but differences to it are none of that.
    known = chain.delta_writer.last_reference if isinstance(scheme, PlanningScheme) else chain.delta_writer.reference
    return settle(scheme, collected.state, known, ShardLayout(places, gather), target), collected


def _check_evaluate(scheme: Scheme, *, is_concurrent: bool) -> Any:
    evaluate = getattr(scheme, "evaluate", None)
    if is_concurrent and evaluate is not None:  # the model trains on, or is not there
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
