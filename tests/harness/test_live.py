"""A training for whoever has no checkpoints."""

from __future__ import annotations

import math

from shrinkpoint.demo.model import Shape
from shrinkpoint.harness import Quality, measure, system
from shrinkpoint.harness.live import Plan, record

SMALL = Plan(steps=12, every=4, first=4, batch=2, held_out=4, shape=Shape(1, 32, 2, 16, 0.0))


def test_a_training_is_recorded_with_its_loss(tmp_path):
    heard = []
    recorded, quality = record(tmp_path, SMALL, lambda step, loss: heard.append((step, loss)))
    assert [one.step for one in recorded] == [4, 8, 12] and [step for step, _ in heard] == list(range(1, 13))
    losses = [quality.given(one.step, one.state) for one in recorded]
    assert losses[0] < math.log(256) + 0.2 and losses[-1] < losses[0]
    assert measure(system("lossless"), recorded, quality).rows[-1].rise == 0


def test_the_same_plan_gives_the_same_training(tmp_path):
    (a, quality), (b, _) = record(tmp_path / "a", SMALL), record(tmp_path / "b", SMALL)
    assert isinstance(quality, Quality) and a.store.manifest().digest == b.store.manifest().digest
