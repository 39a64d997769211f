"""Compression between the stages of a pipeline that the user already built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor, Identity
from shrinkpoint.comm.feedback.base import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike, Link, NonfinitePolicy
from shrinkpoint.comm.pipeline.stage import Boundary, CompressedStage, Direction, check_stage_api
from shrinkpoint.comm.rendezvous import Handshake, SampleIdBroadcast
from shrinkpoint.comm.simulate import InferenceReminder, split_ids
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError

_HANDLE_ATTRIBUTE = "_shrinkpoint_wire"


def compress_pipeline(
    schedule_or_stages: Any,
    *,
    forward: CompressorLike = "q4:64",
    backward: CompressorLike = "q4:64",
    per_link: Mapping[int, Mapping[str, CompressorLike]] | None = None,
    nonfinite: NonfinitePolicy = "pass",
    min_numel: int = 0,
    sample_every: int = 16,
    timeout: float = 30.0,
) -> CompressedPipeline:
    """Compress what the stages of a pipeline send to each other, from the next step on.

    Call it on every rank, with the same arguments, before the first step or between two. Boundary i lies between the
    stages i and i + 1. Neighbours on one rank (the turn of a V schedule) hand over without a message: nothing is
    compressed there. Integer tensors cross as they are. All micro-batches of a step must have one shape, for torch
    posts buffers of the first one's; `Wire.reset_shapes` is for a step with another.

    Args:
        schedule_or_stages: a schedule of torch.distributed.pipelining, or this rank's stage or stages, by hand or from
            the tracing frontend.
        forward, backward: how activations and gradients cross: an operator, a feedback, the spec of one; None: as
            they are.
        per_link: for a boundary's index, a mapping with "forward" or "backward" or both, instead of the above.
        nonfinite: "raise": a step in which a value was not finite ends with an error at both ends of the link.
        min_numel: smaller tensors cross as they are.
        sample_every: the relative error is taken of each message that is a multiple of this; 0: of none.
        timeout: seconds to wait, in the first step, for ranks that have not called this yet.

    Returns:
        The handle: statistics, state, and the way back.

    Raises:
        PolicyError: no stages, stages that are compressed already, a boundary that does not exist, a word that is no
            spec, a release of torch that this does not know.
        MismatchError: on every rank, at the start of the first step: the ranks do not agree, or one never called this.
    """
    validate.check_choice("compress_pipeline, nonfinite", nonfinite, get_args(NonfinitePolicy))
    for name, value in (("min_numel", min_numel), ("sample_every", sample_every)):
        validate.check_int(f"compress_pipeline, {name}", value, minimum=0)
    validate.check_float("compress_pipeline, timeout", timeout)
    stages, schedule = _find_stages(schedule_or_stages)
    plan = _BoundaryPlan({"forward": forward, "backward": backward}, per_link or {}, stages[0].num_stages)
    options = {"nonfinite": nonfinite, "min_numel": min_numel, "sample_every": sample_every}
    return CompressedPipeline(stages, schedule, plan, options, timeout)


class _BoundaryPlan:
    """Which operator each boundary and direction has."""

    def __init__(
        self,
        common: Mapping[str, CompressorLike],
        per_link: Mapping[int, Mapping[str, CompressorLike]],
        num_stages: int,
    ) -> None:
        for boundary, ways in per_link.items():
            if boundary not in range(num_stages - 1):
                found, expected = f"boundary {boundary!r}", f"0 to {num_stages - 2}, for {num_stages} stages"
                raise PolicyError("compress_pipeline, per_link", found=found, expected=expected)
            if not ways.keys() <= common.keys():
                found, expected = f"{sorted(ways)} for boundary {boundary}", "forward, backward or both"
                raise PolicyError("compress_pipeline, per_link", found=found, expected=expected)
        self.compressors = [
            {
                way: None if how is None else as_compressor(how)
                for way, how in {**common, **per_link.get(boundary, {})}.items()
            }
            for boundary in range(num_stages - 1)
        ]

    @property
    def needs_ids(self) -> bool:
        return any(
            isinstance(one, ErrorFeedback) and one.needs_ids for ways in self.compressors for one in ways.values()
        )

    def boundary(self, number: int, neighbour: int, options: Mapping[str, Any]) -> Boundary:
        return Boundary(neighbour, *(self._direction(number, way, options) for way in ("forward", "backward")))

    def activations(self) -> list[Compressor | ErrorFeedback]:
        return [how for ways in self.compressors if (how := ways["forward"]) is not None]

    def _direction(self, number: int, direction: str, options: Mapping[str, Any]) -> Direction:
        how, name = self.compressors[number][direction], f"{number} {direction}"
        needed = any(
            isinstance(one, ErrorFeedback) and one.needs_ids
            for ways in self.compressors[number:]
            for one in ways.values()
        )
        carries = needed and direction == "forward"  # for this boundary's gradients, and for those after it
        if how is None and carries:
            how = Identity()
        link = None if how is None else Link(how, name=name, with_ids=carries, **options)
        return Direction(name, link, LinkStats() if link is None else link.stats)


class CompressedPipeline:
    """What `compress_pipeline` put between the stages of a pipeline, as far as this rank holds the ends of it.

    Attributes:
        inference: compress in `schedule.eval()` too; a model that was trained with TopK or Random-K needs it. Set it
            alike on every rank, between two steps.
    """

    def __init__(
        self, stages: Sequence[Any], schedule: Any, plan: _BoundaryPlan, options: Mapping[str, Any], timeout: float
    ) -> None:
        self._schedule, self._plan, self._timeout = schedule, plan, timeout
        self._inference, self._inference_reminder = True, InferenceReminder(plan.activations())
        self._next_ids: Tensor | None = None
        self._ids: Tensor | None = None
        self._started_stages: set[int] = set()
        self._finished_stages: set[int] = set()
        self._deferred_errors: list[PolicyError] = []
        self._verified_mode: tuple[bool, bool] | None = None
        self._is_config_verified = False
        first = stages[0]
        self._id_broadcast = (
            SampleIdBroadcast(first.group, is_source=any(stage.is_first for stage in stages))
            if plan.needs_ids
            else None
        )
        self._handshake = Handshake(first.group, [stage.stage_index for stage in stages], first.num_stages)
        self._stages: dict[int, CompressedStage] = {}
        for stage in stages:
            self._stages[stage.stage_index] = self._compress_stage(stage, options)
            setattr(stage, _HANDLE_ATTRIBUTE, self)
        self._publish({"nonfinite": options["nonfinite"]})

    @property
    def inference(self) -> bool:
        return self._inference

    @inference.setter
    def inference(self, value: bool) -> None:
        self._inference = value
        if not value:
            self._inference_reminder.warn("evaluation is not compressed", stacklevel=2)

    @property
    def links(self) -> dict[str, Link]:
        """This rank's ends by name: "0 forward" is the way of activations over the boundary of the stages 0 and 1."""
        return {way.name: way.link for way in self._directions() if way.link is not None}

    def link_stats(self) -> dict[str, LinkStats]:
        """What each of this rank's ends has sent or received, by the name of the link."""
        return {way.name: way.stats for way in self._directions()}

    def stats(self) -> dict[str, dict[str, Any]]:
        """The same as plain values, for JSON."""
        return {name: ledger.as_dict() for name, ledger in self.link_stats().items()}

    def set_sample_ids(self, ids: Tensor | Sequence[int]) -> None:
        """Say which samples the next step's batch holds, for AQ-SGD.

        Needed on the rank of the first stage, before each step, whose start tells them to all others.

        Args:
            ids: one integer a row of the batch. They are split into micro-batches as torch splits the batch.

        Raises:
            PolicyError: they are not integers, or not 1-d.
        """
        self._next_ids = torch.as_tensor(ids)
        split_ids(self._next_ids, 1)  # refuses what are no ids

    def reset_shapes(self) -> None:
        """Let torch find the shapes anew in the next step: its batch has another size than those before.

        Call it on every rank. torch finds out by itself only where `step` and `eval` take turns.

        Raises:
            PolicyError: the schedule is not known, or its stages were built for one shape.
        """
        flags = [name for name in vars(self._schedule or object) if name.endswith("_forward_initialized")]
        fixed = [index for index, wired in self._stages.items() if _has_static_shapes(wired.stage)]
        if not flags or fixed:
            found = f"stages {fixed} have the shapes that they were built with"
            if not fixed:
                found = f"{type(self._schedule).__name__} of torch {torch.__version__} finds shapes once"
            do = "give compress_pipeline a schedule whose stages find their shapes"
            raise PolicyError("Wire.new_shapes", found=found, do=do)
        for flag in flags:
            setattr(self._schedule, flag, False)
            setattr(self._schedule, flag.replace("forward", "backward"), False)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's ends remember. Save it on every rank, with the rank's stages."""
        return {"links": {name: link.state_dict() for name, link in self.links.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; on every rank, before the next step, which compares the two ends of each link.

        Raises:
            MismatchError: the state is of other links.
        """
        links, found = self.links, state["links"]
        if links.keys() != found.keys():
            expected = f"those of this rank, {', '.join(links) or 'none'}"
            raise MismatchError("wire", found=f"links {', '.join(found) or 'none'}", expected=expected)
        for name, link in links.items():
            link.load_state_dict(found[name])
        self._verified_mode = None

    def detach(self) -> None:
        """Send everything as it is again; on every rank, between two steps."""
        for wired in self._stages.values():
            wired.detach()
            vars(wired.stage).pop(_HANDLE_ATTRIBUTE, None)

    def check(self) -> None:
        """Raise what `nonfinite="raise"` has found and is still to be raised: after an evaluation, say.

        Raises:
            PolicyError: a value that was sent or came was not finite.
        """
        refused, self._deferred_errors = self._deferred_errors, []
        if refused:
            raise refused[0]

    # What a stage asks of the rank that it is on.

    def begin_step(self, stage: int) -> None:
        if self._started_stages and stage not in self._started_stages:  # another stage of this rank has begun the step
            self._started_stages.add(stage)
            return
        self._started_stages, self._finished_stages = {stage}, set()
        self._ids, self._next_ids = self._next_ids, None
        self.check()
        training = bool(self._stages[stage].stage.has_backward)
        self._verify_mode((training, self._inference))
        if self._id_broadcast is not None and training:
            self._ids = self._id_broadcast.broadcast(self._ids)

    def end_step(self, stage: int) -> None:
        self._finished_stages.add(stage)
        if self._finished_stages == self._stages.keys():
            self.check()

    def compresses(self, training: bool) -> bool:
        return training or self._inference

    def sample_ids_for(self, stage: int, slot: int) -> Tensor | None:
        if self._ids is not None:
            return split_ids(self._ids, self._num_micro_batches(stage))[slot]
        before = self._stages.get(stage - 1)  # it hands over without a message
        return None if before is None else before.sample_ids(slot)

    def defer_error(self, error: PolicyError) -> None:
        self._deferred_errors.append(error)

    def _num_micro_batches(self, stage: int) -> int:
        known = getattr(self._schedule, "_n_microbatches", None)
        return int(known or len(self._stages[stage].stage.args_recv_info))

    def _verify_mode(self, mode: tuple[bool, bool]) -> None:
        """Let all ranks compare what they are about to do: in the first step, and where that changes."""
        if self._verified_mode == mode:
            return
        if self._verified_mode is None and not self._is_config_verified:
            self._handshake.verify(self._timeout)  # before any wait that is longer
            self._is_config_verified = True
        state = self._verified_mode is None
        self._publish({"training": mode[0], "inference": mode[1]}, state=state)
        self._handshake.verify()
        self._verified_mode = mode

    def _publish(self, config: Mapping[str, Any], *, state: bool = False) -> None:
        def said(way: Direction) -> dict[str, Any]:
            word = {"how": "off"} if way.link is None else way.link.describe()
            return {**word, "state": way.link.fingerprint()} if state and way.link is not None else word

        self._handshake.publish(
            {
                index: {
                    **config,
                    "links": {
                        way.name: said(way) for side in wired.boundaries for way in (side.forward, side.backward)
                    },
                }
                for index, wired in self._stages.items()
            }
        )

    def _directions(self) -> Iterator[Direction]:
        """The ways of this rank that lead to another one."""
        for index, wired in self._stages.items():
            ranks = wired.stage.stage_index_to_group_rank
            for side in wired.boundaries:
                if ranks[side.neighbour] != ranks[index]:
                    yield from (side.forward, side.backward)

    def _compress_stage(self, stage: Any, options: Mapping[str, Any]) -> CompressedStage:
        index = stage.stage_index
        before = None if stage.is_first else self._plan.boundary(index - 1, index - 1, options)
        after = None if stage.is_last else self._plan.boundary(index, index + 1, options)
        return CompressedStage(stage, before, after, self)


def _find_stages(schedule_or_stages: Any) -> tuple[list[Any], Any]:
    """The stages of this rank, and their schedule where it is known."""
    found = getattr(schedule_or_stages, "_stages", None) or getattr(schedule_or_stages, "_stage", None)
    schedule = None if found is None else schedule_or_stages
    found = schedule_or_stages if found is None else found
    stages = list(found) if isinstance(found, Iterable) else [found]
    strange = [type(stage).__name__ for stage in stages if not hasattr(stage, "stage_index")]
    if not stages or strange:
        expected = "a schedule of torch.distributed.pipelining, or stages of it"
        raise PolicyError("compress_pipeline", found=", ".join(strange) or "no stages", expected=expected)
    for stage in stages:
        check_stage_api(stage)
    wired = [stage.stage_index for stage in stages if hasattr(stage, _HANDLE_ATTRIBUTE)]
    if wired:
        has, do = f"stages {wired} are compressed already", "detach the wire that they have first"
        raise PolicyError("compress_pipeline", found=has, do=do)
    return stages, schedule


def _has_static_shapes(stage: Any) -> bool:
    """Whether the shapes of a stage's messages were given when it was built, or traced."""
    told = getattr(stage, "_user_meta", None)
    return told is None or told.has_any()
