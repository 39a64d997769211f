"""What `scheme="fisher"` does by itself in each framework: bytes, the rise of the loss on unseen text, seconds.

    python benchmarks/default_scheme.py                      # all; or --only lightning loop

A byte-level GPT with .84 M parameters and AdamW trains on the standard library's source through each framework, which
is given the name of the scheme and nothing else (a plain loop and Accelerate, which see no loss, are also given a
function of a model and a batch). "validation" parts have an evaluation dataset of 64 windows; the others measure on
batches of training. Right after each save its weights are read back, and the loss of a copy of the model with them is
compared with that of the model that trains, on 32 windows that neither training nor the evaluation dataset has. Seconds
are those for which a save holds up the loop.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from frameworks import HELD_OUT, HeldOut, Windows, apart, arguments, gpt_loss
from lossless_speed import machine
from summarize import commit
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import shrinkpoint as sp
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.load import find_chain
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

PARTS = (
    "transformers, validation",
    "transformers",
    "lightning, validation",
    "lightning",
    "accelerate",
    "loop",
    "loop, once",
)
SHAPE = GPTConfig(layers=4, width=128, heads=4)
EVALUATION = range(50_000, 50_064)
"""Numbers of the windows of the evaluation dataset; training takes the first few thousand."""


class Counted:
    """The reports of a run's saves, and what each has done to the loss on unseen text."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out, self.model = held_out, nn.Module()
        self.lines: list[dict[str, Any]] = []
        self.store: Path | None = None  # of a plain loop; frameworks have a directory for each save

    def __call__(self, report: SaveReport) -> None:
        chain = find_chain(report.path, None) if self.store is None else find_chain(self.store, report.step)
        tensors = dict(decode_chain(chain).reference.tensors)
        loss: Any = report.loss_report
        self.lines.append(
            {
                "bytes": report.stored_bytes,
                "raw_bytes": report.raw_bytes,
                "keyframe": report.keyframe,
                "seconds": report.seconds,
                "stall": report.stall_seconds,
                "measuring": loss["seconds"],
                "candidates": len(loss["tried"]),
                "terms": loss["terms"],
                "measured": report.loss_increase,
                "measured_on": report.measured_on,
                "unseen": self.held_out.rise(self.model, tensors),
            }
        )


def of_transformers(counted: Counted, root: Path, saves: int, steps: int, evaluates: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

    from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

    set_seed(0)
    sizes = {"n_positions": SHAPE.context, "n_embd": SHAPE.width, "n_layer": SHAPE.layers, "n_head": SHAPE.heads}
    counted.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes))
    counted.held_out.loss = lambda model, batch: model(input_ids=batch, labels=batch).loss
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        output_dir=str(root), max_steps=saves * steps, save_steps=steps, learning_rate=1e-3, **quiet
    )
    data = Subset(Windows(), EVALUATION) if evaluates else None
    shrink = ShrinkConfig("fisher", on_save=counted)
    ShrinkTrainer(
        counted.model, arguments, train_dataset=Windows(count=1 << 14), eval_dataset=data, shrink=shrink
    ).train()


