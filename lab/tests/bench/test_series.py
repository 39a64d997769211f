"""A training for whoever has no checkpoints."""

from __future__ import annotations

import math

from shrinkpoint_lab.bench.measure import measure
from shrinkpoint_lab.bench.series import QualityFunction, SampleRunOptions, record_sample_run
from shrinkpoint_lab.bench.systems import make_system
from shrinkpoint_lab.demo.workload import GPTConfig

SMALL = SampleRunOptions(steps=12, save_every=4, first_save=4, batch=2, held_out=4, config=GPTConfig(1, 32, 2, 16, 0.0))


def test_a_training_is_recorded_with_its_loss(tmp_path):
    heard = []
    recorded, quality = record_sample_run(tmp_path, SMALL, lambda step, loss: heard.append((step, loss)))
    assert [one.step for one in recorded] == [4, 8, 12] and [step for step, _ in heard] == list(range(1, 13))
    losses = [quality.value_at_step(one.step, one.state) for one in recorded]
    assert losses[0] < math.log(256) + 0.2 and losses[-1] < losses[0]
    assert measure(make_system("lossless"), recorded, quality).rows[-1].rise == 0


def test_the_same_plan_gives_the_same_training(tmp_path):
    (a, quality), (b, _) = record_sample_run(tmp_path / "a", SMALL), record_sample_run(tmp_path / "b", SMALL)
    assert isinstance(quality, QualityFunction) and a.store.manifest().digest == b.store.manifest().digest
