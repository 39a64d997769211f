"""The promises of `FrameworkContract` for each framework."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.framework import FrameworkContract
from helpers.writers import Loop

from shrinkpoint.train import dcp


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestDcpManager(FrameworkContract):
    backgrounds = (False,)
    tells_of_empty_directories = False

    def train(self, root, saves, *, resume=False, limit=None, background=False, on_save=None) -> Any:
        loop, manager = Loop(), dcp.Manager(root, keep=limit, threads=1)
        done = manager.restore(**loop.objects).step if resume else 0
        for step in range(done + 1, saves + 1):
            loop.step(step)
            report = manager.save(step, **loop.objects)
            if on_save is not None:
                on_save(report)
        return loop.state

    def newest(self, root: Path) -> Path | None:
        return dcp.latest_valid(root, deep=True)


class TestTransformers(FrameworkContract):
    def train(self, root, saves, *, resume=False, limit=None, background=False, on_save=None) -> Any:
        huggingface = pytest.importorskip("helpers.huggingface")
        from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

        shrink = ShrinkConfig(background=background, on_save=on_save)
        until = huggingface.Until(2 * saves)
        settings = {"save_total_limit": limit, "trainer_shrink": shrink, "trainer_callbacks": [until]}
        return huggingface.ended(huggingface.made(ShrinkTrainer, root, **settings), resume)

    def newest(self, root: Path) -> Path | None:
        from shrinkpoint.train.transformers import latest_valid

        return Path(latest_valid(root))


class TestLightning(FrameworkContract):
    def train(self, root, saves, *, resume=False, limit=None, background=False, on_save=None) -> Any:
        pytest.importorskip("lightning")
        from helpers.lightning_runs import every, points, small, trainer
        from lightning.pytorch.callbacks import Callback

        from shrinkpoint.train.lightning import ShrinkIO, latest_valid

        class Reseeded(Callback):
            """Lightning saves no random generators: each step begins with its own."""

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                torch.manual_seed(trainer.global_step)

        keep = every(root, filename="{step}", save_top_k=limit or -1, monitor="step", mode="max")
        plugin = ShrinkIO(background=background, on_save=on_save)
        run = trainer(root, plugin, epochs=saves, callbacks=[Reseeded(), keep])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Lightning says of runs this small
            run.fit(small(), points(), ckpt_path=latest_valid(root) if resume else None)
        return [run.lightning_module.state_dict(), run.optimizers[0].state_dict()]

    def newest(self, root: Path) -> Path | None:
        from shrinkpoint.train.lightning import latest_valid

        return latest_valid(root)


class TestAccelerate(FrameworkContract):
    def train(self, root, saves, *, resume=False, limit=None, background=False, on_save=None) -> Any:
        accelerate_runs = pytest.importorskip("helpers.accelerate_runs")
        from shrinkpoint.train.accelerate import AcceleratorCheckpointer

        accelerate_runs.forget()
        run = accelerate_runs.Loop(root, limit=limit)
        with AcceleratorCheckpointer(run.accelerator, background=background, on_save=on_save) as checkpointer:
            if resume:
                checkpointer.load_state()
            for _ in range(run.accelerator.save_iteration, saves):
                run.steps(1)
                checkpointer.save_state()
        return run.state()

    def newest(self, root: Path) -> Path | None:
        from helpers.accelerate_runs import Loop as AcceleratedLoop
        from helpers.accelerate_runs import forget

        from shrinkpoint.train.accelerate import load_state

        forget()
        return load_state(AcceleratedLoop(root).accelerator).directory
