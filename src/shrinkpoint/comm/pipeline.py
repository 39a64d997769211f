"""Compression between the stages of a pipeline of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.boundary import CompressionSwitch, check_ids, find_sparse_spec, parse_directions, split_ids
from shrinkpoint.comm.compressors.base import Compressor, Identity
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike, Link, LinkStats, NonfinitePolicy, check_nonfinite
from shrinkpoint.comm.pipeline_stage import Boundary, CompressedStage, Direction, check_stage_api
from shrinkpoint.comm.rendezvous import CONFIG_TIMEOUT, SampleIdBroadcast, stage_check
from shrinkpoint.comm.state_check import STATE_ADVICE, check_entries, check_mapping, part_error
from shrinkpoint.errors import MismatchError, PolicyError

_HANDLE_ATTRIBUTE = "_shrinkpoint_wire"
_COUNT_NAME = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}")
"""The name of a count in the state of a link: micro-batch and tensor."""


def compress_pipeline(
    schedule_or_stages: Any,
    *,
    forward: CompressorLike = "q4:64",
    backward: CompressorLike = "q4:64",
    per_link: Mapping[int, Mapping[str, CompressorLike]] | None = None,
    nonfinite: NonfinitePolicy = "pass",
    min_numel: int = 0,
    sample_every: int = 16,
    timeout: float = CONFIG_TIMEOUT,
) -> CompressedPipeline:
    """Compress the messages between the stages of a pipeline, from the next step on.

    Call it on every rank, with the same arguments, before the first step or between two. Boundary i lies between the
    stages i and i + 1. Neighbours on one rank (the turn of a V schedule) exchange no messages: nothing is compressed
    there. Integer tensors are sent uncompressed. All micro-batches of a step must have the same shape, since torch
    posts buffers of the shape of the first one; call `CompressedPipeline.reset_shapes` before a step with another.

    Args:
        schedule_or_stages: a schedule of torch.distributed.pipelining, or this rank's stage or stages, by hand or from
            the tracing frontend.
        forward, backward: for activations and for gradients: a compressor, a feedback, or the spec of either; None for
            no compression.
        per_link: by the index of a boundary, a mapping with "forward" or "backward" or both, instead of the above.
        nonfinite: "raise" ends a step in which a value was not finite with an error at both ends of the link.
        min_numel: smaller tensors are sent uncompressed.
        sample_every: the relative error is measured on every message whose index is a multiple of this; 0 for none.
        timeout: seconds to wait, in the first step, for ranks that have not called this yet.

    Returns:
        The handle: statistics, state, and `detach`.

    Raises:
        PolicyError: no stages, stages that are compressed already, a boundary that does not exist, an invalid spec, an
            unsupported release of torch.
        MismatchError: on every rank, at the start of the first step: the ranks have different configurations, or one
            never called this function.
    """
    check_nonfinite("compress_pipeline", nonfinite)
    for name, value in (("min_numel", min_numel), ("sample_every", sample_every)):
        validate.check_int(f"compress_pipeline, {name}", value, minimum=0)
    validate.check_float("compress_pipeline, timeout", timeout)
    stages, schedule = _find_stages(schedule_or_stages)
    options = {"nonfinite": nonfinite, "min_numel": min_numel, "sample_every": sample_every}
    plan = _BoundaryPlan({"forward": forward, "backward": backward}, per_link, stages[0].num_stages, options)
    return CompressedPipeline(stages, schedule, plan, timeout)


class _BoundaryPlan:
    """The compressor or feedback of each boundary, by direction; None for no compression."""

    def __init__(
        self,
        common: Mapping[str, CompressorLike],
        per_link: Mapping[int, Mapping[str, CompressorLike]] | None,
        num_stages: int,
        options: Mapping[str, Any],
    ) -> None:
        self.options, overrides = options, _check_per_link(per_link, common, num_stages)
        self.compressors: list[dict[str, Compressor | ErrorFeedback | None]] = [
            parse_directions("compress_pipeline", boundary, {**common, **overrides.get(boundary, {})})
            for boundary in range(num_stages - 1)
        ]

    def needs_ids(self, first: int = 0) -> bool:
        """True if a boundary from the first on needs sample ids."""
        later = [compressor for pair in self.compressors[first:] for compressor in pair.values()]
        return any(isinstance(compressor, ErrorFeedback) and compressor.needs_ids for compressor in later)

    def boundary(self, number: int, neighbour: int) -> Boundary:
        """The directions of a boundary at the end whose neighbour is this stage."""
        links: list[Link | None] = []
        for way, compressor in self.compressors[number].items():
            # sample ids cross forward, for gradients and for later boundaries
            with_ids = way == "forward" and self.needs_ids(number)
            used = Identity() if compressor is None and with_ids else compressor
            name = f"{number} {way}"
            links.append(None if used is None else Link(used, name=name, with_ids=with_ids, **self.options))
        stats = [LinkStats() if link is None else link.stats for link in links]
        forward = Direction(f"{number} forward", neighbour, links[0], stats[0])
        return forward, Direction(f"{number} backward", neighbour, links[1], stats[1], forward=links[0])


class CompressedPipeline:
    """Handle of the compressed links of a pipeline that end at this rank, which `compress_pipeline` returns.

    Attributes:
        inference: compress in `schedule.eval()` too; a model that was trained with TopK or Random-K needs
            it. Set it to the same value on every rank, between two steps. `link_stats` has no messages of an
            evaluation that is not compressed.
    """

    inference = CompressionSwitch("evaluation is not compressed")

    def __init__(self, stages: Sequence[Any], schedule: Any, plan: _BoundaryPlan, timeout: float) -> None:
        self._schedule, self._timeout = schedule, timeout
        self.sparse_spec = find_sparse_spec(pair["forward"] for pair in plan.compressors)
        self._next_ids: Tensor | None = None
        self._ids: Tensor | None = None
        self._started_stages: set[int] = set()
        self._finished_stages: set[int] = set()
        self.deferred_errors: list[PolicyError] = []  # raised when no other rank waits for a message of this one
        self._verified_mode: tuple[bool, bool] | None = None
        self._is_config_verified = False
        group, is_source = stages[0].group, any(stage.is_first for stage in stages)
        self._id_broadcast = SampleIdBroadcast(group, is_source=is_source) if plan.needs_ids() else None
        self._config_check = stage_check(group, stages[0].num_stages)
        self._stages: dict[int, CompressedStage] = {}
        for stage in stages:
            index: int = stage.stage_index
            previous = None if stage.is_first else plan.boundary(index - 1, index - 1)
            following = None if stage.is_last else plan.boundary(index, index + 1)
            self._stages[index] = CompressedStage(stage, previous, following, self)
            setattr(stage, _HANDLE_ATTRIBUTE, self)
        self._publish({"nonfinite": plan.options["nonfinite"]})

    @property
    def links(self) -> dict[str, Link]:
        """This rank's ends by name: "0 forward" carries activations over the boundary of the stages 0 and 1."""
        return {direction.name: direction.link for direction in self._directions() if direction.link is not None}

    def link_stats(self) -> dict[str, LinkStats]:
        """Statistics of each of this rank's ends, by the name of the link."""
        return {direction.name: direction.stats for direction in self._directions()}

    def stats(self) -> dict[str, dict[str, Any]]:
        """The statistics as plain values, for JSON, by the name of the link."""
        return {name: stats.as_dict() for name, stats in self.link_stats().items()}

    def set_sample_ids(self, ids: Tensor | Sequence[int]) -> None:
        """Set the sample ids of the next step's batch, for AQ-SGD.

        Call it on the rank of the first stage, before each step; the step broadcasts them to all other ranks.

        Args:
            ids: one integer for each row of the batch. They are split into micro-batches as torch splits the batch.

        Raises:
            PolicyError: they are not integers, or not 1-d.
        """
        self._next_ids = check_ids(ids)

    def reset_shapes(self) -> None:
        """Let torch infer the shapes again in the next step, because its batch has another size than previous ones.

        Call it on every rank. torch does so itself only where `step` and `eval` alternate.

        Raises:
            PolicyError: the handle was created without a schedule, or its stages were built for one shape.
        """
        flags = [name for name in vars(self._schedule or object) if name.endswith("_forward_initialized")]
        metas = {index: getattr(stage.stage, "_user_meta", None) for index, stage in self._stages.items()}
        static = [index for index, meta in metas.items() if meta is None or meta.has_any()]  # given, or traced
        if not flags or static:
            problem = f"stages {static} have the shapes that they were built with"
            if not static:
                problem = f"{type(self._schedule).__name__} of torch {torch.__version__} finds shapes once"
            advice = "pass compress_pipeline a schedule whose stages find their shapes"
            raise PolicyError("reset_shapes", found=problem, do=advice)
        for flag in flags:
            setattr(self._schedule, flag, False)
            setattr(self._schedule, flag.replace("forward", "backward"), False)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's ends of links. Save it on every rank, with the rank's stages."""
        return {"links": {name: link.state_dict() for name, link in self.links.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; on every rank, before the next step, which compares the two ends of each link.

        Raises:
            MismatchError: it is something else, or the state of other links; then nothing has changed.
        """
        links = self.links
        saved_states = check_mapping("pipeline, links of a state", check_entries("pipeline", state, ["links"])["links"])
        if links.keys() != saved_states.keys():
            found, expected = (", ".join(map(str, names)) or "none" for names in (saved_states, links))
            do = "load it on the rank that had these links"
            raise MismatchError("pipeline", found=f"links {found}", expected=f"those of this rank, {expected}", do=do)
        for name, saved_state in saved_states.items():
            _check_link_state(f"link {name}", saved_state)
        # Load the states of all links, or of none if one of them does not fit
        before = {name: link.state_dict() for name, link in links.items()}
        try:
            for name, link in links.items():
                link.load_state_dict(saved_states[name])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            for name, link in links.items():
                link.load_state_dict(before[name])
            if isinstance(error, MismatchError):
                raise
            found, do = f"what a feedback does not take ({error!r:.80})", STATE_ADVICE
            raise MismatchError(f"link {name}", found=found, expected="its state", do=do) from error
        self._verified_mode = None

    def detach(self) -> None:
        """Stop compressing; on every rank, between two steps."""
        for stage in self._stages.values():
            stage.detach()
            vars(stage.stage).pop(_HANDLE_ATTRIBUTE, None)

    def check(self) -> None:
        """Raise the pending error of `nonfinite="raise"`, if there is one, such as after an evaluation.

        Raises:
            PolicyError: a value that was sent or received was not finite.
        """
        errors, self.deferred_errors = self.deferred_errors, []
        if errors:
            raise errors[0]

    # What stages call.

    def begin_step(self, stage: int) -> None:
        """Called at the start of a step, before the stage's first message."""
        if self._started_stages and stage not in self._started_stages:  # another stage of this rank began the step
            self._started_stages.add(stage)
            return
        self._started_stages, self._finished_stages = {stage}, set()
        self._ids, self._next_ids = self._next_ids, None
        self.check()
        training = bool(self._stages[stage].stage.has_backward)
        self._verify_mode((training, self.inference))
        if self._id_broadcast is not None and training:
            self._ids = self._id_broadcast.broadcast(self._ids)

    def end_step(self, stage: int) -> None:
        """Called at the end of a step, after the stage's last message."""
        self._finished_stages.add(stage)
        if self._finished_stages == self._stages.keys():
            self.check()

    def compresses(self, training: bool) -> bool:
        """True if a step is compressed, which is in training or an evaluation."""
        return training or self.inference

    def sample_ids_for(self, stage: int, slot: int) -> Tensor | None:
        """The sample ids of a micro-batch, if this rank knows them without a message."""
        if self._ids is not None:
            count = getattr(self._schedule, "_n_microbatches", None) or len(self._stages[stage].stage.args_recv_info)
            return split_ids(self._ids, int(count))[slot]
        previous_stage = self._stages.get(stage - 1)  # a neighbour on this rank, which sends no message
        return None if previous_stage is None else previous_stage.sample_ids(slot)

    def _verify_mode(self, mode: tuple[bool, bool]) -> None:
        """Let all ranks compare (training, inference), in the first step and when that changes."""
        if self._verified_mode == mode:
            return
        if self._verified_mode is None and not self._is_config_verified:
            self._config_check.check(self._timeout)  # before any wait with a longer timeout
            self._is_config_verified = True
        state = self._verified_mode is None
        self._publish({"training": mode[0], "inference": mode[1]}, state=state)
        self._config_check.check()
        self._verified_mode = mode

    def _publish(self, config: Mapping[str, Any], *, state: bool = False) -> None:
        def describe(direction: Direction) -> dict[str, Any]:
            if direction.link is None:
                return {"how": "off"}
            description = direction.link.describe()
            return {**description, "state": direction.link.fingerprint()} if state else description

        configs = {}
        for index, stage in self._stages.items():
            links = {direction.name: describe(direction) for direction in stage.directions}
            configs[index] = {**config, "links": links}
        self._config_check.publish(configs)

    def _directions(self) -> Iterator[Direction]:
        """The directions at this rank's stages that cross to another rank."""
        for index, compressed_stage in self._stages.items():
            ranks = compressed_stage.stage.stage_index_to_group_rank
            yield from (one for one in compressed_stage.directions if ranks[one.neighbour] != ranks[index])


