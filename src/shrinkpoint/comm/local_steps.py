"""Local steps: ranks train alone, and average how far they moved once a round (DiLoCo, SparseLoCo)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.comm.compressed_manager import CompressedManager, is_lost
from shrinkpoint.comm.compressors.layout import count_nonfinite
from shrinkpoint.comm.global_weights import GlobalWeights, describe_tensor, digest_tensors
from shrinkpoint.comm.link import FINITE_VALUES, CompressorLike, LinkStats
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck
from shrinkpoint.comm.round_average import RoundAverage
from shrinkpoint.comm.state_check import SAME_ADVICE, STATE_ADVICE, check_entries, check_mapping
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.tree import num_reached, unsupported_feature

if TYPE_CHECKING:
    from torchft import Manager

_STATE_KEYS = {"config", "round", "steps_in_round", "weights", "outer", "feedback", "residuals"}
_in_use: WeakValueDictionary[int, LocalSteps] = WeakValueDictionary()
"""The LocalSteps of each parameter that is trained, by its `id`: two of one would average each other's rounds."""

Problem = tuple[str, str, str, str]
"""The `where`, `found`, `expected` and `do` of an error."""
OuterOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes the optimizer of the global weights, whose `grad` is the mean pseudo-gradient."""
_REACH, _FULL_ROUND = 0.6, 30
"""The mean movement is followed `ranks ** _REACH` times as far after rounds of `_FULL_ROUND` steps, less in shorter
ones. Both are the best of some in trainings of eight ranks (docs/wire_studies.md, "Local steps")."""


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the global weights, with Nesterov's momentum (arXiv 2311.08105, algorithm 1).

    The mean of more ranks has less noise, so it can be followed further: `lr / (1 - momentum)` times as far in the
    long run. By default that is `ranks ** 0.6`, of the ranks that average the round: 1.5 of two, 3.5 of eight. Rounds
    below 30 steps take less, and rounds of one step the mean itself. DiLoCo has `OuterSGD(lr=0.7, momentum=0.9)`, for
    hundreds of rounds. SparseLoCo (arXiv 2508.15706) has no outer momentum, since error feedback takes its place:
    `OuterSGD(momentum=0.0)`, whose step is the mean of what all ranks sent.

    Attributes:
        lr: the learning rate; with 1 and no momentum the global weights become the mean of all ranks' weights.
        momentum: from 0, without a memory, to 1; None for one by the ranks and the steps of a round.
        nesterov: True if the momentum is Nesterov's.

    Raises:
        PolicyError: a number out of range.
    """

    lr: float = 1.0
    momentum: float | None = None
    nesterov: bool = True

    def __post_init__(self) -> None:
        validate.check_float("OuterSGD, lr", self.lr)
        if self.momentum is not None:
            validate.check_float("OuterSGD, momentum", self.momentum, maximum=1.0, exclusive=False)
        validate.check_bool("OuterSGD, nesterov", self.nesterov)

    def __call__(self, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer of global weights; a momentum by the ranks is set by `adapt`."""
        momentum = 0.5 if self.momentum is None else self.momentum
        return torch.optim.SGD(weights, lr=self.lr, momentum=momentum, nesterov=self.nesterov and momentum > 0)

    def adapt(self, optimizer: torch.optim.Optimizer, *, ranks: int, every: int) -> None:
        """Set the momentum of an optimizer that this made, unless it is fixed, for a round's ranks and steps."""
        if self.momentum is None:
            share = min(1.0, math.log(every) / math.log(_FULL_ROUND))
            for group in optimizer.param_groups:
                group["momentum"] = 1 - ranks ** (-_REACH * share)


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

    With a manager of torchft ranks are replicas, which may die and join. Replicas that are left average the round among
    themselves. A replica that joins recovers global weights, outer state and round at the end of the others' round.

    Args:
        model: what requires a gradient is averaged; not sharded. Frozen parameters are taken from rank 0 once.
        optimizer: the inner one, or several; of parameters of the model.
        every: the number of steps in a round.
        outer: makes the outer optimizer; None for `OuterSGD()`, whose steps grow with the number of ranks.
        compressor: for pseudo-gradients; None for no compression. SparseLoCo (arXiv 2508.15706) takes
            "ef(top1.5625:4096:q2:64, decay=0.95)", and `OuterSGD(momentum=0.0)`.
        group: of the ranks that train together; None for the default group.
        manager: forms groups of the replicas that are alive, instead of `group`; with `use_async_quorum=False`. This
            call waits for the quorum. `shutdown` of the manager is the program's.
        timeout: seconds to wait here for each other rank of a group. At the end of a round ranks wait as long as the
            group does. With a manager its own timeouts count.

    Attributes:
        outer: the outer optimizer. A scheduler may change its settings, alike on all ranks; not a momentum that follows
            the ranks, which is set in each round.
        link_stats: statistics of the messages since the start: of "all-gather", or of "first hop" and "second hop".
        round: how many rounds have ended.
        steps_in_round: how many steps this round has had.

    Raises:
        PolicyError: an argument is unusable. What is wrong with the model of one rank is raised on every rank, such as
            another LocalSteps of it that is neither deleted nor closed.
        MismatchError: on every rank: ranks have other models or settings, or one did not call this. With a manager
            only the replica that joins gets these errors; the others go on without it.
        MembershipError: torchft formed no quorum in time, or gave up.
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
        manager: Manager | None = None,
        timeout: float = CONFIG_TIMEOUT,
    ) -> None:
        validate.check_instance("LocalSteps, model", model, nn.Module, expected="a model", do="pass the module itself")
        self._optimizers = _check_optimizers(optimizer)
        self._every = validate.check_int("LocalSteps, every", every, do="pass e.g. 30")
        validate.check_float("LocalSteps, timeout", timeout)
        self._make_outer = make_outer = OuterSGD() if outer is None else outer
        if isinstance(make_outer, type) or not callable(make_outer):
            expected, advice = "a function that makes an optimizer of tensors", "pass OuterSGD()"
            raise validate.argument_error("LocalSteps, outer", make_outer, expected, advice)
        if manager is not None and group is not None:
            advice = "leave out the group: the manager forms it"
            raise PolicyError("LocalSteps", found="a group and a manager", expected="one of them", do=advice)
        self._manager = None if manager is None else CompressedManager(manager, compressor)
        self._average = RoundAverage(compressor, "local steps") if self._manager is None else self._manager.average
        self.link_stats: dict[str, LinkStats] = self._average.link_stats
        self.round, self.steps_in_round = 0, 0

        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._model, self._parameter_ids = model, {id(p) for p in parameters.values()}
        problem = _find_problem(model, parameters, self._optimizers)
        self._setup: dict[str, str | int] = {"every": self._every, "compressor": self._average.feedback.shared_spec}
        if problem is None:
            self._weights = GlobalWeights(parameters)
            self.outer: Optimizer = _make_outer(make_outer, list(self._weights.tensors.values()))
            self._setup |= {"outer optimizer": type(self.outer).__name__, **_describe_model(parameters, self._frozen)}
        with torch.no_grad():
            if self._manager is None:
                self._enter(_check_group(group), problem, timeout)
            else:
                if problem is not None:
                    where, found, expected, advice = problem
                    raise PolicyError(where, found=found, expected=expected, do=advice)
                self._manager.register_state_dict_fn("shrinkpoint.LocalSteps", self._recover, self._recovery_state)
                self._commit_round(self._manager)
        _in_use.update(dict.fromkeys(self._parameter_ids, self))

    def step(self) -> bool:
        """Take a step of the inner optimizer, and end the round if it was the last one of it.

        Returns:
            Whether a round ended: then the parameters are the same on all ranks.

        Raises:
            PolicyError: on every rank, before anything is sent: a rank has weights that are not finite, or its model
                or its optimizers train parameters that were not there, or that were frozen, when this was made.
            MismatchError: on every rank, before anything is sent: ranks are in other rounds, have other global weights
                or outer settings, or one did not end its round in time.
            MembershipError: torchft formed no quorum in time, or gave up.
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
            if self._manager is None:
                self._end_round()
            else:
                self._commit_round(self._manager)
        return True

    def close(self) -> None:
        """Let the model have another LocalSteps. With a manager it waits until all replicas ended the same round."""
        if all(_in_use.get(key) is self for key in self._parameter_ids):
            for key in self._parameter_ids:
                del _in_use[key]
            if self._manager is not None:
                with torch.no_grad():
                    self._commit_round(self._manager)

    def state_dict(self) -> dict[str, Any]:
        """The state to continue bit for bit with, beside model and inner optimizer. Tensors are not copied."""
        return {
            "config": self._config(),
            "round": self.round,
            "steps_in_round": self.steps_in_round,
            "weights": dict(self._weights.tensors),
            "outer": self.outer.state_dict(),
            "feedback": self._average.state_dict(),
            "residuals": dict(self._average.residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none. The model restores its parameters.

        Raises:
            MismatchError: it has another configuration, or other weights; or, at the end of the round, ranks loaded
                different steps.
        """
        advice = STATE_ADVICE
        check_entries("LocalSteps", state, _STATE_KEYS)
        for name in ("round", "steps_in_round"):
            validate.check_int(f"LocalSteps, {name} of a state", state[name], minimum=0, do=advice)
        for name in sorted(_STATE_KEYS - {"round", "steps_in_round"}):
            check_mapping(f"LocalSteps, {name} of a state", state[name])
        for layout, residual in state["residuals"].items():
            where = f"LocalSteps, residual {layout} of a state"
            validate.check_instance(where, residual, torch.Tensor, expected="a tensor", do=advice)
        if dict(state["config"]) != self._config():
            problem, advice = f"a state of {dict(state['config'])}", "make it as it was saved, on as many ranks"
            raise MismatchError("LocalSteps", found=problem, expected=f"{self._config()}", do=advice)
        self._weights.check_fit(state["weights"])
        try:
            self.outer.load_state_dict(copy.deepcopy(state["outer"]))  # an optimizer goes on in the tensors it is given
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found, advice = f"what {type(self.outer).__name__} does not take ({error!r:.80})", STATE_ADVICE
            raise MismatchError("LocalSteps, outer", found=found, expected="its state", do=advice) from error
        with torch.no_grad():
            self._weights.load(state["weights"])
        self._average.load_state_dict(state["feedback"], state["residuals"])
        self.round, self.steps_in_round = int(state["round"]), int(state["steps_in_round"])

    def _enter(self, group: dist.ProcessGroup, problem: Problem | None, timeout: float) -> None:
        """Compare models and settings of all ranks of a group, and begin with the weights of rank 0."""
        advice = "make the same objects and take the same steps in the same order on all ranks"
        self._group, self._check = group, ConfigCheck(group, "local steps", "LocalSteps", _compare_facts, advice=advice)
        self._compare(self._setup, problem, timeout)
        frozen = [parameter for parameter in self._frozen.values() if _has_values(parameter)]
        self._check.publish({group.rank(): {"frozen": digest_tensors(frozen)}})
        digests = self._check.read(timeout)
        if any(digest != digests[0] for digest in digests):
            for parameter in frozen:
                values = parameter.detach().contiguous()
                dist.broadcast(values.view(-1).view(torch.uint8), dist.get_global_rank(group, 0), group)
                parameter.detach().copy_(values)
        self._weights.broadcast(group)
        self._compare(self._facts(), None, timeout)

    def _compare(self, facts: Mapping[str, str | int], problem: Problem | None, timeout: float | None = None) -> None:
        self._check.publish({self._group.rank(): {"facts": list(facts.items()), "problem": problem}})
        self._check.check(timeout)

    def _end_round(self) -> None:
        """Average the pseudo-gradients, step the global weights, and write them into the parameters."""
        is_done = False
        self._average.begin()
        try:
            self._weights.set_gradients()
            problem = self._find_unknown() or self._find_nonfinite()
            self._compare(self._facts(), problem)
            self._weights.average_gradients(lambda flat, name: self._average.average_(flat, self._group, name))
            is_done = True
        finally:
            self._average.end(is_done)
            if not is_done:
                self._weights.clear_gradients()
        self._step_outer(self._group.size())

    def _step_outer(self, ranks: int) -> None:
        if isinstance(self._make_outer, OuterSGD):
            self._make_outer.adapt(self.outer, ranks=ranks, every=self._every)
        try:
            self.outer.step()
        finally:
            self._weights.clear_gradients()
        self._weights.copy_to_parameters()
        self.round, self.steps_in_round = self.round + 1, 0

    def _commit_round(self, manager: CompressedManager) -> None:
        """End the round among the replicas of the next quorum. If one of them dies, do so again among the others."""
        is_committed = False
        while not is_committed:
            num_trained = 0
            manager.start_quorum()
            try:
                if manager.errored() is None:
                    num_trained = self._average_replicas(manager)
            except Exception as error:
                manager.report_error(error)
                manager.should_commit()  # no: feedback goes back
                self._weights.clear_gradients()
                if not is_lost(error):
                    raise
            else:
                is_committed = manager.should_commit()
        if num_trained:
            self._step_outer(num_trained)

    def _average_replicas(self, manager: CompressedManager) -> int:
        """Average the pseudo-gradients of the replicas that have trained a round, and return how many have.

        A replica that begins, recovers or closes has not, and sends zeros. If no replica has trained, nothing is sent.
        """
        self._weights.set_gradients()
        has_trained = self.steps_in_round >= self._every and manager.is_participating()
        problem = self._find_unknown() or self._find_nonfinite()
        message = {"facts": list(self._facts().items()), "problem": problem, "has_trained": has_trained}
        gradients = [weights.grad for weights in self._weights.tensors.values() if weights.grad is not None]
        messages = manager.gather(message, gradients[0].device)
        _compare_facts(messages)
        num_trained: int = sum(message["has_trained"] for message in messages)
        if not num_trained:
            self._weights.clear_gradients()
            return 0
        if not has_trained:
            torch._foreach_zero_(gradients)
        self._weights.average_gradients(lambda flat, name: self._average.average_(flat, manager.group, name))
        if num_trained < len(messages):
            torch._foreach_mul_(gradients, len(messages) / num_trained)
        return num_trained

    def _recovery_state(self) -> dict[str, Any]:
        return {
            "setup": self._setup,
            "round": self.round,
            "weights": dict(self._weights.tensors),
            "outer": self.outer.state_dict(),
            "frozen": {name: p.detach() for name, p in self._frozen.items() if _has_values(p)},
        }

    def _recover(self, state: Any) -> None:
        setups = [list(setup.items()) for setup in (state["setup"], self._setup)]
        _compare_facts([{"facts": setup, "problem": None} for setup in setups])
        self._weights.load(state["weights"])
        self._weights.copy_to_parameters()
        for name, values in state["frozen"].items():
            self._frozen[name].detach().copy_(values)
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))
        self.round, self.steps_in_round = state["round"], 0

    def _facts(self) -> dict[str, str | int]:
        """The facts that must be the same on all ranks whenever a round ends."""
        digest = digest_tensors(self._weights.tensors.values())
        return {"round": self.round, "outer": _describe(self.outer), "global weights": digest}

    def _find_unknown(self) -> Problem | None:
        """A parameter that is trained and would not be averaged: ranks would have other values of it."""
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._parameter_ids:
                continue
            if self._frozen.get(name) is parameter:
                found, expected = "a parameter that requires a gradient since", "one that is frozen"
            else:
                found, expected = "a parameter that was added or replaced since", "one of those that the model had"
            advice = "delete this LocalSteps, and make a new one after the parameters of a model change"
            return f"LocalSteps, {name}", found, f"{expected}, as when LocalSteps was made", advice
        return _find_unknown_parameter(self._optimizers, self._parameter_ids)

    def _find_nonfinite(self) -> Problem | None:
        advice = "restore an earlier checkpoint on every rank, and find out what overflowed"
        for name, weights in self._weights.tensors.items():
            assert weights.grad is not None
            if count := int(count_nonfinite(weights.grad)):
                found = f"{count} values that are not finite"
                return f"LocalSteps, pseudo-gradient of {name}", found, FINITE_VALUES, advice
        return None

    def _config(self) -> dict[str, Any]:
        """The configuration that a state to load must have. Feedback belongs to a rank among a number of them."""
        feedback = self._average.feedback
        is_any = feedback.is_stateless or self._manager is not None
        place = "any" if is_any else f"{self._group.rank()} of {self._group.size()}"
        return {"compressor": feedback.shared_spec, "outer": type(self.outer).__name__, "rank": place}


