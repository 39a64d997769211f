"""Compression of the gradients of DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint import validate
from shrinkpoint.comm.background_allreduce import BackgroundAllReduce, HierarchicalAllReduce, NodeGroups
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, check_hops, is_gloo
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.gradient_averaging import GradientAveraging, not_replayable
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL, GradientCollector, GradientLayout, Segment
from shrinkpoint.comm.gradient_record import AverageRecord
from shrinkpoint.comm.link import CompressorLike, LinkStats, NonfinitePolicy, nonfinite_error
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.low_rank_allreduce import LowRankAllReduce, LowRankState, MatrixLayout
from shrinkpoint.comm.moment_allreduce import MomentAllReduce
from shrinkpoint.comm.moment_steps import MomentSteps, SecondMoments, SegmentRoots
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, ConfigCheck, replica_check
from shrinkpoint.comm.spec import parse
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON

BucketFunction = Callable[[Any], "torch.futures.Future[Any] | Tensor | None"]
"""Changes a `torch.distributed.GradBucket` in place and returns None, or returns its values or a future of them."""
_MIXED_PRECISION_HOOK = "_reducer_allreduce_and_upcast_hook"
"""The hook of torch's own that DistributedDataParallel registers for `mixed_precision`."""


def compress_ddp(
    model: DistributedDataParallel,
    compressor: CompressorLike | LowRank | MomentSteps = "q4:64",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    average_compressor: CompressorLike = None,
    before: BucketFunction | None = None,
    ranks_per_node: int = 1,
    min_numel: int = 0,
    segment_numel: int = SEGMENT_NUMEL,
    nonfinite: NonfinitePolicy = "pass",
    timeout: float = CONFIG_TIMEOUT,
) -> DDPCompression:
    """Average the gradients of a model in compressed messages, instead of torch's all-reduce.

    Gradients are cut and joined to segments of about 4 MB, whatever DDP's buckets are. Each segment takes two hops:
    every rank sends a compressed share of it to each other rank, adds up the shares it receives in float32, and sends
    the compressed average to all. All ranks decode the same bytes, so replicas stay equal to the last bit. This runs
    beside the backward pass: in threads on gloo, on a stream of its own on nccl. A backward pass ends when all of it is
    done, and raises what went wrong.

    Segments follow from the parameters alone, and a gradient starts at a multiple of 64 values: a run that is resumed
    gives the same bits as one that was not, with what `state_dict` returns if there is feedback. With a `GradScaler`
    the feedback is in units of the scaled loss.

    Args:
        model: before its first backward pass, without another hook; on every rank of its group.
        compressor: for gradients. Groups and shares are those of a segment, in which the gradients of many parameters
            are concatenated: "row" and "channel" are not meaningful. `LowRank`, such as "lowrank4(q8:64)", sends
            matrices as factors. `MomentSteps`, such as "v0.7", rounds gradients to steps of the optimizer's second
            moment and entropy-codes them, on gloo.
        optimizer: for `MomentSteps`: it has a second moment on every rank, as Adam, AdamW and RMSprop do. With another
            compressor it is not used.
        average_compressor: for their average; None for `compressor`, with feedback of its own if that has one: what
            either hop loses is sent later. With `LowRank` for the average of factors, and of what is not sent as
            factors. Not with `MomentSteps`.
        before: called with each bucket of this rank before its gradients are taken, since DDP has one hook a model: it
            changes `bucket.buffer()` in place, or returns its values or a future of them, which is waited for. A hook
            of torch is `functools.partial(hook, state)`.
        ranks_per_node: average in two levels: exact within a node, of so many ranks that follow each other in the group
            (`int(os.environ["LOCAL_WORLD_SIZE"])` under torchrun), and compressed between nodes. Not with `LowRank`.
        min_numel: gradients of smaller parameters are sent uncompressed.
        segment_numel: at most about this number of values is encoded and sent as one. Fewer take more time each; with
            more, less of the communication runs beside the backward pass. `LowRank` does not cut a matrix.
        nonfinite: "pass": a value that is not finite reaches every rank as such, with the values encoded together with
            it, so that a `GradScaler` skips the step. "raise": it is an error on every rank.
        timeout: seconds that the first backward pass waits for the configuration of each other rank.

    Returns:
        The handle: statistics and state. A deep copy of the model averages as torch does until it is compressed itself.

    Raises:
        PolicyError: another kind of model, one with a hook, or an unusable compressor, optimizer or invalid spec.
        MismatchError: in the first backward pass: ranks are configured differently. On every rank that called this; one
            that did not gets torch's error once another has ended. With `MomentSteps` in any backward pass: ranks have
            different second moments.
    """
    options = min_numel, segment_numel, nonfinite, timeout, optimizer
    replicas = DDPCompression(model, compressor, average_compressor, before, ranks_per_node, *options)
    model.register_comm_hook(replicas, _comm_hook)
    return replicas


