"""A small state with layers of every kind, and a scheme of every kind for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from helpers.sharded_states import Saved
from torch import nn
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.tensors.flat_state import FlatState, flatten

BINS = {"bins": 16, "embedding_bins": 16}
SLOTS = ("exp_avg", "exp_avg_sq")
PRUNED = {**BINS, "prune": 0.1, "protect": 0.005}
SCHEMES = {
    "fisher by error": lambda: sp.Fisher(relative_error=0.2),
    "fisher by budget": lambda: sp.Fisher(terms=64),
    "fisher by ratio": lambda: sp.Fisher(ratio=12),
    "fisher, moments exact": lambda: sp.Fisher(relative_error=0.2, moments="exact"),
    "fisher, moments dropped": lambda: sp.Fisher(relative_error=0.2, moments="drop"),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=PRUNED),
    "inshrinkerator as printed": lambda: sp.Inshrinkerator(config=PRUNED, paper=True),
    "inshrinkerator, moments lossy": lambda: sp.Inshrinkerator(config=PRUNED, optimizer="lossy"),
    "inshrinkerator, moments reset": lambda: sp.Inshrinkerator(config=PRUNED, optimizer="reset"),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
    "qd": lambda: sp.QD(config={"least": 8, "most": 64}),
    "lc": sp.LCCheckpoint,
    "lc as printed": lambda: sp.LCCheckpoint(paper=True),
    "lc, moments lossy": lambda: sp.LCCheckpoint(optimizer="lossy"),
    "excp": sp.ExCP,
    "excp as released": lambda: sp.ExCP(rule="released"),
    "scar": sp.SCAR,
    "topn": sp.TOPN,
}


class Tiny(nn.Module):
    """An embedding, linear layers of odd sizes, a norm, a convolution of four axes."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(150, 64)
        self.up, self.down = nn.Linear(64, 97), nn.Linear(97, 65)
        self.norm, self.conv = nn.LayerNorm(65), nn.Conv2d(1, 9, (3, 3), padding=1)
        self.head = nn.Linear(65, 150)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(F.gelu(self.up(self.wte(x)))))
        return self.head(hidden + self.conv(hidden[:, None, None]).mean((1, 2)))


@functools.cache
def run() -> tuple[FlatState, FlatState]:
    """Two checkpoints of a training run."""
    torch.manual_seed(0)
    model, out = Tiny(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for _ in range(5):
            x = torch.randint(0, 150, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x * 7 + 3) % 150).backward()
            optimizer.step()
        out.append(flatten(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})))
    return out[0], out[1]


def assert_agreed(ranks: Sequence[Saved]) -> None:
    """Assert that all ranks report the same loss, and that shards of one tensor have the same codebook or lattice."""
    for saved in ranks:
        assert all(loss == saved.loss[0] for loss in saved.loss)
        for name in saved.tensors:
            shards = [state.quantized.get(name) for state in saved.kept if name in state.state.tensors]
            nonempty = [shard for shard in shards if shard is not None and shard.codes.numel()]
            assert len({type(shard) for shard in nonempty}) <= 1
            if nonempty and isinstance(nonempty[0], CodebookTensor):
                assert all(torch.equal(shard.centers, nonempty[0].centers) for shard in nonempty)
            elif nonempty and isinstance(nonempty[0], LatticeTensor):
                assert len({(shard.lattice.spacing, shard.lattice.step) for shard in nonempty}) == 1