def _check_optimizers(optimizer: Any) -> list[Optimizer]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    is_list = isinstance(optimizers, list | tuple) and optimizers
    if not is_list or not all(isinstance(member, Optimizer) for member in optimizers):
        expected, advice = "an optimizer, or a list of them", "pass the optimizer that the loop steps"
        found = "an empty list" if isinstance(optimizer, list | tuple) and not optimizer else None
        found = found or validate.describe_value(optimizer)
        raise PolicyError("LocalSteps, optimizer", found=found, expected=expected, do=advice)
    return list(optimizers)


def _check_group(group: Any) -> dist.ProcessGroup:
    """The group, None for the default one; a PolicyError if it is none, or this rank is not in it."""
    where, expected, advice = "LocalSteps, group", "a process group of this rank", "call init_process_group first"
    if group is None:
        if not dist.is_initialized():
            raise PolicyError(where, found="no process group", expected=expected, do=advice)
        group = dist.distributed_c10d._get_default_group()
    checked: dist.ProcessGroup = validate.check_instance(
        where, group, dist.ProcessGroup, expected=expected, do="pass what new_group returned to one of its ranks"
    )
    return checked


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


def _compare_facts(messages: Sequence[Any]) -> None:
    """Raise an error if a rank has a problem, or if facts of two ranks differ.

    Args:
        messages: for each rank "facts", pairs of a name and a value; and "problem", the parts of an error, or None.
    """
    for rank, message in enumerate(messages):
        if message["problem"] is not None:
            place, found, expected, advice = message["problem"]
            raise PolicyError(f"{place}, rank {rank}", found=found, expected=expected, do=advice)
    first = dict(messages[0]["facts"])
    for rank, message in enumerate(messages):
        facts = dict(message["facts"])
        for name in {**first, **facts}:
            if first.get(name) != facts.get(name):
                problem = f"{name}: {first.get(name, 'none')} on rank 0, {facts.get(name, 'none')} on rank {rank}"
                advice = SAME_ADVICE
                if name in ("round", "global weights"):
                    advice = "call step equally often on all ranks, and load the state of the same step, or none"
                raise MismatchError("LocalSteps", found=problem, expected="the same on all ranks", do=advice)


