"""What a save costs in each framework, stock and through shrinkpoint: bytes on disk, and the time the loop waits.

    python -m benchmarks.frameworks.run                          # all four; or --only dcp lightning

One training run a framework, of a byte-level GPT with 4.8 M parameters and AdamW on the standard library's source. At
every save point each method saves the same state in turn, into directories of its own, so that all methods see the same
machine in the same minutes; what runs in the background is waited for before the next method begins, outside the clock.
The first save is a keyframe and is kept apart. Bytes are those of the files' contents, a file with several links
counted once. Stock frameworks do not flush to the disk (torch.distributed.checkpoint does): their seconds end when the
system has the bytes; ours end when they are durable. "flush" is what it takes to make a checkpoint durable afterwards.
"fisher" is the lossy scheme with a budget of 1% of the loss on 32 held-out windows; its seconds hold the evaluations.
Its rise is measured here, not by the scheme: right after a save the weights are read back from the directory, and the
loss of a copy of the model with them is compared with the loss of the model that trains.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from lab.studies.harness import environment, machine, program
from shrinkpoint.store.decode import decode_directory
from shrinkpoint_lab.demo.workload import GPT, GPTConfig, stdlib_text

PARTS = ("transformers", "accelerate", "lightning", "dcp")
LOSSY = "fisher"
MAX_RISE = "1%"
"""By how much a lossy save may raise the loss, relative to it."""
HELD_OUT = range(40_000, 40_032)
"""Numbers of the windows that losses are measured on; training takes the first few thousand."""
Save = Callable[[Path], object]
Method = tuple[Save, Callable[[], object]]
"""How to save, and how to wait for what is still being written."""


class Windows(torch.utils.data.Dataset):
    """Windows of the text, by number."""

    def __init__(self, length: int = 128, count: int = 1 << 16) -> None:
        self.text = torch.frombuffer(bytearray(stdlib_text()), dtype=torch.uint8)
        self.length, self.count = length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = index * 7919 % (len(self.text) - self.length)
        window = self.text[at : at + self.length].long()
        return {"input_ids": window, "labels": window.clone()}


class Round:
    """The save points of one run."""

    def __init__(self, root: Path, methods: dict[str, Method], rise: Callable[[Path], float]) -> None:
        self.root, self.methods, self.rise = root, methods, rise
        self.rises: list[float] = []
        self.seconds: dict[str, list[float]] = {name: [] for name in methods}
        self.flush: dict[str, list[float]] = {name: [] for name in methods}
        self.bytes: dict[str, list[int]] = {name: [] for name in methods}

    def save(self, step: int) -> None:
        for name, (save, wait) in self.methods.items():
            folder = self.root / name.replace(" ", "-") / f"checkpoint-{step}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            save(folder)
            self.seconds[name].append(time.perf_counter() - began)
            wait()
            began = time.perf_counter()
            flush(folder)  # in the next method's seconds there must be nothing of this one
            self.flush[name].append(time.perf_counter() - began)
            self.bytes[name].append(size(folder.parent))
            if name == LOSSY:
                self.rises.append(self.rise(folder))

    @property
    def figures(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "flush": self.flush, "bytes": self.bytes, "rise": self.rises}


def size(root: Path) -> int:
    """Bytes of all files below, each once."""
    files = {path.stat().st_ino: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    return sum(files.values())


def flush(checkpoint: Path) -> None:
    """Make a checkpoint durable, if it was only handed to the system."""
    for path in [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def nothing() -> None:
    pass


def fisher(evaluate: Callable[[Any], float]) -> sp.Fisher:
    return sp.Fisher(budget=MAX_RISE, evaluate=evaluate)


class HeldOut:
    """The loss on windows that no batch had."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        windows = Windows()
        self.batch, self.loss = torch.stack([windows[index]["input_ids"] for index in HELD_OUT]), loss

    @torch.no_grad()
    def __call__(self, model: Any) -> float:
        training = model.training
        model.eval()
        value = float(self.loss(model, self.batch))
        model.train(training)
        return value

    def rise(self, model: nn.Module, tensors: dict[str, Tensor]) -> float:
        """By how much the loss rises, relative to it, where a copy of `model` gets the weights that were read back."""
        before, trial = self(model), copy.deepcopy(model)
        weights = {name: match(name, tensors) for name, _ in model.named_parameters()}  # a tied one is stored once
        trial.load_state_dict(weights, strict=False)
        return (self(trial) - before) / before


