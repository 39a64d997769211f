"""Local steps: ranks train alone, and average how far they moved once a round (DiLoCo, SparseLoCo)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, as_feedback
from shrinkpoint.comm.global_weights import (
    GlobalWeights,
    broadcast_parameter,
    describe_tensor,
    digest_tensors,
)
from shrinkpoint.comm.link import FINITE_VALUES, CompressorLike
from shrinkpoint.comm.membership import LostMemberError, Membership, is_lost
from shrinkpoint.comm.outer_sgd import OuterOptimizer, OuterSGD
from shrinkpoint.comm.outer_state import broadcast_tensors, describe_state
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, group_timeout
from shrinkpoint.comm.round_check import Problem, RoundCheck
from shrinkpoint.comm.sparse_allreduce import SparseAllReduce, is_sparse
from shrinkpoint.comm.state_check import check_entries, check_mapping
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError, warn_user

_STATE_KEYS = {"config", "round", "steps_in_round", "weights", "outer", "feedback", "residuals"}
_in_use: WeakValueDictionary[int, LocalSteps] = WeakValueDictionary()
"""What averages each model, by the `id` of the model, which it keeps: two would average each other's rounds."""


class LocalSteps:
    """Trains every rank alone for a number of steps, then averages how far the ranks moved, in compressed messages.

    After `every` steps each rank has a pseudo-gradient: the global weights, where the round began, minus its own ones.
    They are averaged to the same bits on every rank, the outer optimizer takes a step with the average on the global
    weights, and all ranks continue from these (arXiv 2311.08105, algorithm 1). The inner optimizer keeps its state, and
    each rank its buffers (running averages of BatchNorm).

        local = LocalSteps(model, optimizer, every=30)   # on every rank; all begin with the weights of rank 0
        for x, y in batches:                             # each rank has its own
            optimizer.zero_grad()
            loss(model(x), y).backward()
            local.step()                                 # instead of optimizer.step()

    With TopK and RandomK each rank sends its message to all others; with other compressors the average takes two hops,
    as in `compress_ddp`. Global weights are float32, or float64 for parameters that are. Outer momentum and error
    feedback have the same size. While messages are exchanged there is a copy of the feedback: an exchange that fails
    changes nothing.

    With a membership ranks may die and join. Those that are left average the round among themselves; those that join
    get global weights, outer state and the number of the round from the others, at the end of a round.

    Args:
        model: what requires a gradient is averaged; not sharded. Frozen parameters are taken from rank 0 once.
        optimizer: the inner one, or several; of parameters of the model.
        every: the number of steps in a round.
        outer: makes the outer optimizer; None for `OuterSGD()`, DiLoCo's own.
        compressor: for pseudo-gradients; None for no compression. SparseLoCo (arXiv 2508.15706) takes
            "ef(top1.5625:4096:q2:64, decay=0.95)", and `OuterSGD(lr=1.0, momentum=0.0)`.
        group: of the ranks that train together; None for the default group.
        membership: forms groups of the ranks that are alive; instead of `group`. Here a process waits for the first
            one, or to be let in.
        timeout: seconds to wait here for each other rank. At the end of a round ranks wait as long as the group does,
            with a membership always.

    Attributes:
        outer: the outer optimizer. A scheduler may change its settings, alike on all ranks.
        link_stats: statistics of the messages since the start: of "all-gather", or of "first hop" and "second hop".
        round: how many rounds have ended.
        steps_in_round: how many steps this round has had.

    Raises:
        PolicyError: an argument is unusable. What is wrong with the model of one rank is raised on every rank, such as
            another LocalSteps of it that is neither deleted nor closed.
        MismatchError: on every rank: ranks have other models or settings, or one did not call this. Ranks that train
            already do not get errors of one that joins; they go on without it.
        MembershipError: no group was formed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        every: int = 30,
        *,
        outer: OuterOptimizer | None = None,
        compressor: CompressorLike = None,
        group: dist.ProcessGroup | None = None,
        membership: Membership | None = None,
        timeout: float = CONFIG_TIMEOUT,
    ) -> None:
        validate.check_instance("LocalSteps, model", model, nn.Module, expected="a model", do="pass the module itself")
        self._optimizers = _check_optimizers(optimizer)
        self._every = validate.check_int("LocalSteps, every", every, do="take 30")
        self._timeout = validate.check_float("LocalSteps, timeout", timeout)
        self._membership = _check_membership(membership, group)
        make_outer = _check_outer(OuterSGD() if outer is None else outer)
        self._feedback = as_feedback(compressor)
        average_type = SparseAllReduce if is_sparse(self._feedback) else CompressedAllReduce
        self._average: SparseAllReduce | CompressedAllReduce = average_type(self._feedback, name="local steps")
        self.link_stats: dict[str, LinkStats] = self._average.link_stats
        self.round, self.steps_in_round = 0, 0
        self._has_shared_state = False
        self._residuals: dict[str, torch.Tensor] = {}  # of messages to an earlier group
        self._sent_feedback: dict[str, Any] | None = None  # that of an exchange which failed here

        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._model, self._parameter_ids = model, {id(p) for p in parameters.values()}
        problem = _find_user(model) or _find_problem(parameters, self._optimizers)
        self._setup: dict[str, str | int] = {"every": self._every, "compressor": self._feedback.shared_spec}
        if problem is None:
            self._weights = GlobalWeights(parameters)
            self.outer: Optimizer = _make_outer(make_outer, list(self._weights.tensors.values()))
            self._setup["outer optimizer"] = type(self.outer).__name__
            places = enumerate(parameters.items())
            self._setup |= {f"parameter {place}": f"{name}, {describe_tensor(p)}" for place, (name, p) in places}
            self._setup |= {
                f"frozen parameter {name}": describe_tensor(p) if _has_values(p) else "without values"
                for name, p in self._frozen.items()
            }
        with torch.no_grad():
            self._join(group, problem)
        _in_use[id(model)] = self

    def step(self) -> bool:
        """Take a step of the inner optimizer, and end the round if it was the last one of it.

        Returns:
            Whether a round ended: then the parameters are the same on all ranks.

        Raises:
            PolicyError: on every rank, before anything is sent: a rank has weights that are not finite, or trains
                parameters that the model did not have, or that were frozen, when this was made.
            MismatchError: on every rank, before anything is sent: ranks are in other rounds, have other global weights
                or outer settings, or one did not end its round in time.
            MembershipError: this rank was left out since it was too slow, too few are left, or the store is gone.
        """
        for optimizer in self._optimizers:
            optimizer.step()
        return self.advance()

    def advance(self) -> bool:
        """Count an inner step that the loop took itself, by a `GradScaler` or with a closure; else as `step`."""
        self.steps_in_round += 1
        rounds, has_newcomers = self.round, False
        with torch.no_grad():
            if self._membership is not None and self._membership.has_ended():
                self._rebuild(self._membership)
            while self.steps_in_round >= self._every:
                try:
                    has_newcomers = self._end_round()
                except Exception as error:
                    self._rebuild_after(error)
            if self._membership is not None and has_newcomers:
                self._rebuild(self._membership)
        return self.round > rounds

    def rebuild(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        """Go on among the ranks of another group, after an error of the one before; a membership does it by itself.

        All ranks of the group call it at the same time; new ones make their LocalSteps instead. The ranks in the newest
        round keep what they have, and steps of a round that has not ended. The others take over global weights, outer
        state and round from the first of these. Those whose messages are part of that round keep their feedback; new
        ones, and EF21 on all ranks, begin with none. If this rank was at the end of a round, call `advance` next.

        Args:
            group: it need not have the same ranks, or as many.
            timeout: seconds to wait for each rank; None for the one given before.

        Raises:
            PolicyError: what is wrong with the model of one rank.
            MismatchError: ranks have other models, settings or global weights.
        """
        with torch.no_grad():
            self._enter(_check_group(group), None, self._timeout if timeout is None else timeout)

    def close(self) -> None:
        """Let the model have another LocalSteps; with a membership end that, after all members ended the same round."""
        if _in_use.get(id(self._model)) is self:
            del _in_use[id(self._model)]
        if self._membership is None or self._membership.has_left:
            return
        is_done = False
        with torch.no_grad():
            while not is_done:
                try:
                    if self.steps_in_round >= self._every:
                        self._end_round()
                    self._check.check(self._facts(), None, group_timeout(self._group))
                    is_done = True
                except Exception as error:
                    self._rebuild_after(error)
        self._membership.leave()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to continue bit for bit, with its model and inner optimizer. Tensors are not copied."""
        return {
            "config": self._config(),
            "round": self.round,
            "steps_in_round": self.steps_in_round,
            "weights": dict(self._weights.tensors),
            "outer": self.outer.state_dict(),
            "feedback": self._average.state_dict(),
            "residuals": dict(self._residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none. The model restores its parameters.

        Raises:
            MismatchError: it has another configuration, or other weights; or, at the end of the round, ranks loaded
                different steps.
        """
        _check_state(state)
        if dict(state["config"]) != self._config():
            problem, advice = f"a state of {dict(state['config'])}", "make it as it was saved, on as many ranks"
            raise MismatchError("LocalSteps", found=problem, expected=f"{self._config()}", do=advice)
        self._weights.check_fit(state["weights"])
        try:
            self.outer.load_state_dict(copy.deepcopy(state["outer"]))  # an optimizer goes on in the tensors it is given
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found, advice = f"what {type(self.outer).__name__} does not take ({error!r:.80})", "load it as it was saved"
            raise MismatchError("LocalSteps, outer", found=found, expected="its state", do=advice) from error
        with torch.no_grad():
            self._weights.load(state["weights"])
        self._average.load_state_dict(state["feedback"])
        self._residuals = {layout: residual.clone() for layout, residual in state["residuals"].items()}
        self._sent_feedback = None
        self.round, self.steps_in_round = int(state["round"]), int(state["steps_in_round"])

    def _join(self, group: dist.ProcessGroup | None, problem: Problem | None) -> None:
        """Enter a group that is given, or the next one of the membership."""
        membership = self._membership
        if membership is None:
            self._enter(_check_group(group), problem, self._timeout)
            return
        try:
            self._rebuild(membership, problem)
        except BaseException:
            membership.leave()
            raise

    def _rebuild_after(self, error: Exception) -> None:
        """Enter the next group if an error means that this one has lost a member; else raise it."""
        if self._membership is None or not is_lost(error):
            raise error
        self._rebuild(self._membership)

    def _rebuild(self, membership: Membership, problem: Problem | None = None) -> None:
        """Enter the next group of the membership, or the one after it if members die meanwhile."""
        is_entered = False
        while not is_entered:
            group = membership.form()
            try:
                self._enter(group, problem, group_timeout(group))
                is_entered = True
            except Exception as error:
                if not is_lost(error):
                    raise

    def _enter(self, group: dist.ProcessGroup, problem: Problem | None, timeout: float) -> None:
        """Bring all ranks of a group to the newest state that one of them has. This rank has all of a state or none."""
        self._group, self._check = group, RoundCheck(group, self._membership)
        try:
            self._check.check(self._setup, problem, timeout)
        except (PolicyError, MismatchError) as error:
            if self._membership is None or not self._has_shared_state:
                raise
            warn_user(f"a process that wanted to join was refused: {error}", UserWarning)
            raise LostMemberError("LocalSteps", found=error.message, do="form the next group") from error
        frozen = [parameter for parameter in self._frozen.values() if _has_values(parameter)]
        mine = {"round": self.round if self._has_shared_state else -1, "frozen": digest_tensors(frozen)}
        rounds = self._check.exchange(mine, timeout)
        newest = max(member["round"] for member in rounds)
        source = [member["round"] for member in rounds].index(newest)
        is_behind = not self._has_shared_state or self.round < newest
        if any(member["frozen"] != rounds[source]["frozen"] for member in rounds):
            for parameter in frozen:
                broadcast_parameter(parameter, source, group)
        if newest < 0 or any(member["round"] < newest for member in rounds):
            weights = self._weights.broadcast(source, group)
            outer = self._broadcast_outer(source, timeout) if newest >= 0 else None
            if is_behind:
                self._take_over(weights, outer)
        self._restart_feedback(max(newest, 0))
        self.round, self._has_shared_state = max(newest, 0), True
        self._check.check(self._facts(), None, timeout)

    def _broadcast_outer(self, source: int, timeout: float) -> dict[str, Any]:
        """The state of the outer optimizer of a rank of the group."""
        text, tensors = describe_state(self.outer) if self._group.rank() == source else ("", [])
        text = self._check.exchange({"outer": text}, timeout)[source]["outer"]
        device = next(iter(self._weights.tensors.values())).device
        return broadcast_tensors(text, tensors, device, source, self._group)

    def _take_over(self, weights: Mapping[str, torch.Tensor], outer: dict[str, Any] | None) -> None:
        self._weights.load(weights)
        self._weights.copy_to_parameters()
        if outer is not None:
            self.outer.load_state_dict(outer)
        self.steps_in_round = 0

    def _restart_feedback(self, newest: int) -> None:
        """Begin with feedback for another group in a round; what this rank's messages have lost is kept.

        A rank that is a round behind failed in an exchange that another one has ended, with all messages of this rank.
        """
        if self.round < newest and self._sent_feedback is not None:
            self._average.load_state_dict(self._sent_feedback)
            self._residuals = {}
        is_kept = self._has_shared_state and (self.round == newest or self._sent_feedback is not None)
        self._residuals = (self._residuals or self._average.residuals()) if is_kept else {}
        self._sent_feedback = None
        self._average.restart(dict.fromkeys(self._weights.layouts, newest))

    def _end_round(self) -> bool:
        """Average the pseudo-gradients, step the global weights, and write them into the parameters.

        Returns:
            Whether a rank knows of a process that waits to join: the same on all ranks.
        """
        try:
            self._weights.set_gradients()
            problem = self._find_unknown() or self._find_nonfinite()
            has_newcomers = self._check.check(self._facts(), problem, group_timeout(self._group))
            self._average_gradients()
            self.outer.step()
        finally:
            self._weights.clear_gradients()
        self._weights.copy_to_parameters()
        self.round, self.steps_in_round = self.round + 1, 0
        return has_newcomers

    def _average_gradients(self) -> None:
        """Average the pseudo-gradients; if that fails, feedback is as it was before."""
        before = copy.deepcopy(self._average.state_dict())
        try:
            self._weights.average_gradients(self._average, self._group, self._residuals)
        except BaseException:
            self._sent_feedback = copy.deepcopy(self._average.state_dict())
            self._average.load_state_dict(before)
            raise
        self._residuals, self._sent_feedback = {}, None

    def _facts(self) -> dict[str, str | int]:
        """What must be the same on all ranks whenever a round ends."""
        return {"round": self.round, "outer": _describe(self.outer), "global weights": self._weights.digest()}

    def _find_unknown(self) -> Problem | None:
        """A parameter that is trained and would not be averaged: ranks would have other values of it."""
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._parameter_ids:
                continue
            if self._frozen.get(name) is parameter:
                found, expected = "a parameter that requires a gradient since", "one that is frozen"
            else:
                found, expected = "a parameter that was added or replaced since", "one of those that the model had"
            advice = "delete this LocalSteps, and make it anew after the parameters of a model changed"
            return f"LocalSteps, {name}", found, f"{expected}, as when LocalSteps was made", advice
        return None

    def _find_nonfinite(self) -> Problem | None:
        nonfinite = self._weights.find_nonfinite()
        if nonfinite is None:
            return None
        name, count = nonfinite
        advice = "restore an earlier checkpoint on every rank, and look for what overflowed"
        return f"LocalSteps, pseudo-gradient of {name}", f"{count} values that are not finite", FINITE_VALUES, advice

    def _config(self) -> dict[str, Any]:
        """The configuration that a state to load must have. Feedback belongs to a rank among a number of them."""
        config = {"compressor": self._feedback.shared_spec, "outer": type(self.outer).__name__}
        place = "any" if self._feedback.is_stateless else f"{self._group.rank()} of {self._group.size()}"
        return {**config, "rank": place}


def _check_optimizers(optimizer: Any) -> list[Optimizer]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    is_list = isinstance(optimizers, list | tuple) and optimizers
    if not is_list or not all(isinstance(member, Optimizer) for member in optimizers):
        expected, advice = "an optimizer, or a list of them", "pass the optimizer that the loop steps"
        found = "an empty list" if isinstance(optimizer, list | tuple) and not optimizer else None
        found = found or validate.describe_value(optimizer)
        raise PolicyError("LocalSteps, optimizer", found=found, expected=expected, do=advice)
    return list(optimizers)


def _check_membership(membership: Any, group: Any) -> Membership | None:
    if membership is None:
        return None
    if group is not None:
        advice = "leave out the group: the membership forms it"
        raise PolicyError("LocalSteps", found="a group and a membership", expected="one of them", do=advice)
    expected, advice = "a Membership, or None", "make one: Membership(store, size)"
    validate.check_instance("LocalSteps, membership", membership, Membership, expected=expected, do=advice)
    checked: Membership = membership
    return checked


def _check_group(group: Any) -> dist.ProcessGroup:
    """The group, None for the default one; a PolicyError if it is none, or this rank is not in it."""
    where, expected, advice = "LocalSteps, group", "a process group of this rank", "call init_process_group before"
    if group is None:
        if not dist.is_initialized():
            raise PolicyError(where, found="no process group", expected=expected, do=advice)
        group = dist.distributed_c10d._get_default_group()
    checked: dist.ProcessGroup = validate.check_instance(
        where, group, dist.ProcessGroup, expected=expected, do="pass what new_group returned to one of its ranks"
    )
    return checked


def _check_state(state: Any) -> None:
    """Raise an error if this is not what `state_dict` returns, as far as types tell."""
    advice = "give what state_dict() of the same rank gave"
    check_entries("LocalSteps", state, _STATE_KEYS)
    for name in ("round", "steps_in_round"):
        validate.check_int(f"LocalSteps, {name} of a state", state[name], minimum=0, do=advice)
    for name in sorted(_STATE_KEYS - {"round", "steps_in_round"}):
        check_mapping(f"LocalSteps, {name} of a state", state[name])
    for layout, residual in state["residuals"].items():
        where = f"LocalSteps, residual {layout} of a state"
        validate.check_instance(where, residual, torch.Tensor, expected="a tensor", do=advice)


def _check_outer(outer: Any) -> OuterOptimizer:
    if isinstance(outer, type) or not callable(outer):
        expected, advice = "a function that makes an optimizer of tensors", "pass OuterSGD(lr=0.7, momentum=0.9)"
        raise validate.argument_error("LocalSteps, outer", outer, expected, advice)
    make_outer: OuterOptimizer = outer
    return make_outer


def _make_outer(make_outer: OuterOptimizer, tensors: list[torch.Tensor]) -> Optimizer:
    """The outer optimizer; a PolicyError if it is none, or not of exactly these tensors."""
    outer: Any = make_outer(tensors)
    where, advice = "LocalSteps, outer", "make one optimizer of all tensors that the function gets"
    if not isinstance(outer, Optimizer):
        raise validate.argument_error(where, outer, "a function that returns a torch.optim.Optimizer", advice)
    taken = {id(parameter) for group in outer.param_groups for parameter in group["params"]}
    known = {id(tensor) for tensor in tensors}
    if taken != known:
        found = f"an optimizer of {len(taken & known)} of them and of {len(taken - known)} others"
        raise PolicyError(where, found=found, expected=f"one of the {len(tensors)} tensors it is given", do=advice)
    return outer


def _has_values(parameter: nn.Parameter) -> bool:
    """Whether all values of a parameter are here."""
    return not (is_lazy(parameter) or isinstance(parameter, DTensor) or parameter.is_meta)


def _find_user(model: nn.Module) -> Problem | None:
    """Why this model cannot have a LocalSteps: it has one in use."""
    other = _in_use.get(id(model))
    if other is None or (other._membership is not None and other._membership.has_left):
        return None
    advice = "delete the other one, or call its close(), before making one again"
    return "LocalSteps, model", "a model that another LocalSteps averages", "a model of this one alone", advice


def _find_problem(parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> Problem | None:
    """Why these parameters cannot be averaged, as the parts of an error; None if they can."""
    if not parameters:
        return "LocalSteps, model", "no parameter that requires a gradient", "one or more", "pass what is trained"
    for name, parameter in parameters.items():
        where = f"LocalSteps, {name}"
        if is_lazy(parameter):
            return where, "a parameter without a shape", "one that has its values", "run the model once before"
        if parameter.is_meta:
            return where, "a parameter without values, on the meta device", "one that has them", "materialize the model"
        if isinstance(parameter, DTensor):
            advice = "use compress_fsdp, or local steps of models that every rank has whole"
            return where, "a sharded parameter", "a whole one", advice
        if not parameter.is_floating_point():
            return where, str(parameter.dtype), "a floating point dtype", "let it not require a gradient"
    known = {id(parameter) for parameter in parameters.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            strange = [p for p in group["params"] if p.requires_grad and id(p) not in known]
            if strange:
                found, advice = f"a tensor of shape {tuple(strange[0].shape)}", "pass the model that it trains"
                return "LocalSteps, optimizer", found, "parameters of the model", advice
    return None


def _describe(optimizer: Optimizer) -> str:
    """The type and the settings of an optimizer, as text."""
    groups = [
        ", ".join(f"{key}={value!r}" for key, value in sorted(group.items()) if key != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"
