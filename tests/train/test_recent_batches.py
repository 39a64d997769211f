"""The last training batches as what a scheme measures on, in a plain loop."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from helpers.processes import ranks
from helpers.small_training import Run, digits
from helpers.strategies import same
from torch.nn.functional import cross_entropy

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train.recent_batches import copy_batch

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")


def loss(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    return images[32 * number : 32 * number + 32], labels[32 * number : 32 * number + 32]


def test_a_loop_that_adds_its_batches_gets_a_measured_checkpoint() -> None:
    run, recent = Run(steps=20), sp.RecentBatches(loss, batches=4, accumulate=2)
    for number in range(6):
        recent.add(batch(number))
    assert recent.terms == 64
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(evaluate=recent)) as manager:
        report = manager.save(1, **run.parts)
        with torch.no_grad():
            run.model.eval()
            plain = sum(float(loss(run.model, batch(number))) for number in range(2, 6)) / 4
            manager.restore(**run.parts)
            run.model.eval()
            rise = sum(float(loss(run.model, batch(number))) for number in range(2, 6)) / 4 - plain
    assert report.is_measured and report.measured_on == "the last 4 training batches"
    assert "on the last 4 training batches" in str(report)
    assert report.loss_report["budget"] == "0.1%" and report.loss_report["quality"] == pytest.approx(plain)
    assert report.loss_report["rise"] == pytest.approx(rise, abs=1e-6) and rise <= 0.001 * plain


def test_training_does_not_notice_what_is_kept_and_measured() -> None:
    run, other, recent = Run(steps=10), Run(steps=10), sp.RecentBatches(loss)
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(evaluate=recent)) as manager:
        for step in range(3):
            recent.add(batch(step))
            manager.save(step, **run.parts)
            assert all(module.training for module in run.model.modules())
            for each in (run, other):
                torch.manual_seed(step)
                each.steps(5)
    assert same(run.model.state_dict(), other.model.state_dict())
    assert same(run.optimizer.state_dict(), other.optimizer.state_dict())


def test_a_save_before_the_first_batch_is_exact_and_says_so() -> None:
    run, recent = Run(steps=5), sp.RecentBatches(loss)
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(evaluate=recent)) as manager:
        with pytest.warns(LossWarning, match=r"no training batch was seen before the save, so .* exact.*: call add\("):
            report = manager.save(1, **run.parts)
        assert report.loss_report["chosen"] is None
        recent.add(batch(0))
        assert manager.save(2, **run.parts).loss_report["chosen"] is not None


def test_changing_a_batch_later_does_not_change_what_is_kept() -> None:
    run, recent = Run(), sp.RecentBatches(loss)
    images, labels = (x.clone() for x in batch(0))
    recent.add((images, labels))
    before = recent.reading(run.model).value
    images.zero_()
    assert recent.reading(run.model).value == before


@pytest.mark.filterwarnings("ignore:.*(prototype|beta) sta")
@pytest.mark.parametrize("form", ["jagged", "nested", "coo", "csr"])
def test_batches_of_nested_and_sparse_tensors_are_kept(form: str) -> None:
    rows = torch.arange(24.0).reshape(6, 4) % 5 * (torch.arange(24).reshape(6, 4) % 3 == 0)
    examples = {
        "jagged": lambda: torch.nested.nested_tensor([rows[:2], rows[2:]], layout=torch.jagged),
        "nested": lambda: torch.nested.nested_tensor([rows[:2], rows[2:]], layout=torch.strided),
        "coo": rows.to_sparse,
        "csr": rows.to_sparse_csr,
    }[form]()
    recent, small = (sp.RecentBatches(lambda _, x: x.values().sum(), batches=1, max_bytes=n) for n in (1 << 20, 9))
    for kept in (recent, small):
        kept.add(examples.coalesce() if form == "coo" else examples)
    assert recent(torch.nn.Linear(1, 1)) == float(rows.sum()) and recent.terms == (2 if examples.is_nested else 6)
    assert "no training batch" in small.reading(torch.nn.Linear(1, 1)).failure


def test_of_a_large_batch_the_first_examples_are_kept() -> None:
    Pair = namedtuple("Pair", ("x", "y"))
    wide = Pair(torch.arange(400.0).reshape(100, 4), {"labels": torch.arange(100)})
    kept = copy_batch(wide, 1200)
    assert type(kept) is Pair and len(kept.x) == len(kept.y["labels"]) == 50
    assert torch.equal(kept.x, wide.x[:50]) and torch.equal(kept.y["labels"], torch.arange(50))
    assert copy_batch(wide, 12) is None
    assert copy_batch([torch.ones(100), torch.ones(7)], 12) is None  # which of them are examples?
    run, recent = Run(), sp.RecentBatches(loss, batches=2, max_bytes=100)
    recent.add(batch(0))
    assert "no training batch" in recent.reading(run.model).failure and recent.terms == 32


def test_a_loss_that_is_none_makes_an_exact_checkpoint() -> None:
    recent = sp.RecentBatches(lambda model, batch: None)
    recent.add(batch(0))
    manager = sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(evaluate=recent))
    with manager, pytest.warns(LossWarning, match="NoneType"):
        assert not manager.save(1, **Run(steps=1).parts).loss_report["chosen"]


SHARDED = """
import torch, torch.distributed.checkpoint as dcp, warnings
import shrinkpoint as sp
from helpers import multi_rank_training as training
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.train.dcp import Writer

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    warnings.simplefilter("ignore", sp.errors.LossWarning)
    run = training.Run(training.mesh_of(range(width)))
    recent = sp.RecentBatches(lambda model, x: (model(x) - x.sum(1, keepdim=True)).square())
    for number in range(3 - rank):
        recent.add(torch.randn(16, 48, generator=torch.Generator().manual_seed(number)))
    run.train(4)
    before = training.digest(run.state())
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/a", scheme=sp.Fisher(evaluate=recent), model=run.model))
    loss = read_directory_manifest(f"{folder}/a").loss
    training.done(rank, folder, [loss["rise"] / loss["quality"], recent.terms, training.digest(run.state()) == before])
"""


@pytest.mark.nightly
def test_ranks_that_share_a_model_measure_as_many_batches(tmp_path: Any) -> None:
    for rise, terms, is_unchanged in ranks(SHARDED, 2, tmp_path):
        assert rise <= 0.001 and terms == 32 and is_unchanged


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_of_a_device_are_kept_on_the_host_and_measured_on_the_device() -> None:
    run, recent, there = Run(), sp.RecentBatches(loss), sp.RecentBatches(loss)
    recent.add(batch(0))
    there.add([x.cuda() for x in batch(0)])
    expected = recent.reading(run.model).value
    assert there.reading(run.model.cuda()).value == pytest.approx(expected, rel=1e-4) and there.terms == 32
