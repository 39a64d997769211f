"""A small training run that resumes from what it finds, in one of four frameworks, stock or through shrinkpoint.

    python benchmarks/crash_points_train.py lightning ours runs/net

It is what `crash_points.py` has killed. Every run of one framework trains the same model on the same batches; a step is
a function of the state and of the step's number, so that a repeated step repeats its bits. It prints the step that it
resumed from, if any, and writes the last weights beside the directory, not into it: only saves are to be killed.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, EVERY, WIDTH = 4, 2, 32


class Points(torch.utils.data.Dataset):
    """Points of 16 numbers, by number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(16, generator=torch.Generator().manual_seed(index))}


class Net(nn.Module):
    """Learns to give its input back; called as Hugging Face's Trainer calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - x).square().mean()}


def started() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def advance(net: Net, optimizer: torch.optim.AdamW, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(8, 16, generator=generator))["loss"].backward()
    optimizer.step()


def resumed(step: int) -> None:
    print(f"resumed from step {step}", flush=True)


def steps_in(out: Path, pattern: str) -> dict[int, Path]:
    """What fits a pattern with a number in it, by number."""
    names = ((re.fullmatch(pattern, path.name), path) for path in out.iterdir()) if out.exists() else ()
    return {int(match[1]): path for match, path in names if match}


def loop_stock(out: Path) -> nn.Module:
    """torch.save into a file a step; the newest is loaded."""
    net, optimizer = started()
    out.mkdir(parents=True, exist_ok=True)
    there, at = steps_in(out, r"step-(\d+)\.pt"), 0
    if there:
        saved = torch.load(there[max(there)], weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        at = saved["step"]
    resumed(at)
    for step in range(at + 1, STEPS + 1):
        advance(net, optimizer, step)
        if step % EVERY == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, out / f"step-{step}.pt")
    return net


def loop_ours(out: Path, background: bool = False) -> nn.Module:
    import shrinkpoint as sp

    net, optimizer = started()
    with sp.CheckpointManager(out, background=background) as manager:
        found = manager.restore(model=net, optimizer=optimizer)
        at = found.step if found else 0
        resumed(at)
        for step in range(at + 1, STEPS + 1):
            advance(net, optimizer, step)
            if step % EVERY == 0:
                manager.save(step, model=net, optimizer=optimizer)
    return net


def loop_background(out: Path) -> nn.Module:
    return loop_ours(out, background=True)


def transformers_of(kind: type, out: Path, checkpoint: str | None) -> nn.Module:
    from transformers import TrainerCallback, TrainingArguments

    class Tell(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            resumed(state.global_step)

    settings = {
        "max_steps": STEPS,
        "save_steps": EVERY,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
        "remove_unused_columns": False,
        "seed": 0,
    }
    trainer = kind(
        model=started()[0],
        args=TrainingArguments(str(out), **settings),
        train_dataset=Points(8 * STEPS),
        callbacks=[Tell()],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    model: nn.Module = trainer.model
    return model


def transformers_stock(out: Path) -> nn.Module:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint

    return transformers_of(Trainer, out, get_last_checkpoint(str(out)) if out.exists() else None)


def transformers_ours(out: Path) -> nn.Module:
    from shrinkpoint.train.transformers import ShrinkTrainer, latest_valid

    return transformers_of(ShrinkTrainer, out, latest_valid(out) if out.exists() else None)


def lightning_of(out: Path, plugins: list[Any], find: Callable[[], Any]) -> nn.Module:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = started()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            resumed(checkpoint["global_step"])

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    keep = ModelCheckpoint(out, filename="{step}", every_n_epochs=1, save_top_k=-1, save_last=True)
    trainer = pl.Trainer(
        max_epochs=STEPS // EVERY,
        accelerator="cpu",
        devices=1,
        plugins=plugins,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    model = Lit()
    trainer.fit(model, torch.utils.data.DataLoader(Points(8 * EVERY), batch_size=8), ckpt_path=find())
    return model.net


def lightning_stock(out: Path) -> nn.Module:
    return lightning_of(out, [], lambda: "last")


def lightning_ours(out: Path) -> nn.Module:
    from shrinkpoint.train.lightning import ShrinkIO, latest_valid

    return lightning_of(out, [ShrinkIO()], lambda: latest_valid(out) if out.exists() else None)


def dcp_of(
    out: Path, at: Path | None, writer: Callable[[Path], dict[str, Any]], reader: Callable[[Path], Any]
) -> nn.Module:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net, optimizer = started()
    state = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True)) | {"step": 0}
    if at is not None:
        dcp.load(state, **reader(at))
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    resumed(state["step"])
    for step in range(state["step"] + 1, STEPS + 1):
        advance(net, optimizer, step)
        if step % EVERY == 0:
            weights, moments = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optim": moments, "step": step}, **writer(out / f"step-{step}"))
    return net


def dcp_stock(out: Path) -> nn.Module:
    there = steps_in(out, r"step-(\d+)")
    at = there[max(there)] if there else None
    return dcp_of(out, at, lambda path: {"checkpoint_id": path}, lambda path: {"checkpoint_id": path})


def dcp_ours(out: Path) -> nn.Module:
    from shrinkpoint.train.dcp import Reader, Writer, latest_valid

    at = latest_valid(out) if out.exists() else None
    return dcp_of(out, at, lambda path: {"storage_writer": Writer(path)}, lambda path: {"storage_reader": Reader(path)})


RUNS: dict[tuple[str, str], Callable[[Path], nn.Module]] = {
    ("loop", "stock"): loop_stock,
    ("loop", "ours"): loop_ours,
    ("loop", "background"): loop_background,
    ("transformers", "stock"): transformers_stock,
    ("transformers", "ours"): transformers_ours,
    ("lightning", "stock"): lightning_stock,
    ("lightning", "ours"): lightning_ours,
    ("dcp", "stock"): dcp_stock,
    ("dcp", "ours"): dcp_ours,
}
"""Framework and who saves -> the training."""


def fingerprint(model: nn.Module) -> Iterator[str]:
    for name, tensor in model.state_dict().items():
        yield f"{name} {tensor.numpy().tobytes().hex()}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted({framework for framework, _ in RUNS}))
    parser.add_argument("saves", choices=("stock", "ours", "background"))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = RUNS[args.framework, args.saves](args.out)
    (args.out.parent / "final.txt").write_text("".join(fingerprint(model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
