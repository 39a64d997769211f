"""Compressors are run on tensors like the user's; what is measured decides, and only times are not asserted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shrinkpoint.comm.spec import parse
from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.forecast.average_cost import TORCH_BF16_HOOK
from shrinkpoint_lab.forecast.message_cost import CandidateLike, measure_cost
from shrinkpoint_lab.forecast.recommendation import (
    DEFAULT_CANDIDATES,
    NO_COMPRESSION,
    PIPELINE_CANDIDATES,
    recommend,
)

SHAPE = (4, 16, 64)
SLOW = 0.001
"""Mbit/s on which the fewest bytes win whatever the machine does meanwhile."""


def noise(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_wire_bytes_and_errors_are_those_of_the_compressors() -> None:
    x = noise()
    for spec in ("bf16", "q8:64", "q4:64", "n3:64"):
        compressor = parse(spec)
        found = measure_cost(spec, x, repeats=1)
        assert (found.raw, found.wire) == (x.nbytes, compressor.wire_bytes(x.shape, x.dtype))  # type: ignore[union-attr]
        assert found.encode > 0 and found.decode > 0
    assert measure_cost("exact", x, repeats=1).error == 0
    lost = float((x - x.bfloat16().float()).norm() / x.norm())
    assert measure_cost("bf16", x, repeats=1).error == pytest.approx(lost, rel=1e-5)
    assert (
        measure_cost("q8:64", x, repeats=1).error
        < measure_cost("q4:64", x, repeats=1).error
        < measure_cost("q2:64", x, repeats=1).error
    )


def test_a_message_that_is_not_finite_has_no_error_and_is_not_recommended_within_one() -> None:
    x = noise()
    x[0, 0, 0] = torch.nan
    assert math.isnan(measure_cost("q8:64", x, repeats=1).error)
    assert recommend(like=x, mbps=SLOW, repeats=1).pays  # an error that nobody limits
    assert not recommend(like=x, mbps=SLOW, repeats=1, max_error=0.5).pays


def test_a_slow_link_asks_for_the_fewest_bytes_and_a_hidden_one_for_nothing() -> None:
    assert recommend(SHAPE, mbps=SLOW, repeats=1).best == "q4:64"
    assert recommend(SHAPE, mbps=SLOW, repeats=1, parallelism="ddp", world_size=4).best == "q4:64"
    assert recommend(SHAPE, mbps=1e6, step_seconds=1000, repeats=1).best == NO_COMPRESSION


def test_of_gradients_torchs_own_hook_is_a_candidate_and_of_pipelines_it_is_not() -> None:
    advice = recommend(SHAPE, mbps=SLOW, repeats=1, parallelism="ddp")
    assert {row.name for row in advice.estimates} == {NO_COMPRESSION, *DEFAULT_CANDIDATES}
    hook = advice.estimate(TORCH_BF16_HOOK)
    assert (hook.ratio, advice.estimate("bf16").ratio) == (2, pytest.approx(2, rel=0.1))
    assert (
        recommend(SHAPE, mbps=SLOW, repeats=1, parallelism="ddp", candidates=[TORCH_BF16_HOOK]).best
        == "torch bf16 hook"
    )
    with pytest.raises(PolicyError, match="torch bf16 hook"):
        recommend(SHAPE, mbps=SLOW, repeats=1, candidates=[TORCH_BF16_HOOK])


def test_a_low_rank_is_a_candidate_where_the_shapes_of_gradients_are_known() -> None:
    shapes = [(128, 96), (128,), (64, 3, 5, 5)]
    candidates = ["q4:64", "lowrank2(q8:64)"]
    advice = recommend(shapes, mbps=SLOW, repeats=1, parallelism="ddp", candidates=candidates)
    assert advice.best == "lowrank2(q8:64)"
    assert advice.estimate(NO_COMPRESSION).nbytes == 4 * (128 * 96 + 128 + 64 * 75)
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    again = recommend(like=gradients, mbps=SLOW, repeats=1, parallelism="ddp", candidates=candidates)
    assert again.estimate("lowrank2(q8:64)").nbytes == advice.estimate("lowrank2(q8:64)").nbytes
    for kind, shape in (("ddp", (128 * 96,)), ("pipeline", SHAPE)):
        with pytest.raises(PolicyError, match=r"a low rank|no matrix"):
            recommend(shape, mbps=SLOW, repeats=1, parallelism=kind, candidates=["lowrank2(q8:64)"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtypes"), [("ddp", (torch.float32, torch.bfloat16)), ("ddp", ()), ("pipeline", (torch.float32,) * 3)]
)
def test_tensors_that_are_not_of_one_message_are_refused(kind: str, dtypes: tuple[torch.dtype, ...]) -> None:
    with pytest.raises(PolicyError):
        recommend(like=[noise(0, dtype) for dtype in dtypes], mbps=SLOW, parallelism=kind)  # type: ignore[arg-type]


def test_the_default_candidates_go_from_the_most_careful_to_the_least() -> None:
    errors = [recommend(like=noise(), mbps=SLOW, repeats=1).estimate(str(one)).error for one in PIPELINE_CANDIDATES]
    assert errors == sorted(errors)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2), (torch.float16, 2), ("fp64", 8)])
def test_a_step_without_carries_the_tensors_as_they_are(dtype: str | torch.dtype, width: int) -> None:
    advice = recommend(SHAPE, dtype=dtype, mbps=10, micro_batches=3, candidates=["q8:64"], repeats=1)
    assert advice.estimate(NO_COMPRESSION).nbytes == 2 * 3 * width * noise().numel()
    assert advice.estimate("q8:64").nbytes < advice.estimate(NO_COMPRESSION).nbytes


def test_casting_what_is_16_bits_already_is_not_worth_anything() -> None:
    assert recommend(SHAPE, dtype="bf16", mbps=SLOW, candidates=["bf16"], repeats=1).best == NO_COMPRESSION


def test_each_direction_may_have_its_own_tensor_and_compressor() -> None:
    x, gradient = noise(0), noise(1, torch.bfloat16)
    one = ("q4:64", "q8:64")
    advice = recommend(like=(x, gradient), mbps=SLOW, candidates=[one], repeats=1)
    assert advice.best == "q4:64 / q8:64"
    assert advice.estimate(NO_COMPRESSION).nbytes == x.nbytes + gradient.nbytes
    assert (
        advice.estimates[0].nbytes
        == measure_cost("q4:64", x, repeats=1).wire + measure_cost("q8:64", gradient, repeats=1).wire
    )


def test_gradients_at_the_indices_of_their_activations_are_measured_with_them() -> None:
    advice = recommend(SHAPE, mbps=SLOW, candidates=[("top10", "same"), ("top10", "top10")], repeats=1)
    assert advice.estimate("top10 / same").nbytes < advice.estimate("top10").nbytes


@pytest.mark.parametrize("spec", ["ef(q4:64)", "ef21(q4:64)", "aq(q4:64, warmup=9)"])
def test_a_feedback_is_judged_by_its_first_message_and_not_by_a_tensor_that_comes_again(spec: str) -> None:
    x = noise()
    assert measure_cost(spec, x, repeats=3).error == pytest.approx(measure_cost("q4:64", x, repeats=1).error, rel=0.01)


@pytest.mark.parametrize("candidate", ["q4:64", parse("q4:64"), ("q4:64", parse("q4:64"))])
def test_specs_and_compressors_are_the_same_candidate(candidate: CandidateLike) -> None:
    assert recommend(SHAPE, mbps=SLOW, candidates=[candidate], repeats=1).best == "q4:64"


def test_what_the_user_passes_is_not_changed_nor_asked_for_gradients() -> None:
    x = noise().requires_grad_()
    before = x.detach().clone()
    recommend(like=x, mbps=SLOW, repeats=1)
    assert torch.equal(x, before)
    assert x.grad is None


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 5, 7)])
def test_odd_shapes_get_a_recommendation(shape: tuple[int, ...]) -> None:
    advice = recommend(shape, mbps=SLOW, repeats=1)
    assert {row.name for row in advice.estimates} == {NO_COMPRESSION, "bf16", "q8:64", "q4:64"}
    assert "best:" in str(advice)


def test_a_value_that_is_not_finite_is_seen_in_the_error() -> None:
    x = noise()
    x[0, 0, 0] = torch.inf
    advice = recommend(like=x, mbps=SLOW, max_error=0.5, repeats=1)
    assert advice.best == NO_COMPRESSION
    assert all(row.error != row.error for row in advice.estimates if row.name != NO_COMPRESSION)


WRONG: list[dict[str, object]] = [
    *({"shape": shape} for shape in (None, (-1,), 5, "abc", ((4, "a"),), ((2.5,),), [(3, 4), 5])),
    *({"dtype": dtype} for dtype in ("int8", torch.int32)),
    *(
        {"like": like}
        for like in (torch.ones(4, dtype=torch.int64), "x", [torch.ones(4), "x"], 3, torch.eye(3).to_sparse())
    ),
    *({"device": device} for device in ("zz", "cuda:99", 3.5, "meta")),
    *({"like": like} for like in (torch.ones(4, device="meta"), torch.ones(4, dtype=torch.complex64))),
    {"repeats": 0},
    {"mbps": 0},
    {"step_seconds": -1},
    {"candidates": ["q99"]},
    {"candidates": [("q4:64",)]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_invalid_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        recommend(**{"shape": SHAPE, "mbps": 100.0, **wrong})  # type: ignore[arg-type]


def test_advice_is_what_can_be_done() -> None:
    with pytest.raises(PolicyError, match="Pass a list of them"):
        recommend(SHAPE, mbps=SLOW, candidates={"q4:64"})  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="Leave it out: the CPU is the default"):
        recommend(SHAPE, mbps=SLOW, device="cuda:99")
    with pytest.raises(PolicyError, match="which pipelines send uncompressed"):
        recommend(like=torch.ones(4, dtype=torch.complex64), mbps=SLOW)