def _describe_model(trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The parameters that must be alike on all ranks, as text by a name for messages."""
    texts = {f"parameter {at}": f"{name}, {describe_tensor(p)}" for at, (name, p) in enumerate(trained.items())}
    for name, p in frozen.items():
        texts[f"frozen parameter {name}"] = describe_tensor(p) if _has_values(p) else "without values"
    return texts


def _has_values(parameter: nn.Parameter) -> bool:
    return not (is_lazy(parameter) or isinstance(parameter, DTensor) or parameter.is_meta)


def _find_problem(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> Problem | None:
    """Why these parameters of a model cannot be averaged, as the parts of an error; None if they can."""
    known = {id(parameter) for parameter in parameters.values()}
    if any(key in _in_use for key in known):
        advice = "delete the other one, or call its close(), before you make another"
        return "LocalSteps, model", "parameters that another LocalSteps averages", "those of this one alone", advice
    if not parameters:
        return "LocalSteps, model", "no parameter that requires a gradient", "one or more", "pass one that trains"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or _has_values(parameter):
            reason = _why_not_sent(parameter)
            if reason is not None:
                return f"LocalSteps, {name}", *reason
    return _find_unknown_parameter(optimizers, known)


def _why_not_sent(parameter: nn.Parameter) -> tuple[str, str, str] | None:
    """Why a parameter cannot be averaged, or sent where it is frozen, as `found`, `expected` and `do` of an error."""
    if is_lazy(parameter):
        return "a parameter without a shape", "one that has its values", "run the model once first"
    if parameter.is_meta:
        return "a parameter without values, on the meta device", "one that has them", "materialize the model"
    if isinstance(parameter, DTensor):
        advice = "use compress_fsdp, or local steps of models that every rank has whole"
        return "a sharded parameter", "a whole one", advice
    if feature := unsupported_feature(parameter):
        return feature, "a dense tensor with values", "make it a buffer, which each rank has of its own"
    if num_reached(parameter) < parameter.numel():
        found, advice = "a tensor whose elements share memory, as expand() makes it", "give it memory: tensor.clone()"
        return found, "memory for each element", advice
    if parameter.requires_grad and not (parameter.is_floating_point() and parameter.itemsize > 1):
        return str(parameter.dtype), "a floating-point dtype of 16 bits or more", "set requires_grad=False"
    return None


def _find_unknown_parameter(optimizers: Sequence[Optimizer], known: Container[int]) -> Problem | None:
    """A tensor that optimizers train and that is none of the parameters with these `id`s."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for strange in (p for p in group["params"] if p.requires_grad and id(p) not in known):
            found, advice = f"a tensor of shape {tuple(strange.shape)}", "make LocalSteps of the model that it trains"
            return "LocalSteps, optimizer", found, "parameters that the model had when LocalSteps was made", advice
    return None


def _describe(optimizer: Optimizer) -> str:
    groups = [
        ", ".join(f"{key}={value!r}" for key, value in sorted(group.items()) if key != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"
