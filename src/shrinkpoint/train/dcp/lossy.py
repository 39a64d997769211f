"""Lossy schemes over the ranks that save together: each tensor gets one recipe, whoever has which part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes import Scheme, Settling
from shrinkpoint.schemes.sharded import check, settle
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.schemes.shards import Gather, Shard, Shards, gathering, raised, said
from shrinkpoint.train.dcp.chains import Chain
from shrinkpoint.train.dcp.items import Collected


def settled(
    scheme: Scheme, collect: Callable[[], Collected], chain: Chain, *, world: int, group: dist.ProcessGroup | None,
    model: Any, is_sent: bool,
) -> tuple[Scheme, Collected]:  # fmt: skip
    """The scheme as it was decided for what this rank writes, and that.

    Args:
        collect: what may fail on one rank.
        world: ranks that save together.
        group: over which they do.
        model: whose state is saved; None: nothing can be measured.
        is_sent: the state has been sent to another process than the model is in.

    Raises:
        PolicyError: a scheme that cannot be used here.
        whatever any rank raised, on all of them.
    """
    gather = _gather(group, world)
    try:  # whatever is wrong on this rank alone, the others are waiting
        beside = is_sent or threading.current_thread().name.startswith("AsyncCheckpointExecutor")
        evaluate = _evaluate(scheme, beside=beside)
        check(scheme, measures=model is not None or is_sent)
        collected = collect()
        places = {name: Shard(box.fqn, box.size, box.offsets) for name, box in collected.boxes.items()}
        target = None if beside or model is None else ShardTarget(collected.flat, evaluate, model)
    except Exception as error:
        with suppress(ShrinkpointError):  # of another rank
            gather(error)
        raise
    gather(None)
    # What is decided for a keyframe looks at the checkpoint before, too; but differences to it are none of that.
    known = chain.tip.known if isinstance(scheme, Settling) else chain.tip.reference
    return settle(scheme, collected.flat, known, Shards(places, gather), target), collected


def _evaluate(scheme: Scheme, *, beside: bool) -> Any:
    evaluate = getattr(scheme, "evaluate", None)
    if beside and evaluate is not None:  # the model trains on, or is not there
        found, do = "async_save with a scheme that evaluates the model", "use dcp.save, or a scheme without evaluate="
        raise PolicyError("Writer", found=found, expected="a model that waits", do=do)
    return evaluate


def _gather(group: dist.ProcessGroup | None, world: int) -> Gather:
    if world == 1:
        return _alone
    if dist.get_world_size(group) != world:
        found = f"{dist.get_world_size(group)} ranks in its group, while {world} save"
        raise PolicyError("Writer", found=found, do="pass group=, the same as process_group= of dcp.save")
    return gathering(group)


def _alone(thing: Any) -> list[Any]:
    return raised([said(thing)])
