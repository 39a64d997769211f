"""Schemes decided by several ranks together, each of which has some boxes of the tensors of all."""

from __future__ import annotations

from dataclasses import replace

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.schemes.search.scheme import SearchScheme
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.sharding.shard_spec import ErrorGather, ShardLayout
from shrinkpoint.tensors.flat_state import FlatState

__all__ = ["ShardTarget", "check", "settle"]


def settle(
    scheme: Scheme, flat: FlatState, reference: Reference | None, shards: ShardLayout, target: ShardTarget | None = None
) -> Scheme:
    """Decide for this rank's boxes, with the statistics of whole tensors: a collective of all ranks that write.

    All boxes of one tensor get the same recipe, and decisions about all tensors are the same on all ranks. A rank that
    is alone, and has whole tensors, decides as without shards.

    Args:
        scheme: of the same settings on every rank.
        flat: this rank's tensors.
        reference: what a reader has of them in this rank's previous file; None: nothing. Where one rank that has
            tensors has nothing, all ranks decide as if they had nothing.
        target: what to measure on, where the scheme measures.

    Returns:
        What quantizes and encodes this rank's boxes.

    Raises:
        PolicyError: a scheme that cannot be sharded; before any rank waits for another.
        MismatchError: ranks have different schemes, or tensors of one name that differ.
        ShrinkpointError: what went wrong on this rank or on another; on all ranks.
    """
    if isinstance(scheme, Lossless):
        return scheme
    check(scheme, measures=target is not None)
    link = ErrorGather(shards.all_gather)
    return link.run_all_or_raise(lambda: _settled(scheme, flat, reference, ShardLayout(shards.specs, link), target))


def check(scheme: Scheme, *, measures: bool = False) -> None:
    """Whether several ranks can decide a scheme together; no collective.

    Args:
        measures: there is a model that is saved, on every rank.

    Raises:
        PolicyError: they cannot.
    """
    if isinstance(scheme, Lossless):
        return
    known = isinstance(scheme, Fisher | ResidualScheme | SearchScheme)
    if not known:
        expected, do = "a scheme that several ranks can decide together", "take one of this library's"
        raise PolicyError("scheme", found=repr(scheme), expected=expected, do=do)
    if isinstance(scheme, SearchScheme) and scheme.shares_trials:
        found, do = "ranks that share the trials of one state", "leave group= away: all ranks measure each trial"
        raise PolicyError("group", found=found, expected="None, where ranks have parts of the state", do=do)
    if isinstance(scheme, SearchScheme | Fisher) and scheme.needs_evaluation and not measures:
        found, do = "no model that is saved", "say which one it is, or how much may be lost without measuring"
        raise PolicyError("evaluate", found=found, expected="a model to measure on every rank", do=do)


def _settled(
    scheme: Scheme, flat: FlatState, reference: Reference | None, shards: ShardLayout, target: ShardTarget | None
) -> QuantizationPlan:
    wholes = GlobalTensors(flat, shards)
    apart = reference is not None and not reference.is_base
    told = wholes.all_gather((f"{type(scheme).__name__}, {scheme!r}", bool(flat.tensors) and reference is None, apart))
    schemes = sorted({name for name, *_ in told})
    if len(schemes) > 1:
        found = " and ".join(schemes)
        raise MismatchError("scheme", found=found, expected="the same on all ranks", do="set all ranks up alike")
    if any(alone for _, alone, _ in told):
        reference = None
    if reference is not None and any(apart for *_, apart in told):
        reference = replace(reference, is_base=False)
    target = ShardTarget(flat) if target is None else target
    target.join(wholes)
    assert isinstance(scheme, Fisher | SearchScheme | ResidualScheme)
    return scheme.plan(flat, reference, target, wholes)