def _comm_hook(state: DDPCompression, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


_comm_hook.__annotations__ = {}  # torch compares them with types, and these are strings
_comm_hook.__qualname__ = "compress_ddp"  # what torch's log of the model, and the error of a second call, name


class DDPCompression(GradientAveraging[AverageRecord]):
    """Handle of the compressed gradients of one model, which `compress_ddp` returns.

    Attributes:
        link_stats: statistics of "first hop" and "second hop" since the start. With `LowRank` these are of left factors
            and of what is not sent as factors, "first hop, right" and "second hop, right" of right factors; the sizes
            of tensors are those of factors. With `ranks_per_node` these are between nodes, and "first hop, node" and
            "second hop, node" within one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compressor: CompressorLike | LowRank | MomentSteps,
        average_compressor: CompressorLike = None,
        before: BucketFunction | None = None,
        ranks_per_node: int = 1,
        min_numel: int = 0,
        segment_numel: int = SEGMENT_NUMEL,
        nonfinite: NonfinitePolicy = "pass",
        timeout: float = CONFIG_TIMEOUT,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        _check_model(model)
        if before is not None and not callable(before):
            advice = "pass e.g. lambda bucket: bucket.buffer().mul_(0.5), or partial(hook, state) of a hook of torch"
            raise validate.argument_error("compress_ddp, before", before, "a function of a bucket", advice)
        super().__init__("compress_ddp", min_numel, nonfinite, timeout)
        validate.check_int("compress_ddp, segment_numel", segment_numel)
        self._group: dist.ProcessGroup = model.process_group
        validate.check_int("compress_ddp, ranks_per_node", ranks_per_node)
        if self._group.size() % ranks_per_node:
            problem, expected = f"{ranks_per_node} of {self._group.size()} ranks", "a divisor of the number of ranks"
            advice = "run as many ranks on every node, or leave ranks_per_node out"
            raise PolicyError("compress_ddp, ranks_per_node", found=problem, expected=expected, do=advice)
        self._ranks_per_node, self._average_compressor, self._before = ranks_per_node, average_compressor, before
        given = parse(compressor) if isinstance(compressor, str) else compressor
        low_rank = given if isinstance(given, LowRank) else None
        plain = given.compressor if isinstance(given, LowRank | MomentSteps) else given
        self._all_reduce = CompressedAllReduce(plain, average_compressor, name="ddp")
        self._exact_all_reduce = CompressedAllReduce(None, name="ddp", link_stats=self._all_reduce.link_stats)
        self._node_all_reduce = CompressedAllReduce(None, name="ddp node") if ranks_per_node > 1 else None
        self.link_stats: dict[str, LinkStats] = self._all_reduce.link_stats
        if self._node_all_reduce is not None:
            self.link_stats |= {f"{hop}, node": stats for hop, stats in self._node_all_reduce.link_stats.items()}
        parameters = reduced_parameters(model)
        self._low_rank: LowRankState | None = None
        if low_rank is None:
            self._layout = GradientLayout(parameters, min_numel, segment_numel)
        elif ranks_per_node > 1:
            problem, advice = f"{low_rank} and ranks_per_node={ranks_per_node}", "leave out one of them"
            raise PolicyError("compress_ddp", found=problem, expected="one level of low rank", do=advice)
        else:
            layout = self._layout = MatrixLayout(parameters, low_rank, min_numel, segment_numel)
            all_reduce = CompressedAllReduce(plain, average_compressor, name="ddp right")
            self._low_rank = LowRankState(low_rank, layout, all_reduce)
            self.link_stats |= {f"{hop}, right": stats for hop, stats in all_reduce.link_stats.items()}
        used = [parameter for _, parameter in parameters]
        self._moments = self._make_moments(given, optimizer, used) if isinstance(given, MomentSteps) else None
        self._collector = GradientCollector(self._layout)
        self._background: dict[torch.device, BackgroundAllReduce] = {}
        self._buckets: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        self._num_parameters, self._num_handed_over = len(parameters), 0
        self._config_check: ConfigCheck | None = self._make_config_check()
        self._model = weakref.ref(model)  # its reducer has this object, which no garbage collector sees

    def _make_moments(self, steps: MomentSteps, optimizer: object, parameters: Sequence[Tensor]) -> MomentAllReduce:
        where, group, ranks_per_node = f"compress_ddp, {steps}", self._group, self._ranks_per_node
        if self._average_compressor is not None:
            problem, advice = f"{steps} and average_compressor={self._average_compressor}", "leave out one of them"
            raise PolicyError("compress_ddp", found=problem, expected="steps on both hops", do=advice)
        if optimizer is None:
            advice = f'call compress_ddp(model, "{steps}", optimizer=optimizer), or pass "q4:64"'
            expected = "the optimizer with the second moments"
            raise PolicyError(where, found="no optimizer", expected=expected, do=advice)
        devices = [segment.device for segment in self._layout.segments if not is_gloo(group, segment.device)]
        if devices:
            found, expected = (
                f"gradients on {devices[0]}, or a group without gloo",
                "gradients on a CPU that gloo sends",
            )
            raise PolicyError(where, found=found, expected=expected, do='pass "q4:64", which has kernels')
        sizes = group.size() // ranks_per_node, group.rank() % ranks_per_node, ranks_per_node
        roots = SegmentRoots(self._layout, parameters, SecondMoments(optimizer))
        return MomentAllReduce(steps, roots, self._layout, sizes, self.link_stats)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to average the gradients of one bucket in its own buffer: the communication hook.

        The last bucket of a step waits for all.
        """
        if self._config_check is not None:  # in the first backward pass
            self._config_check.check()
            self._config_check = None
        try:
            if self._before is not None:
                _apply_before(self._before, bucket)
            if not self._buckets:
                self._num_handed_over = 0
                if self._record is not None:
                    self._record.clear()  # gradients contain those of the backward passes before
                if self._group.size() > 1:
                    for name, _ in reduced_parameters(self.model, known=self._layout.names):
                        raise _not_averaged(name)
                    if self._moments is not None:
                        self._moments.begin(self._group, self._timeout)
                    for device in dict.fromkeys(segment.device for segment in self._layout.segments):
                        if device not in self._background:
                            self._background[device] = self._make_background(device)
                        self._background[device].begin([one for one in self._layout.segments if one.device == device])
            future = self._submit(bucket)
            self._num_handed_over += len(bucket.parameters())
            # in the first step of a static graph torch calls no bucket the last
            is_all = self.model.static_graph and self._num_handed_over == self._num_parameters
            if bucket.is_last() or is_all:
                self._end_step()
        except BaseException:
            self._buckets, self._collector = [], GradientCollector(self._layout)
            raise
        return future

    def _submit(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            advice = "pass sparse=False to the embedding"
            raise PolicyError("compress_ddp", found="a sparse gradient", expected="dense gradients", do=advice)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        self._buckets.append((buffer, future))
        if self._group.size() == 1 and self._record is None:
            return future
        flat, start = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer, 0
        for parameter in bucket.parameters():
            end = start + parameter.numel() * (2 if parameter.is_complex() else 1)
            for filled in self._collector.add(parameter, flat[start:end]):
                if self._group.size() > 1:
                    self._background[buffer.device].submit(filled)
                elif self._record is not None:
                    self._record.add_own(filled)
            start = end
        return future

    def _end_step(self) -> None:
        """Wait for all segments, and let the backward pass end."""
        missing = self._collector.end_step()
        if missing and self._group.size() > 1:
            advice = "call compress_ddp right after making the model, and do not change requires_grad later"
            problem = f"no gradient of {', '.join(missing[:4])}"
            raise PolicyError("compress_ddp", found=problem, expected="a gradient of each parameter", do=advice)
        for background in self._background.values():
            background.wait()
        buckets, self._buckets = self._buckets, []
        for index, (buffer, future) in enumerate(buckets):
            if self._nonfinite == "raise" and not bool(buffer.isfinite().all()):
                raise nonfinite_error(f"gradients, bucket {index}")
            future.set_result(buffer)

    def _make_background(self, device: torch.device) -> BackgroundAllReduce:
        is_one_node = self._group.size() == self._ranks_per_node > 1

        def all_reduce_for(segment: Segment) -> CompressedAllReduce:
            if segment.is_exact or is_one_node:
                return self._exact_all_reduce
            moments = self._moments
            return self._all_reduce if moments is None or not moments.serves(segment.index) else moments.all_reduce

        if self._node_all_reduce is not None:
            groups = NodeGroups(self._group, self._ranks_per_node)
            return HierarchicalAllReduce(groups, device, self._node_all_reduce, all_reduce_for)
        if self._low_rank is None:
            return BackgroundAllReduce.create(self._group, device, all_reduce_for)
        return LowRankAllReduce(self._group, device, all_reduce_for, self._low_rank)

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank; each rank has its own. Tensors are not copied."""
        state: dict[str, Any] = {"words": self.config(), "hops": self._all_reduce.state_dict(), **self._rank_state()}
        if self._low_rank is not None:
            state["low_rank"] = self._low_rank.state_dict()
        if self._moments is not None:
            state["moment_steps"] = self._moments.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of this rank returned; on all ranks, or on none.

        Raises:
            MismatchError: it has another configuration, or is of another rank, whose messages have lost something else;
                or, in the next backward pass, ranks loaded different steps.
        """
        self._check_common_state(state, self.state_dict())
        check_hops("compress_ddp", state["hops"])
        if self._low_rank is not None:
            self._low_rank.load_state_dict(state["low_rank"])
        if self._moments is not None:
            self._moments.load_state_dict(state["moment_steps"])
        self._all_reduce.load_state_dict(state["hops"])
        self._config_check = self._make_config_check()

    def _feedbacks(self) -> Iterable[ErrorFeedback]:
        return [hop.feedback for hop in self._all_reduce.hops]

    def _rank_state(self) -> dict[str, str]:
        is_of_share = self._moments is not None and self._ranks_per_node > 1
        if self._low_rank is not None or is_of_share:  # a residual of each matrix, the scales of shares
            return {"rank": f"rank {self._group.rank()} of {self._group.size()}"}
        return super()._rank_state()

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose gradients are compressed; a PolicyError if nobody has it any more."""
        model = self._model()
        if model is None:
            raise PolicyError("compress_ddp", found="a model that was deleted", expected="a model in use", do="keep it")
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> DDPCompression:
        """This object: torch copies the list of a model's hooks with the model, and calls none of them for the copy."""
        return self

    @property
    def module(self) -> nn.Module:
        """The model that DDP wraps."""
        module: nn.Module = self.model.module
        return module

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the model."""
        return self._group

    def parameters(self) -> list[Tensor]:
        """All parameters of the model."""
        return list(self.module.parameters())

    def record_gradients(self, compressor: CompressorLike = None) -> AverageRecord:
        """Keep the encoded averages of the last backward pass from now on, for a journal.

        Raises:
            PolicyError: the gradients do not follow from these bytes alone, or they are kept for another journal; a
                compressor, since what is kept is what was sent.
        """
        self._check_recordable()
        self._check_not_recorded()
        if compressor is not None:
            found, advice = f"shard_compressor={compressor}", "leave it out: DDP records what it has sent"
            raise PolicyError("journal", found=found, expected="None", do=advice)
        parameters = [parameter for _, parameter in reduced_parameters(self.model)]
        hops = self._all_reduce.all_gather, self._exact_all_reduce.all_gather
        self._record = AverageRecord(parameters, self._layout, self._group, hops)
        return self._record

    def counts(self) -> int:
        """The number of steps whose gradients were sent; 0 on a group of one rank."""
        hops = self._all_reduce.all_gather, self._exact_all_reduce.all_gather
        return max((count for hop in hops for count in hop.counts().values()), default=0)

    def restart(self, counts: JSON) -> None:
        """Go on as if so many steps had been made, without feedback of earlier ones; on all ranks alike."""
        if type(counts) is not int or counts < 0:
            expected, advice = "a number of steps", "restore what this model has written"
            raise MismatchError("compress_ddp", found=f"{counts!r:.60}", expected=expected, do=advice)
        for is_exact, all_reduce in enumerate((self._all_reduce, self._exact_all_reduce)):
            segments = [segment for segment in self._layout.segments if segment.is_exact == bool(is_exact)]
            all_reduce.restart({segment.name: counts for segment in segments if counts})
        self._config_check = self._make_config_check()

    def _check_recordable(self) -> None:
        """Raise PolicyError if the gradients do not follow from the bytes of the second hop alone."""
        problem = advice = ""
        if self._low_rank is not None:
            problem, advice = f"{self._low_rank.spec}, whose factors each rank remembers", 'use "q4:64"'
        elif self._moments is not None:
            problem, advice = f"{self._moments.spec}, whose steps are not on the wire", 'use "q4:64"'
        elif self._ranks_per_node > 1:
            problem, advice = "averages of which each rank decodes a share", "leave out ranks_per_node"
        elif not (last := self._all_reduce.all_gather.feedback).has_stateless_receiver:
            problem = f"{last} on the second hop, where each rank remembers what it has received"
            advice = f'compress with "ef({last.compressor})", or set average_compressor="{last.compressor}"'
        elif self.model.find_unused_parameters:
            problem, advice = "find_unused_parameters=True: messages do not say which are unused", "use all parameters"
        elif getattr(self.model, "mixed_precision", None) is not None:
            problem, advice = "gradients in another dtype than their parameters", "use torch.autocast"
        else:
            trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
            ignored = [name for name in trained if name in self.model.parameters_to_ignore]
            if ignored:
                problem, advice = f"{ignored[0]}, which DDP ignores", "freeze it, or let DDP average it"
        if problem:
            raise not_replayable(problem, advice)

    def config(self) -> dict[str, Any]:
        """The configuration that all ranks, and a state to load, must have in common."""
        spec = self._all_reduce.reduce_scatter.feedback.shared_spec
        spec = spec if self._low_rank is None else self._low_rank.spec
        spec = spec if self._moments is None else self._moments.spec
        average_spec = None if self._average_compressor is None else str(self._average_compressor)
        config = {"how": spec, "second": average_spec, "min_numel": self._min_numel, "nonfinite": self._nonfinite}
        config |= {"ranks_per_node": self._ranks_per_node} if self._ranks_per_node > 1 else {}
        return {**config, "layout": self._layout.digest()}

    def _make_config_check(self) -> ConfigCheck:
        config = {**self.config(), "counts": self._all_reduce.reduce_scatter.counts()}
        if self._low_rank is not None:
            config["right counts"] = self._low_rank.all_reduce.reduce_scatter.counts()
        if self._moments is not None:
            config |= self._moments.counts()
        return replica_check(self._group, "compress_ddp", config, self._timeout)


def reduced_parameters(model: DistributedDataParallel, known: Container[int] = ()) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients DDP averages, with their names, without those of known ids."""
    new = ((name, p) for name, p in model.module.named_parameters() if p.requires_grad and id(p) not in known)
    return [(name, p) for name, p in new if name not in model.parameters_to_ignore]


def _not_averaged(name: str) -> PolicyError:
    """The error of a trained parameter that DDP does not average: replicas would differ from now on."""
    found = "a parameter that was added, or has required a gradient, since the model was wrapped"
    advice = "wrap and compress the model again after its parameters change"
    return PolicyError(f"compress_ddp, {name}", found=found, expected="one that DDP averages", do=advice)


def _check_model(model: object) -> None:
    """Raise PolicyError if gradients of a model cannot be compressed, such as of one that has a communication hook.

    torch takes one hook, and does not give it back. torch itself adds one at once for `mixed_precision`, and one at the
    first forward pass for optimizers in the backward pass.
    """
    if not isinstance(model, DistributedDataParallel):
        problem, expected = validate.type_name(model), "a DistributedDataParallel model"
        is_compiled = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        advice = "pass the model that torch.compile got" if is_compiled else "wrap it first"
        raise PolicyError("compress_ddp", found=problem, expected=expected, do=advice)
    if getattr(model, "skip_all_reduce_unused_params", False):
        advice = "leave it out: with find_unused_parameters=True such gradients are sent as zeros"
        problem = "skip_all_reduce_unused_params=True"
        raise PolicyError("compress_ddp", found=problem, expected="every gradient in each step", do=advice)
    reduced = getattr(model, "_module_parameters", ())  # the parameters in which DDP looks for such optimizers, too
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in reduced):
        problem, expected = "optimizers in the backward pass, which have a hook of DDP", "optimizers that a loop steps"
        advice = "leave out _apply_optimizer_in_backward, and step an optimizer after the backward pass"
        raise PolicyError("compress_ddp", found=problem, expected=expected, do=advice)
    data: dict[str, Any] = model._get_ddp_logging_data()
    hook = data.get("comm_hook")
    if hook == _MIXED_PRECISION_HOOK:
        advice = "leave out mixed_precision= of DistributedDataParallel, and use torch.autocast"
        raise PolicyError("compress_ddp", found="a model with mixed_precision", expected="one without it", do=advice)
    if hook:
        problem, expected = f"a model with the hook {hook}", "one without a hook"
        advice = "compress a new DistributedDataParallel without it; to change gradients first, pass before="
        raise PolicyError("compress_ddp", found=problem, expected=expected, do=advice)


def _apply_before(function: BucketFunction, bucket: Any) -> None:
    """Replace the gradients of a bucket by the result of a user's function, and wait for it if that is a future."""
    result: Any = function(bucket)
    if isinstance(result, torch._C.Future):  # the base of torch.futures.Future and of a collective's future
        result = result.wait()
    if isinstance(result, list | tuple) and len(result) == 1:  # the future of a collective has a list
        result = result[0]
    if result is None:
        return
    buffer = bucket.buffer()
    if not isinstance(result, Tensor) or result.shape != buffer.shape:
        problem = f"a tensor of {result.numel()} values" if isinstance(result, Tensor) else validate.type_name(result)
        expected = f"None, or the {buffer.numel()} values of the bucket as a tensor or a future"
        advice = "change bucket.buffer() in place, or return a tensor like it"
        raise PolicyError("compress_ddp, before", found=problem, expected=expected, do=advice)
    buffer.copy_(result)