def match(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The one tensor of a checkpoint that is called so, at whatever place in the state."""
    matches = [tensor for key, tensor in tensors.items() if key == name or key.endswith(("/" + name, "/model." + name))]
    assert len(matches) == 1, (name, len(matches))
    return matches[0]


def gpt_loss(model: Any, batch: Tensor) -> Tensor:
    """Of the demo's GPT, which takes inputs and targets."""
    loss: Tensor = model(batch[:, :-1], batch[:, 1:].contiguous())
    return loss


def of_transformers(root: Path, saves: int, steps: int) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

    class Ours(ShrinkTrainer, Trainer):
        pass

    set_seed(0)
    shape = GPTConfig()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads
        )
    )

    def arguments(name: str) -> TrainingArguments:
        return TrainingArguments(
            output_dir=str(root / name),
            max_steps=saves * steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )

    driver = Trainer(model=model, args=arguments("driver"), train_dataset=Windows())

    def beside(kind: type[Trainer], name: str, **settings: Any) -> Save:
        """A trainer that only saves what the driver trains."""
        made: list[Trainer] = []

        def save(folder: Path) -> None:
            if not made:
                pair = (driver.optimizer, driver.lr_scheduler)
                made.append(kind(model=model, args=arguments(name), optimizers=pair, **settings))
                kept.append(made[0])
            made[0].state, made[0].args.output_dir = driver.state, str(folder.parent)
            made[0]._save_checkpoint(model, trial=None)

        return save

    kept: list[Any] = []
    held_out = HeldOut(lambda model, batch: model(input_ids=batch, labels=batch).loss)

    def wait() -> None:
        for one in kept:
            if isinstance(one, ShrinkTrainer):
                one.wait_for_checkpoint()

    rounds = Round(
        root,
        {
            "stock": (beside(Trainer, "stock"), nothing),
            "shrinkpoint": (beside(Ours, "shrinkpoint"), wait),
            "background": (beside(Ours, "background", shrink=ShrinkConfig(background=True)), wait),
            LOSSY: (beside(Ours, "fisher", shrink=ShrinkConfig(scheme=fisher(held_out))), wait),
        },
        lambda folder: held_out.rise(model, dict(decode_directory(folder).reference.tensors)),
    )

    class Points(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % steps == 0:
                rounds.save(state.global_step)

    driver.add_callback(Points())
    driver.train()
    return rounds.figures


def of_accelerate(root: Path, saves: int, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator

    from shrinkpoint.train.accelerate import AcceleratorCheckpointer

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3)
    loader = torch.utils.data.DataLoader(Windows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sync, background = AcceleratorCheckpointer(accelerator), AcceleratorCheckpointer(accelerator, background=True)
    held_out = HeldOut(gpt_loss)
    lossy = AcceleratorCheckpointer(accelerator, scheme=fisher(held_out))
    rounds = Round(
        root,
        {
            "stock": (lambda folder: accelerator.save_state(str(folder)), nothing),
            "shrinkpoint": (sync.save_state, nothing),
            "background": (background.save_state, background.wait),
            LOSSY: (lossy.save_state, nothing),
        },
        lambda folder: held_out.rise(model, dict(decode_directory(folder).reference.tensors)),
    )
    for step, batch in zip(range(1, saves * steps + 1), loader, strict=False):
        accelerator.backward(model(batch["input_ids"][:, :-1], batch["input_ids"][:, 1:].contiguous()))
        optimizer.step()
        optimizer.zero_grad()
        if step % steps == 0:
            rounds.save(step)
    for one in (sync, background, lossy):
        one.close()
    return rounds.figures


def of_lightning(root: Path, saves: int, steps: int) -> dict[str, Any]:
    import lightning as L
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from shrinkpoint.train.lightning import ShrinkIO

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(GPTConfig())

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.model(batch["input_ids"][:, :-1], batch["input_ids"][:, 1:].contiguous())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.param_groups(0.1), lr=1e-3)

    L.seed_everything(0, verbose=False)
    held_out, module = HeldOut(gpt_loss), Module()
    sync, background, stock = ShrinkIO(), ShrinkIO(background=True), TorchCheckpointIO()
    lossy = ShrinkIO(fisher(lambda module: held_out(module.model)))
    lossy.watch(module)
    trainer: list[L.Trainer] = []

    def through(io: Any) -> Save:
        """As `Trainer.save_checkpoint` does: collect the state, hand it to the plugin."""

        def save(folder: Path) -> None:
            io.save_checkpoint(trainer[0]._checkpoint_connector.dump_checkpoint(), folder)

        return save

    rounds = Round(
        root,
        {
            "stock": (through(stock), nothing),
            "shrinkpoint": (through(sync), nothing),
            "background": (through(background), background.wait),
            LOSSY: (through(lossy), nothing),
        },
        lambda folder: held_out.rise(module.model, dict(decode_directory(folder).reference.tensors)),
    )

    class Points(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step % steps == 0:
                rounds.save(trainer.global_step)

    trainer.append(
        L.Trainer(
            max_steps=saves * steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Points()],
        )
    )
    trainer[0].fit(module, torch.utils.data.DataLoader(Windows(), batch_size=8))
    for io in (sync, background, lossy):
        io.teardown()
    return rounds.figures


def of_dcp(root: Path, saves: int, steps: int) -> dict[str, Any]:
    """On each of two ranks: FSDP2 on gloo. The figures are those of rank 0, which waits for the other."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from shrinkpoint.train.dcp import Writer, load

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    running: list[Any] = []
    held_out, whole = HeldOut(gpt_loss), GPT(GPTConfig())
    lossy = fisher(held_out)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    def later(**where: Any) -> None:
        running.append(dcp.async_save(state(), **where))

    def wait() -> None:
        while running:
            running.pop().result()
        dist.barrier()

    methods: dict[str, Method] = {
        "stock": (lambda folder: dcp.save(state(), checkpoint_id=folder), dist.barrier),
        "shrinkpoint": (lambda folder: dcp.save(state(), storage_writer=Writer(folder)), dist.barrier),
        "stock async": (lambda folder: later(checkpoint_id=folder), wait),
        "shrinkpoint async": (lambda folder: later(storage_writer=Writer(folder)), wait),
        LOSSY: (
            lambda folder: dcp.save(state(), storage_writer=Writer(folder, scheme=lossy, model=model)),
            dist.barrier,
        ),
    }

    def rise(folder: Path) -> float:
        """All ranks measure the model in parts, and each a whole one with the weights that were read back."""
        before = held_out(model)
        whole.load_state_dict(load(folder)["model"])
        dist.barrier()
        return (held_out(whole) - before) / before

    rounds = Round(root, methods, rise)
    windows, rank = Windows(), dist.get_rank()
    for step in range(1, saves * steps + 1):
        batch = torch.stack([windows[(step * 2 + rank) * 4 + i]["input_ids"] for i in range(4)])
        model(batch[:, :-1], batch[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % steps == 0:
            dist.barrier()
            rounds.save(step)
    dist.barrier()
    if rank == 0:
        print(json.dumps(rounds.figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rounds.figures


def apart(part: str, args: argparse.Namespace, ranks: int = 1) -> Any:
    """What a part prints as JSON, run in processes of its own."""
    command = program("benchmarks.frameworks.run")
    if ranks > 1:
        command[2:2] = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--module"]
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        command += ["--part", part, "--folder", folder]
        command += ["--saves", str(args.saves), "--steps", str(args.steps)]
        variables = environment(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS=str(2 // ranks))
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=variables, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def rows(part: str, figures: dict[str, Any]) -> Iterator[str]:
    """A table's rows: each method beside the stock one that does the same."""
    for name, seconds in figures["seconds"].items():
        grown = figures["bytes"][name]
        stock = figures["bytes"]["stock"]
        first, later = stock[0] / grown[0], (stock[-1] - stock[0]) / (grown[-1] - grown[0])
        took = (seconds[0], median(seconds[1:]), max(seconds[1:]), median(figures["flush"][name][1:]))
        line = f"{part:13} {name:18}{grown[-1] / 1e6:9.1f} {first:7.2f}x {later:7.2f}x "
        line += " ".join(f"{x:9.3f}" for x in took)
        if name == LOSSY:
            rises = [100 * rise for rise in figures["rise"]]
            line += f"   rise: mean {mean(rises):+.2f}%, worst {max(rises):+.2f}%"
        yield line


def arguments(description: str | None, parts: Sequence[str], steps: int, out: Path) -> argparse.Namespace:
    """The command line of a script with a part for each framework; `part` and `folder` are those of `apart`.

    Args:
        steps, out: defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--steps", type=int, default=steps, help="of training before each save")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--part", choices=parts, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = arguments(__doc__, PARTS, 20, Path("results/frameworks.json"))
    if args.part:
        warnings.simplefilter("ignore")  # of the frameworks: this is no training that anybody keeps
        run = {"transformers": of_transformers, "accelerate": of_accelerate, "lightning": of_lightning, "dcp": of_dcp}
        figures = run[args.part](args.folder, args.saves, args.steps)
        if args.part != "dcp":
            print(json.dumps(figures))
        return
    found = {part: apart(part, args, ranks=2 if part == "dcp" else 1) for part in args.only}
    versions = {"torch": torch.__version__, "shrinkpoint": sp.__version__}
    about = {"at": time.strftime("%Y-%m-%d"), "machine": machine(), "saves": args.saves, "steps": args.steps}
    args.out.write_text(json.dumps({**about, "versions": versions, **found}, indent=1))
    print(f"{args.saves} saves, {args.steps} steps apart, torch {torch.__version__}\n")
    head = f"{'MB':>9} {'first':>8} {'later':>8} {'first s':>9} {'median s':>9} {'worst s':>9} {'flush s':>9}"
    print(f"{'':13} {'':18}{head}")
    for part, figures in found.items():
        print("\n".join(rows(part, figures)), "\n")


if __name__ == "__main__":
    main()
