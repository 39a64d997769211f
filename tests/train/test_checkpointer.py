"""A run whose checkpoints lie in folders that somebody else keeps and deletes."""

from __future__ import annotations

import errno
import logging
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from helpers.adam_states import normal
from helpers.codebooks import Rounding
from helpers.strategies import difference

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, MismatchError, NotFoundError, PolicyError, StateError, StorageError
from shrinkpoint.storage import local
from shrinkpoint.store import directory
from shrinkpoint.train import Checkpointer, latest_valid


class Loop:
    """A small loop that draws its batches from a seed of its own."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width, affine=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            x = normal(8, 64, seed=self.step)
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    @property
    def parts(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}


def copied(state):
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def test_what_is_saved_in_the_background_is_the_state_of_the_call(tmp_path):
    loop = Loop()
    loop.train()
    with Checkpointer(background=True) as checkpointer:
        for step in range(3):
            before = copied(loop.state)
            checkpointer.save(tmp_path / f"c{step}", loop.state, objects=loop.parts)
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.zero_()
            checkpointer.wait()
            assert difference(Checkpointer().load(tmp_path / f"c{step}").state, before) is None
            loop.train()


@pytest.mark.parametrize("damaged", [False, True])
def test_after_a_load_the_next_delta_is_made_against_what_lies_on_the_disk(tmp_path, damaged):
    loop = Loop()
    with Checkpointer() as checkpointer:
        for name in ("c1", "c2"):
            loop.train()
            checkpointer.save(tmp_path / name, loop.state, objects=loop.parts)
    with Checkpointer(background=True) as checkpointer:
        state = checkpointer.load(tmp_path / "c2").state
        for tensor in state["model"].values():
            tensor.zero_()
        checkpointer.discard(tmp_path / "c2")
        if damaged:
            for path in tmp_path.glob(".*/**/*.safetensors"):
                path.write_bytes(path.read_bytes()[:-1])
        loop.train()
        checkpointer.save(tmp_path / "c3", loop.state, objects=loop.parts)
        report = checkpointer.wait()
        assert report is not None
        assert report.keyframe == damaged
    assert difference(Checkpointer().load(tmp_path / "c3").state, loop.state) is None


def test_a_folder_that_is_discarded_while_it_is_written_is_gone_and_the_next_is_still_a_delta(tmp_path):
    loop = Loop()
    with Checkpointer(background=True) as checkpointer:
        for step in range(3):
            loop.train()
            checkpointer.save(tmp_path / f"c{step}", loop.state)
        checkpointer.discard(tmp_path / "c2")
        checkpointer.discard(tmp_path / "never")
        assert not (tmp_path / "c2").exists()
        shutil.rmtree(tmp_path / "c1")
        checkpointer.save(tmp_path / "c3", loop.state)
        report = checkpointer.wait()
        assert report is not None
        assert not report.keyframe
        assert difference(Checkpointer().load(tmp_path / "c3").state, loop.state) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c0", "c3"]


def test_a_background_error_is_raised_once_at_the_next_call(tmp_path):
    loop = Loop()
    (tmp_path / "c0").write_text("a file in the way")
    checkpointer = Checkpointer(background=True)
    checkpointer.save(tmp_path / "c0", loop.state)
    with pytest.raises(StorageError):
        checkpointer.save(tmp_path / "c1", loop.state)
    checkpointer.save(tmp_path / "c1", loop.state)
    checkpointer.close()
    assert difference(Checkpointer().load(tmp_path / "c1").state, loop.state) is None


def test_a_checkpoint_that_is_valid_after_an_error_keeps_its_payload(tmp_path, monkeypatch):
    def failing(path):
        if (path / directory.MANIFEST).exists():
            raise OSError(errno.EIO, "a bad disk")

    loop = Loop()
    with Checkpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", loop.state)
        loop.train()
        with monkeypatch.context() as patch:
            patch.setattr(local, "_fsync_dir", failing)
            with pytest.raises(StorageError):
                checkpointer.save(tmp_path / "b", loop.state)
        expected = copied(loop.state)
        loop.train()
        assert not checkpointer.save(tmp_path / "c", loop.state).keyframe
    directory.verify_directory(tmp_path / "b", deep=True)
    assert difference(Checkpointer().load(tmp_path / "b").state, expected) is None


def test_a_save_that_a_warning_ends_leaves_nothing(tmp_path):
    loop = Loop()
    checkpointer = Checkpointer(scheme=Rounding(bins=8))
    checkpointer.save(tmp_path / "a", loop.state, objects=loop.parts)
    loop.model.load_state_dict(checkpointer.load(tmp_path / "a").state["model"])  # on the centers
    with torch.no_grad():
        loop.model[0].weight += 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossWarning)
        with pytest.raises(LossWarning, match="of the progress"):
            checkpointer.save(tmp_path / "b", loop.state, objects=loop.parts)
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]


def test_a_scheme_that_measures_gets_the_live_model(tmp_path):
    loop, seen = Loop(), []
    loop.train(3)

    def evaluate(model: torch.nn.Module) -> float:
        seen.append(model is loop.model)
        model.eval()
        with torch.no_grad():
            return float(model(normal(8, 64, seed=1)).square().mean())

    scheme = sp.Fisher(budget="1%", evaluate=evaluate)
    with Checkpointer(scheme=scheme) as checkpointer:
        before = copied(loop.state)
        checkpointer.save(tmp_path / "c1", loop.state, objects=loop.parts)
        assert seen
        assert all(seen)
        assert difference(loop.state, before) is None
        with pytest.raises(PolicyError, match="Pass model="):
            checkpointer.save(tmp_path / "c2", loop.state)


def test_the_first_valid_is_found_and_a_warning_is_logged_for_others(tmp_path, caplog):
    loop = Loop()
    with Checkpointer() as checkpointer:
        for step in range(4):
            checkpointer.save(tmp_path / f"c{step}", loop.state)
            loop.train()
    payload = tmp_path / "c3" / "rank-00000.safetensors"
    data = bytearray(payload.read_bytes())
    data[-3] ^= 1
    payload.write_bytes(data)
    (tmp_path / "c2" / directory.MANIFEST).unlink()
    with caplog.at_level(logging.WARNING, "shrinkpoint"):
        found, passed = latest_valid(tmp_path / f"c{step}" for step in (3, 2, 1, 0))
    assert found == tmp_path / "c1"
    assert [one.directory.name for one in passed] == ["c3", "c2"]
    assert "c3 is passed over" in caplog.text
    assert latest_valid([]) == (None, ())


def test_bad_requests_raise_errors_and_leave_no_files(tmp_path):
    loop = Loop()
    checkpointer = Checkpointer()
    with pytest.raises(StateError, match="odd"):
        checkpointer.save(tmp_path / "c", {"odd": object()})
    with pytest.raises(PolicyError, match="metrics"):
        checkpointer.save(tmp_path / "c", loop.state, metrics={"loss": "low"})
    with pytest.raises(PolicyError, match="step"):
        checkpointer.save(tmp_path / "c", loop.state, step=-1)
    with pytest.raises(PolicyError, match="note"):
        checkpointer.save(tmp_path / "c", loop.state, note=None)
    with pytest.raises(PolicyError, match=r"extra.*levels"):
        checkpointer.save(tmp_path / "c", loop.state, extra=nested(5000))
    assert not directory.is_checkpoint(tmp_path / "c")
    with pytest.raises(NotFoundError):
        checkpointer.load(tmp_path / "nowhere")


def test_an_extra_that_nests_too_deep_leaves_the_checkpoint_before_it(tmp_path):
    loop, checkpointer = Loop(), Checkpointer()
    checkpointer.save(tmp_path / "c", loop.state, extra=nested(250))
    with pytest.raises(PolicyError, match=r"extra.*levels"):
        checkpointer.save(tmp_path / "c", loop.state, extra=nested(256))
    assert difference(Checkpointer().load(tmp_path / "c").state, loop.state) is None


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_several_ranks_wrote_is_not_taken_for_one_state(tmp_path):
    with Checkpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": torch.ones(3)})
    made = directory.read_directory_manifest(tmp_path / "a")
    shutil.copy(tmp_path / "a/rank-00000.safetensors", tmp_path / "a/rank-00001.safetensors")
    second = type(made.payloads[0])("rank-00001.safetensors", made.payloads[0].size, made.payloads[0].digest, 12)
    directory.commit(tmp_path / "a", [*made.payloads, second], scheme="lossless")
    with pytest.raises(MismatchError, match="2 ranks"):
        Checkpointer().load(tmp_path / "a")


KILLED = """
    import sys, torch
    from pathlib import Path
    from shrinkpoint.train import Checkpointer

    checkpointer, root = Checkpointer(background=True), Path(sys.argv[1])
    for step in range(10_000):
        state = {"step": step, "w": torch.full((200_000,), float(step)), "noise": torch.randn(100_000)}
        checkpointer.save(root / f"c{step:05d}", state, step=step)
        if step > 2:
            checkpointer.discard(root / f"c{step - 3:05d}")
        print(step, flush=True)
"""


@pytest.mark.parametrize("after", [4, *(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 9))])
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(tmp_path, after):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= after:
                break
        process.send_signal(signal.SIGKILL)
    found, _ = latest_valid(sorted((path for path in tmp_path.glob("c*")), reverse=True))
    assert found is not None
    loaded = Checkpointer().load(found)
    assert loaded.state["step"] >= after - 1
    assert torch.equal(loaded.state["w"], torch.full((200_000,), float(loaded.state["step"])))
    assert Path(found).name == f"c{loaded.manifest.step:05d}"
