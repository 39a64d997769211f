"""Local steps: ranks train alone, and average how far they moved once a round (DiLoCo, SparseLoCo)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, as_feedback
from shrinkpoint.comm.global_weights import GlobalWeights, describe_tensor
from shrinkpoint.comm.link import FINITE_VALUES, CompressorLike
from shrinkpoint.comm.outer_sgd import OuterOptimizer, OuterSGD
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, group_timeout
from shrinkpoint.comm.round_check import Problem, RoundCheck
from shrinkpoint.comm.sparse_allreduce import SparseAllReduce, is_sparse
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError

_STATE_KEYS = {"config", "round", "steps_in_round", "weights", "outer", "feedback"}


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
    feedback have the same size.

    Args:
        model: what requires a gradient is averaged; not sharded.
        optimizer: the inner one, or several; of parameters of the model.
        every: the number of steps in a round.
        outer: makes the outer optimizer; None for `OuterSGD()`, DiLoCo's own.
        compressor: for pseudo-gradients; None for no compression. SparseLoCo (arXiv 2508.15706) takes
            "ef(top1.5625:4096:q2:64, decay=0.95)", and `OuterSGD(lr=1.0, momentum=0.0)`.
        group: of the ranks that train together; None for the default group.
        timeout: seconds to wait here for each other rank. At the end of a round ranks wait as long as the group does.

    Attributes:
        outer: the outer optimizer. A scheduler may change its settings, alike on all ranks.
        link_stats: statistics of the messages since the start: of "all-gather", or of "first hop" and "second hop".
        round: how many rounds have ended.
        steps_in_round: how many steps this round has had.

    Raises:
        PolicyError: an argument is unusable. What is wrong with the model of one rank is raised on every rank.
        MismatchError: on every rank: ranks have other models or settings, or one did not call this.
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
        timeout: float = CONFIG_TIMEOUT,
    ) -> None:
        validate.check_instance("LocalSteps, model", model, nn.Module, expected="a model", do="pass the module itself")
        self._optimizers = _check_optimizers(optimizer)
        self._every = validate.check_int("LocalSteps, every", every, do="take 30")
        validate.check_float("LocalSteps, timeout", timeout)
        make_outer = _check_outer(OuterSGD() if outer is None else outer)
        self._feedback = as_feedback(compressor)
        average_type = SparseAllReduce if is_sparse(self._feedback) else CompressedAllReduce
        self._average: SparseAllReduce | CompressedAllReduce = average_type(self._feedback, name="local steps")
        self.link_stats: dict[str, LinkStats] = self._average.link_stats
        self._group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        self._check = RoundCheck(self._group)
        self.round, self.steps_in_round = 0, 0

        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        problem = _find_problem(parameters, self._optimizers)
        facts: dict[str, str | int] = {"every": self._every, "compressor": self._feedback.shared_spec}
        if problem is None:
            places = enumerate(parameters.items())
            facts |= {f"parameter {place}": f"{name}, {describe_tensor(p)}" for place, (name, p) in places}
        self._check.check(facts, problem, timeout)
        with torch.no_grad():
            self._weights = GlobalWeights(parameters)
            self._weights.broadcast(self._group)
        self.outer: Optimizer = make_outer(list(self._weights.tensors.values()))
        self._check.check(self._facts(), None, timeout)

    def step(self) -> bool:
        """Take a step of the inner optimizer, and end the round if it was the last one of it.

        Returns:
            Whether a round ended: then the parameters are the same on all ranks.

        Raises:
            PolicyError: on every rank, before anything is sent: a rank has weights that are not finite.
            MismatchError: on every rank, before anything is sent: ranks are in other rounds, have other global weights
                or outer settings, or one did not end its round in time.
        """
        for optimizer in self._optimizers:
            optimizer.step()
        return self.advance()

    def advance(self) -> bool:
        """Count an inner step that the loop took itself, by a `GradScaler` or with a closure; else as `step`."""
        self.steps_in_round += 1
        if self.steps_in_round < self._every:
            return False
        with torch.no_grad():
            self._end_round()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to continue bit for bit, with its model and inner optimizer. Tensors are not copied."""
        return {
            "config": self._config(),
            "round": self.round,
            "steps_in_round": self.steps_in_round,
            "weights": dict(self._weights.tensors),
            "outer": self.outer.state_dict(),
            "feedback": self._average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none. The model restores its parameters.

        Raises:
            MismatchError: it has another configuration, or other weights; or, at the end of the round, ranks loaded
                different steps.
        """
        if set(state) != _STATE_KEYS:
            problem, advice = f"a state of {sorted(map(str, state))}", "give what state_dict() of the same rank gave"
            raise MismatchError("LocalSteps", found=problem, expected=f"one of {sorted(_STATE_KEYS)}", do=advice)
        if dict(state["config"]) != self._config():
            problem, advice = f"a state of {dict(state['config'])}", "make it as it was saved, on as many ranks"
            raise MismatchError("LocalSteps", found=problem, expected=f"{self._config()}", do=advice)
        with torch.no_grad():
            self._weights.load(state["weights"])
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))  # an optimizer goes on in the tensors it is given
        self._average.load_state_dict(state["feedback"])
        self.round, self.steps_in_round = int(state["round"]), int(state["steps_in_round"])

    def _end_round(self) -> None:
        """Average the pseudo-gradients, step the global weights, and write them into the parameters."""
        try:
            self._weights.set_gradients()
            self._check.check(self._facts(), self._find_nonfinite(), group_timeout(self._group))
            self._weights.average_gradients(self._average, self._group)
            self.outer.step()
        finally:
            self._weights.clear_gradients()
        self._weights.copy_to_parameters()
        self.round, self.steps_in_round = self.round + 1, 0

    def _facts(self) -> dict[str, str | int]:
        """What must be the same on all ranks whenever a round ends."""
        return {"round": self.round, "outer": _describe(self.outer), "global weights": self._weights.digest()}

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
        raise validate.argument_error("LocalSteps, optimizer", optimizer, expected, advice)
    return list(optimizers)


def _check_outer(outer: Any) -> OuterOptimizer:
    if isinstance(outer, type) or not callable(outer):
        expected, advice = "a function that makes an optimizer of tensors", "pass OuterSGD(lr=0.7, momentum=0.9)"
        raise validate.argument_error("LocalSteps, outer", outer, expected, advice)
    make_outer: OuterOptimizer = outer
    return make_outer


def _find_problem(parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> Problem | None:
    """Why these parameters cannot be averaged, as the parts of an error; None if they can."""
    if not parameters:
        return "LocalSteps, model", "no parameter that requires a gradient", "one or more", "pass what is trained"
    for name, parameter in parameters.items():
        where = f"LocalSteps, {name}"
        if is_lazy(parameter):
            return where, "a parameter without a shape", "one that has its values", "run the model once before"
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
