"""Which of two compressors gradients are sent with."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.processes import ranks
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.comm.accordion import Accordion
from shrinkpoint.errors import MismatchError, PolicyError


def observe(accordion: Accordion[str], square: float) -> bool:
    """One step, whose gradient comes in two parts of this squared norm together."""
    for part in (0.36, 0.64):
        accordion.add_gradient(torch.tensor([square], dtype=torch.float64).mul_(part).sqrt_())
    return accordion.end_step(list)


def regimes(norms: list[float], every: int = 2, threshold: float = 0.5) -> list[bool]:
    """Which windows are critical, and the one after the last; a norm for each window."""
    accordion = Accordion("q2", "q8", interval=every, threshold=threshold)
    reports = [accordion.critical]
    for norm in norms:
        for _ in range(every):
            observe(accordion, norm * norm)
        reports.append(accordion.critical)
    return reports


def test_a_change_of_the_norm_makes_the_next_window_mild_and_quiet_makes_it_strong_again():
    assert regimes([8, 8, 8, 3, 3, 3, 5, 5]) == [True, True, False, False, True, False, False, True, False]
    assert regimes([8, 4.1, 6, 3.1]) == [True, True, False, False, False]


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8), st.floats(0.1, 2))
def test_a_window_is_critical_where_the_relative_change_reaches_the_threshold(norms, threshold):
    changes = [abs(before - now) / before for before, now in pairwise(norms)]
    found = regimes(norms, 1, threshold)[2:]
    for change, critical in zip(changes, found, strict=True):
        assert critical == (change >= threshold) or math.isclose(change, threshold, rel_tol=1e-9)


def test_a_learning_rate_that_falls_makes_the_next_window_mild():
    accordion = Accordion("q2", "q8", interval=1)
    reports = []
    for rate in (1.0, 1.0, 1.0, 0.1, 0.1, 1.0):
        accordion.set_lr(rate)
        observe(accordion, 4.0)
        reports.append(accordion.compressor)
    assert reports == ["q8", "q2", "q2", "q8", "q2", "q2"]


def test_steps_that_are_not_finite_do_not_count_and_a_window_of_them_is_critical():
    accordion = Accordion("q2", "q8", interval=2)
    for square in (4.0, math.nan, math.inf, 4.0):
        observe(accordion, square)
    assert not accordion.critical
    for square in (math.nan, math.inf):
        observe(accordion, square)
    assert accordion.critical
    assert regimes([0, 0, 0, 1, 1]) == [True, True, False, False, True, False]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_a_restored_state_decides_as_the_one_that_was_saved(squares, every, data):
    at = data.draw(st.integers(0, len(squares)))
    report, other = (Accordion("q2", "q8", interval=every) for _ in range(2))
    for square in squares[:at]:
        report.set_lr(square)
        observe(report, square)
    other.load_state_dict(report.state_dict())
    for square in squares[at:]:
        report.set_lr(square), other.set_lr(square)
        assert observe(report, square) == observe(other, square)
        assert report.compressor == other.compressor


def test_invalid_arguments_are_refused():
    for arguments in ({"threshold": 0.0}, {"threshold": math.nan}, {"interval": 0}):
        with pytest.raises(PolicyError):
            Accordion("q2", "q8", **arguments)
    with pytest.raises(MismatchError):
        Accordion("q2", "q8").load_state_dict({"critical": True})


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, [], "critical", {"critical": True}),
        *({"critical": "yes"}, {"fell": 0}, {"steps": -1}, {"steps": 1.5}, {"counted": True}),
        *({"squares": -1.0}, {"squares": math.nan}, {"rate": None}, {"previous": "8"}),
    ],
    ids=str,
)
def test_what_is_no_state_is_refused_and_changes_nothing(wrong):
    accordion = Accordion("q2", "q8", interval=2)
    observe(accordion, 4.0)
    before = accordion.state_dict()
    is_part = isinstance(wrong, dict) and len(wrong) == 1 and wrong != {"critical": True}
    with pytest.raises(MismatchError, match="Accordion"):
        accordion.load_state_dict({**before, "steps": 0, **wrong} if is_part else wrong)
    assert str(accordion.state_dict()) == str(before)


def test_a_learning_rate_may_be_a_tensor():
    accordion, other = Accordion("q2", "q8"), Accordion("q2", "q8")
    for rate in (1.0, 0.5):
        accordion.set_lr(torch.tensor(rate))
    assert (accordion.rate, accordion.fell) == (0.5, True)
    other.load_state_dict({**accordion.state_dict(), "rate": torch.tensor(0.5)})  # as an earlier release wrote it
    assert other.state_dict()["rate"] == 0.5


RANKS = """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import batch, caught, digest, drawn, join, leave, plain_net
    from shrinkpoint.comm.accordion import Accordion
    from shrinkpoint.comm.ddp import compress_ddp
    from shrinkpoint.comm.fsdp import compress_fsdp

    SCALES = [1.0] * 8 + [10.0] * 8  # of the loss: the gradient changes once, after two quiet windows of two


    def course(model, handle, accordion, rank, steps):
        "The regime and the bytes of each step; weights stay as they are."
        out = []
        for step in steps:
            before = sum(one.wire_bytes for one in handle.link_stats.values())
            how = accordion.compressor
            x, y = batch(0, rank)
            (SCALES[step] * mse_loss(model(x), y)).backward()
            model.zero_grad()
            out.append([how, sum(one.wire_bytes for one in handle.link_stats.values()) - before])
        return out


    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)

        def replicas():
            accordion = Accordion("ef(q2:64)", "q8:64", interval=2)
            model = DDP(plain_net())
            return model, compress_ddp(model, accordion=accordion), accordion

        def shards():
            accordion, model = Accordion("ef(q2:64)", "q8:64", interval=2), plain_net()
            mesh = dist.device_mesh.init_device_mesh("cpu", (width,))
            for one in (model[2], model):
                fully_shard(one, mesh=mesh)
            return model, compress_fsdp(model, None, accordion=accordion), accordion

        for kind in (replicas, shards):
            model, handle, accordion = kind()
            reports[kind.__name__] = course(model, handle, accordion, rank, range(len(SCALES)))
            reports["restored " + kind.__name__] = []
            for at in (4, 7):  # just after the first switch, and within a window
                model, handle, accordion = kind()
                first = course(model, handle, accordion, rank, range(at))
                again = kind()
                again[1].load_state_dict(handle.state_dict())
                reports["restored " + kind.__name__].append(first + course(*again, rank, range(at, len(SCALES))))
        unlike = Accordion("q2", "q8", interval=2 + rank)
        reports["unlike"] = caught(lambda: course(model := DDP(plain_net()), compress_ddp(model, accordion=unlike),
                                               unlike, rank, [0]))
        reports["bad"] = caught(lambda: compress_ddp(DDP(plain_net()), accordion=Accordion("q2", "aq(q8)")))
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(RANKS, 2, tmp_path_factory.mktemp("group"))


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_all_ranks_switch_at_the_same_step_and_send_less_while_the_gradient_is_quiet(reports, kind):
    hows = [how for how, _ in reports[0][kind]]
    late = kind == "shards"  # there a step is over when the next one begins
    quiet = [*range(4 + late, 10 + late), *range(12 + late, 16)]
    assert [step for step, how in enumerate(hows) if how == "ef(q2:64)"] == quiet
    assert [how for how, _ in reports[1][kind]] == hows
    bytes_of = dict(reports[0][kind][:4] + reports[0][kind][6:8])
    assert bytes_of["q8:64"] > 2.5 * bytes_of["ef(q2:64)"]


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_restored_run_continues_in_the_same_regime(reports, kind):
    assert all(report[f"restored {kind}"] == [report[kind]] * 2 for report in reports)


def test_ranks_with_other_thresholds_or_a_compressor_that_cannot_be_used_are_an_error(reports):
    assert all((report["unlike"][0], report["bad"][0]) == ("MismatchError", "PolicyError") for report in reports)
