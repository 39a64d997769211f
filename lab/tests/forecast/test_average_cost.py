"""What a lone rank measures of an average is what real ranks send."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.processes import ranks
from torch import Tensor

from shrinkpoint.comm.spec import parse
from shrinkpoint_lab.forecast import average_cost
from shrinkpoint_lab.forecast.average_cost import _LoneRank, measure_average, measure_torch_hook, send_window
from shrinkpoint_lab.forecast.message_cost import measure_cost
from shrinkpoint_lab.forecast.step_model import Workload

SPECS = ("exact", "bf16", "q4:64", "top10", "ef(q3:64)", "lowrank2(q8:64)", "lowrank4")
SHAPES = ((48, 24), (48,), (48, 48), (48,), (4, 48), (4,))

PROGRAM = """
    import torch
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import batch, join, leave, plain_net
    from shrinkpoint.comm import compress_ddp

    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for spec in SPECS:
            model = DDP(plain_net(), bucket_cap_mb=0.005)
            handle = compress_ddp(model, spec)
            for step in range(2):
                x, y = batch(step, rank)
                mse_loss(model(x), y).backward()
            reports[spec] = sum(stats.wire_bytes for stats in handle.link_stats.values()) / 2
        leave(reports, rank, folder)
"""


def gradients() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


@pytest.mark.parametrize("width", [2, 3])
def test_the_bytes_of_a_rank_are_those_that_real_ranks_send(width, tmp_path):
    program = PROGRAM.replace("SPECS", repr(SPECS))
    for report in ranks(program, width, tmp_path):
        for spec in SPECS:
            cost = measure_average(parse(spec), gradients(), width, repeats=1)
            wire = cost.forward.wire
            assert Workload("ddp", 1, world_size=width).nbytes(wire, wire) == pytest.approx(report[spec], rel=1e-3)
            assert cost.forward.encode > 0 and cost.forward.decode == 0


@pytest.mark.parametrize("spec", SPECS)
def test_in_threads_and_one_after_the_other_a_lone_rank_does_the_same(spec):
    ranks = []
    for is_threaded in (True, False):
        tensors = gradients()
        rank = _LoneRank(parse(spec), tensors, 3)
        rank._background = rank._background if is_threaded else None  # as on a GPU
        for _ in range(2):
            rank.step()
        rank.close()
        ranks.append((tensors, rank.sent_bytes))
    assert ranks[0][1] == ranks[1][1]
    assert all(torch.equal(one, other) for one, other in zip(ranks[0][0], ranks[1][0], strict=True))


def test_threads_end_with_the_measurement():
    # torch aborts a process whose interpreter ends while such a thread does
    before = set(threading.enumerate())
    for spec in ("q4:64", "lowrank2(q8:64)"):
        measure_average(parse(spec), gradients(), 2, repeats=1)
        assert set(threading.enumerate()) <= before


def test_gradients_stay_as_they_are_and_a_low_rank_is_judged_by_its_first_step():
    tensors = gradients()
    before = [tensor.clone() for tensor in tensors]
    noise = measure_average(parse("lowrank4(q8:64)"), tensors, 2, repeats=1)
    assert all(torch.equal(tensor, one) for tensor, one in zip(tensors, before, strict=True))
    assert 0.5 < noise.forward.error < 1
    left, right = torch.randn(200, 3), torch.randn(3, 100)
    assert measure_average(parse("lowrank4"), [left @ right], 2, repeats=1).forward.error < 1e-4
    for spec in ("exact", "bf16", "q4:64", "ef(q4:64)"):
        expected = measure_cost(spec, torch.cat([tensor.view(-1) for tensor in reversed(tensors)]), repeats=1).error
        assert measure_average(parse(spec), tensors, 2, repeats=1).forward.error == pytest.approx(expected, rel=0.02)


def test_torchs_hook_sends_two_bytes_a_value_and_rounds_each_once():
    tensors = gradients()
    x = torch.cat([tensor.view(-1) for tensor in tensors])
    all_reduce_seconds, cost = measure_torch_hook(tensors, 100, repeats=1)
    assert (cost.forward.raw, cost.forward.wire, cost.transport) == (4 * x.numel(), 2 * x.numel(), "all-reduce")
    assert cost.forward.error == pytest.approx(float((x - x.bfloat16().float()).norm() / x.norm()), rel=1e-5)
    assert all_reduce_seconds > 0  # gloo ran in this process
    assert all(torch.equal(tensor, one) for tensor, one in zip(tensors, gradients(), strict=True))


def test_the_window_of_a_connection_is_that_of_the_largest_send_buffer(tmp_path, monkeypatch):
    sizes = tmp_path / "tcp_wmem"
    monkeypatch.setattr(average_cost, "_SEND_BUFFERS", sizes)
    assert send_window(torch.device("cpu")) is None  # not Linux
    for text, expected in (("4096\t16384\t4000000\n", 2_800_000), ("0 0 0", None), ("4096 16384", None), ("", None)):
        sizes.write_text(text)
        assert send_window(torch.device("cpu")) == expected
        assert send_window(torch.device("cuda")) is None
