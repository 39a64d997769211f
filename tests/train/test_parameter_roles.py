"""A module says which of its tensors are parameters, whatever they are called."""

from __future__ import annotations

import torch
from torch import nn

import shrinkpoint as sp


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Parameter(torch.randn(128, 64))
        self.register_buffer("seen", torch.randn(128, 64))


def moved(model):
    with torch.no_grad():
        model.users += 0.01 * torch.randn_like(model.users)
        model.seen += 0.01 * torch.randn_like(model.seen)


def test_parameters_of_any_name_are_quantized_and_buffers_are_not(tmp_path):
    torch.manual_seed(0)
    models = {"plain": Factors(), "more": [Factors()]}
    with sp.CheckpointManager(tmp_path, scheme=sp.LCCheckpoint(bits=3)) as manager:
        manager.save(1, model=models)
        for one in (models["plain"], models["more"][0]):
            moved(one)
        report = manager.save(2, model=models)
    assert report.roles["parameter"].tensors == 2 and report.weights_ratio > 8
    loaded = sp.Store(tmp_path).load()["model"]
    for one, saved in ((models["plain"], loaded["plain"]), (models["more"][0], loaded["more"][0])):
        assert torch.equal(saved["seen"], one.seen) and not torch.equal(saved["users"], one.users)
        assert float((saved["users"] - one.users).detach().abs().mean()) < 0.004
