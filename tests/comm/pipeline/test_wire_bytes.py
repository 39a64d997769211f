"""The ledgers against the kernel's own counter."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import ctypes, fcntl, os, socket, struct
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from helpers.pipeline_model import CPU, join, loss_of, scheduled, tell
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    from shrinkpoint.comm import compress_pipeline

    NEW_NETWORK, SET_FLAGS, UP = 0x40000000, 0x8914, 1


    def isolated():
        "A network of our own, whose loopback counts our messages and nothing else."
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
        return True


    ISOLATED = isolated()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


    class SizingStorage(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2048))

        def forward(self, x):
            return x * self.weight


    def sent():
        line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
        return int(line.split(":")[1].split()[8])


    def counted(rank, **how):
        stage = PipelineStage(SizingStorage(), rank, 2, CPU)
        schedule = scheduled("1F1B", [stage])
        wire = compress_pipeline(schedule, **how)
        x, y = torch.randn(2, 768, 2048, generator=torch.Generator().manual_seed(1))
        given = ([x], {}) if rank == 0 else ([], {"target": y, "losses": []})
        schedule.step(*given[0], **given[1])
        dist.barrier()
        before, posted = sent(), {name: one.wire_bytes for name, one in wire.link_stats().items()}
        dist.barrier()
        for _ in range(8):
            schedule.step(*given[0], **given[1])
        dist.barrier()
        return [sent() - before, sum(one.wire_bytes - posted[name] for name, one in wire.link_stats().items())]


    def of_rank(rank, width, folder):
        reports = None
        join(rank, width, folder)
        if ISOLATED:
            reports = {str(how): counted(rank, **how) for how in (
                dict(forward=None, backward=None), dict(forward="q4:64", backward="q8:64"),
                dict(forward="top10", backward="same:bf16"),
            )}
        tell(rank, folder, reports)
"""


def test_the_kernel_counts_the_bytes_that_link_stats_count(tmp_path):
    reports = ranks(PROGRAM, 2, tmp_path)[0]
    if reports is None:
        pytest.skip("this process may not make a network of its own (unshare)")
    for how, (kernels, ours) in reports.items():
        assert kernels == pytest.approx(ours, rel=0.03), how
