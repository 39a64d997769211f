"""Averages beside the backward pass, where those of several models overlap: real processes on gloo."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import digest, drawn, join, leave
    from shrinkpoint.comm import compress_ddp

    class Net(nn.Module):
        '''Layers, with another model between them.'''

        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x, between=lambda x: x):
            for layer in self.layers[:3]:
                x = layer(x).tanh()
            x = between(x)
            for layer in self.layers[3:]:
                x = layer(x).tanh()
            return x

    def gradients(outer, inner, *inputs):
        for model in (outer, inner):
            model.zero_grad()
        for x in inputs:
            (outer(x, inner).square().sum() / len(inputs)).backward()
        return torch.cat([p.grad.flatten() for model in (outer, inner) for p in model.parameters()])

    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for spec in ("exact", "lowrank8"):
            outer, inner = (DDP(Net(seed), bucket_cap_mb=0.005) for seed in (1, 2))
            for model in (outer, inner):
                compress_ddp(model, spec, segment_numel=1000)
            found, distances = [], []
            for step in range(4):
                ours = gradients(outer, inner, drawn(8, 32, seed=10 * step + rank))
                expected = gradients(Net(1), Net(2), *(drawn(8, 32, seed=10 * step + of) for of in range(width)))
                found.append(ours)
                distances.append(float((ours - expected).norm() / expected.norm()))
            reports[spec] = [digest(*found), max(distances)]
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 2, tmp_path_factory.mktemp("overlap"))


@pytest.mark.parametrize(("spec", "most"), [("exact", 1e-6), ("lowrank8", 0.01)])
def test_models_whose_backward_passes_overlap_do_not_take_each_others_messages(reports, spec, most):
    for report in reports:
        assert report[spec][0] == reports[0][spec][0]
        assert report[spec][1] < most