def of_lightning(counted: Counted, root: Path, saves: int, steps: int, evaluates: bool) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(SHAPE)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return gpt_loss(self.model, batch["input_ids"])

        def validation_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return gpt_loss(self.model, batch["input_ids"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.param_groups(0.1), lr=1e-3)

    L.seed_everything(0, verbose=False)
    module = Module()
    counted.model = module.model
    every = ModelCheckpoint(root, every_n_train_steps=steps, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_steps=saves * steps,
        accelerator="cpu",
        plugins=[ShrinkIO("fisher", on_save=counted)],
        callbacks=[ShrinkIOCallback(), every],
        num_sanity_val_steps=0,
        **quiet,
    )
    loaders = [DataLoader(Windows(count=1 << 14), batch_size=8)]
    if evaluates:
        loaders.append(DataLoader(Subset(Windows(), EVALUATION), batch_size=8))
    trainer.fit(module, *loaders)


def loss_of_batch(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return gpt_loss(model, batch["input_ids"])


def of_accelerate(counted: Counted, root: Path, saves: int, steps: int, _: bool) -> None:
    from accelerate import Accelerator

    from shrinkpoint.train.accelerate import save_state

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = counted.model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3)
    parts = accelerator.prepare(model, optimizer, DataLoader(Windows(count=1 << 14), batch_size=8))
    model, optimizer, loader = parts
    for step, batch in zip(range(1, saves * steps + 1), loader, strict=False):
        accelerator.backward(loss_of_batch(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if step % steps == 0:
            save_state(accelerator, root / f"checkpoint-{step}", scheme="fisher", loss=loss_of_batch, on_save=counted)


def of_loop(counted: Counted, root: Path, saves: int, steps: int, once: bool) -> None:
    torch.manual_seed(0)
    counted.store, model = root, GPT(SHAPE)
    counted.model = model
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3)
    recent = sp.RecentBatches(loss_of_batch)
    scheme = sp.Fisher(evaluate=recent, evaluate_every=None if once else 1)
    with sp.CheckpointManager(root, scheme=scheme, on_save=counted) as manager:
        for step, batch in enumerate(DataLoader(Windows(count=8 * saves * steps), batch_size=8), 1):
            recent.add(batch)
            loss_of_batch(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % steps == 0:
                manager.save(step, model=model, optimizer=optimizer)


RUNS: dict[str, Callable[[Counted, Path, int, int, bool], None]] = {
    "transformers": of_transformers,
    "lightning": of_lightning,
    "accelerate": of_accelerate,
    "loop": of_loop,
}


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the first save and of the later ones, rises in per cent, evaluated candidates, and seconds."""
    later = lines[1:]
    unseen, measured = [100 * line["unseen"] for line in lines], [line["measured"] for line in lines]
    return {
        "first": lines[0]["raw_bytes"] / lines[0]["bytes"],
        "later": sum(line["raw_bytes"] for line in later) / sum(line["bytes"] for line in later),
        "measured_worst": max((100 * rise for rise in measured if rise is not None), default=None),
        "unseen_mean": mean(unseen),
        "unseen_worst": max(unseen),
        "candidates": median(line["candidates"] for line in lines),
        "seconds": median(line["stall"] for line in later),
        "measured_on": lines[-1]["measured_on"],
    }


def row(part: str, one: dict[str, Any]) -> str:
    """A line of the table."""
    worst = float("nan") if one["measured_worst"] is None else one["measured_worst"]
    numbers = f"{one['first']:7.1f}x {one['later']:7.1f}x {worst:+9.3f} {one['unseen_mean']:+9.3f}"
    return (
        f"{part:26} {numbers} {one['unseen_worst']:+9.3f} {one['candidates']:5.1f} {one['seconds']:8.2f}"
        f"   {one['measured_on']}"
    )


def main() -> None:
    args = arguments(__doc__, PARTS, 25, Path("results/default_scheme.json"))
    if args.part:
        warnings.simplefilter("ignore")  # of the frameworks: this is no training that anybody keeps
        counted = Counted(HeldOut(gpt_loss))
        name, _, variant = args.part.partition(", ")
        RUNS[name](counted, args.folder, args.saves, args.steps, bool(variant))
        print(json.dumps(counted.lines))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    head = f"{'first':>8} {'later':>8} {'measured':>9} {'unseen':>9} {'worst':>9} {'tried':>5} {'seconds':>8}"
    print(f"{args.saves} saves, {args.steps} steps apart, {len(HELD_OUT)} unseen windows\n\n{'':26} {head}")
    versions = {"torch": torch.__version__, "shrinkpoint": sp.__version__}
    known = {"saves": args.saves, "steps": args.steps, "versions": versions}
    known |= {"machine": machine(), "commit": commit(), "date": date.today().isoformat()}
    for part in args.only:
        found[part] = apart(__file__, part, args)
        print(row(part, summary(found[part])), flush=True)
        results = {**known, "summary": {name: summary(lines) for name, lines in found.items()}, **found}
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
