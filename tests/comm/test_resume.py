"""What both ends remember is saved and restored with everything else, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.comm_links import STATEFUL, batches, cross, ends, same
from helpers.parameters import each_value
from torch import nn

import shrinkpoint as sp
from shrinkpoint.comm import CompressionPoints, Link, insert_compression
from shrinkpoint.errors import MismatchError

HOWS = [*STATEFUL, "q2:16:dither", "rand10"]


@pytest.mark.parametrize(("spec", "background"), each_value(HOWS, [False, True]))
def test_a_run_that_was_interrupted_equals_one_that_was_not(tmp_path: Path, spec: str, background: bool) -> None:
    steps, (sender, receiver) = list(batches(24)), ends(spec)
    expected = []
    with sp.CheckpointManager(tmp_path, background=background) as manager:
        for number, (x, context) in enumerate(steps):
            if number in (5, 11):
                manager.save(number, links=[sender, receiver])
            expected.append(cross(sender, receiver, x, context))
    again, other = ends(spec)
    at_step = sp.CheckpointManager(tmp_path).restore(links=[again, other])
    assert at_step is not None and at_step.step == 11
    for (x, context), out in zip(steps[11:], expected[11:], strict=True):
        assert same(cross(again, other, x, context), out)
    assert again.fingerprint() == other.fingerprint() == sender.fingerprint() == receiver.fingerprint()


def test_samples_in_a_file_are_saved_too(tmp_path: Path) -> None:
    def made(number: int) -> tuple[Link, Link]:
        return ends(f"aq(q2:64, most_bytes=400, folder={tmp_path / str(number)})")

    steps, (sender, receiver) = list(batches(30)), made(0)
    for x, context in steps[:20]:
        cross(sender, receiver, x, context)
    sp.CheckpointManager(tmp_path / "run").save(20, sender=sender, receiver=receiver)
    again, other = made(1)
    sp.CheckpointManager(tmp_path / "run").restore(sender=again, receiver=other)
    for x, context in steps[20:]:
        assert same(cross(again, other, x, context), cross(sender, receiver, x, context))


def test_a_restore_of_one_end_alone_is_found() -> None:
    for spec in [spec for spec in HOWS if not spec.startswith("aq")]:
        sender, receiver = ends(spec)
        for x, context in batches(5):
            cross(sender, receiver, x, context)
        fresh = Link(spec)
        assert fresh.fingerprint() != sender.fingerprint()
        fresh.load_state_dict(receiver.state_dict())
        assert fresh.fingerprint() == sender.fingerprint()


def test_a_state_of_another_compressor_or_feedback_is_refused() -> None:
    link = Link("ef21(top10)")
    link.pack(torch.ones(4, 8))
    for how in ("top10", "ef21(top20)", "ef(top10)"):
        with pytest.raises(MismatchError, match="Make the link as it was saved"):
            Link(how).load_state_dict(link.state_dict())


class Run:
    """A model with points, trained on samples that come back."""

    def __init__(self, forward: str, backward: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
        self.points: CompressionPoints = insert_compression(
            self.model, after=["1", "3"], forward=forward, backward=backward, micro_batches=2
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    @property
    def parts(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "points": self.points}

    def step(self, number: int) -> float:
        noise = torch.Generator().manual_seed(number)
        ids = torch.randperm(16, generator=noise)[:8]
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))[ids]
        self.points.set_sample_ids(ids)
        self.optimizer.zero_grad()
        losses = [(self.model(one) - one.sum(1, keepdim=True)).square().mean() for one in x.tensor_split(2)]
        sum(losses).backward()
        self.optimizer.step()
        return float(sum(losses).detach())


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("ef(top20)", "ef(q2:16)"),
        ("aq(q2:16, warmup=1)", "q4:16:dither"),
        ("top20", "same"),
    ],
)
def test_a_training_that_was_interrupted_equals_one_that_was_not(tmp_path: Path, forward: str, backward: str) -> None:
    run = Run(forward, backward)
    for number in range(5):
        run.step(number)
    sp.CheckpointManager(tmp_path).save(5, **run.parts)
    losses = [run.step(number) for number in range(5, 10)]
    again = Run(forward, backward)
    again.step(99)
    sp.CheckpointManager(tmp_path).restore(**again.parts)
    assert [again.step(number) for number in range(5, 10)] == losses
    for a, b in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_points_of_other_links_are_refused(tmp_path: Path) -> None:
    sp.CheckpointManager(tmp_path).save(0, points=Run("ef21(top20)", "ef(top20)").points)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for options in (
        {"after": ["0"], "forward": "q4"},
        {"after": ["0", "1"], "forward": "ef21(top20)"},
        {"after": ["0", "1"], "forward": "ef(top20)", "backward": "ef(top20)"},
    ):
        points = insert_compression(model, **options)
        with pytest.raises(MismatchError):
            sp.CheckpointManager(tmp_path).restore(points=points)
        points.remove()