def _find_stages(schedule_or_stages: Any) -> tuple[list[Any], Any]:
    stage_or_stages = getattr(schedule_or_stages, "_stages", None) or getattr(schedule_or_stages, "_stage", None)
    schedule = None if stage_or_stages is None else schedule_or_stages
    stage_or_stages = schedule_or_stages if stage_or_stages is None else stage_or_stages
    stages = list(stage_or_stages) if isinstance(stage_or_stages, Iterable) else [stage_or_stages]
    invalid = [type(stage).__name__ for stage in stages if not hasattr(stage, "stage_index")]
    if not stages or invalid:
        expected = "a schedule of torch.distributed.pipelining, or stages of it"
        do = "pass the schedule, or its stages"
        raise PolicyError("compress_pipeline", found=", ".join(invalid) or "no stages", expected=expected, do=do)
    for stage in stages:
        check_stage_api(stage)
    compressed = [stage.stage_index for stage in stages if hasattr(stage, _HANDLE_ATTRIBUTE)]
    if compressed:
        has, advice = f"stages {compressed} are compressed already", "first call detach() of their handle"
        raise PolicyError("compress_pipeline", found=has, do=advice)
    return stages, schedule


def _check_per_link(per_link: Any, common: Mapping[str, Any], num_stages: int) -> dict[int, Mapping[str, Any]]:
    """The compressors of some boundaries; a PolicyError if there are no such boundaries or directions."""
    where, do = "compress_pipeline, per_link", 'pass e.g. {0: {"forward": "q4"}}'
    expected = 'a mapping with "forward" or "backward" or both, by the index of a boundary'
    validate.check_instance(where, per_link, Mapping, expected=expected, do=do, allow_none=True)
    overrides, ways = dict(per_link or {}), "forward, backward or both"
    for boundary, specs in overrides.items():
        if boundary not in range(num_stages - 1):
            found, expected = f"boundary {boundary!r}", f"0 to {num_stages - 2}, for {num_stages} stages"
            advice = "count boundaries from 0: boundary 0 lies between stages 0 and 1"
            raise PolicyError(where, found=found, expected=expected, do=advice)
        validate.check_instance(f"{where}[{boundary}]", specs, Mapping, expected=ways, do=do)
        if not specs.keys() <= common.keys():
            found = f"{sorted(map(str, specs))} for boundary {boundary}"
            raise PolicyError(where, found=found, expected=ways, do=do)
    return overrides


def _check_link_state(where: str, state: object) -> None:
    entries = check_entries(where, state, ("how", "counts", "feedback"))
    for name, count in check_mapping(f"{where}, counts", entries["counts"]).items():
        if not isinstance(name, str) or not _COUNT_NAME.fullmatch(name):
            raise part_error(f"{where}, counts", validate.describe_value(name), "micro-batch.tensor")
        if type(count) is not int or count < 0:
            raise part_error(f"{where}, counts, {name}", validate.describe_value(count), "a whole number from 0")
    check_mapping(f"{where}, feedback", entries["feedback"])
