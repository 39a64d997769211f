"""Parts of `device_all.py` that train a byte-level GPT with AdamW: what saves cost the loop, and what they lose.

The text is the source of the standard library, so nothing has to travel. On a GPU the model computes in bfloat16
(autocast) and has 125 M parameters; batch n depends on n alone.
"""

from __future__ import annotations

import filecmp
import sysconfig
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from device_job import Job
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint_lab.demo.workload import GPT, GPTConfig, stdlib_text

LARGE = GPTConfig(layers=13, width=896, heads=14, context=512, dropout=0.0)
TOY = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
PEAK, WARMUP = 3e-4, 20
SAVES = 6
MAX_SAVE_SECONDS = 15.0
"""After so long the loop no longer looks whether its save is durable: it may have failed."""
COMPARED = 3
"""States whose files are compared with those that the CPU writes: a keyframe, and two deltas."""


class Training:
    """A model, its optimizer, and batches by number.

    Attributes:
        step: how many steps were taken.
    """

    def __init__(self, job: Job, text: Tensor) -> None:
        torch.manual_seed(0)
        self._config, self._size = (TOY, 4) if job.is_quick else (LARGE, 32)
        self._job, cut = job, int(0.9 * len(text))
        self._text, self._held_out = text[:cut], text[cut:]
        self.model = GPT(self._config).to(job.device)
        groups: Any = self.model.param_groups(0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=job.is_cuda or None)
        self.step = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self._size * self._config.context

    @property
    def objects(self) -> dict[str, Any]:
        """What a manager saves and restores."""
        return {"model": self.model, "optimizer": self.optimizer}

    def advance(self, steps: int = 1) -> None:
        """Take steps, and wait for the device after each, as a loop that reads its loss does."""
        self.model.train()
        for _ in range(steps):
            starts = torch.randint(
                len(self._text) - self._config.context - 1,
                (self._size,),
                generator=torch.Generator().manual_seed(self.step),
            )
            for group in self.optimizer.param_groups:
                group["lr"] = PEAK * min(1.0, (self.step + 1) / WARMUP)
            self.optimizer.zero_grad()
            with self._autocast():
                loss = self.model(*self._batch(self._text, starts))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self._job.synchronize()

    def losses(self, model: nn.Module, half: int) -> Tensor:
        """Losses of batches of one half of the held-out text."""
        model.eval()
        length = len(self._held_out) // 2
        text = self._held_out[half * length : (half + 1) * length]
        count = (2 if self._job.is_quick else 16) * self._size
        starts = torch.linspace(0, length - self._config.context - 2, count).long()
        with torch.no_grad(), self._autocast():
            return torch.stack([model(*self._batch(text, part)) for part in starts.split(self._size)]).double().cpu()

    def unseen_loss(self, model: nn.Module) -> float:
        """Mean loss on the half that no search looks at."""
        return float(self.losses(model, 1).mean())

    def _batch(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        index = (starts[:, None] + torch.arange(self._config.context + 1)).to(text.device)
        windows = text[index].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._job.device.type, torch.bfloat16, enabled=self._job.is_cuda)


def read_text(job: Job) -> Tensor:
    """The source of the standard library's modules and packages, as bytes on the device."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name not in ("site-packages", "test")]
    folders = [root, *(path for path in folders if any(path.glob("*.py")))][: 1 if job.is_quick else None]
    return torch.frombuffer(bytearray(b"\0".join(map(stdlib_text, folders))), dtype=torch.uint8).to(job.device)


def throughput(job: Job) -> None:
    """Tokens a second without a save, and while one is written in the background."""
    warnings.simplefilter("ignore")
    training = Training(job, read_text(job))
    training.advance(5)
    count = 3 if job.is_quick else 40
    alone = count * training.tokens / job.seconds_of(lambda: training.advance(count))
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    job.add(save="none", parameters=parameters, **{"tokens/s": alone, "steps": count})
    for name in ("fisher", "lossless"):
        with job.attempt(save=name):
            _save_beside_steps(job, training, name, alone)


def _save_beside_steps(job: Job, training: Training, name: str, alone: float) -> None:
    scheme = sp.Fisher(relative_error=0.3) if name == "fisher" else "lossless"
    is_durable = threading.Event()
    with sp.CheckpointManager(
        job.folder / name, scheme=scheme, background=True, on_save=lambda report: is_durable.set()
    ) as manager:
        for kind in ("keyframe", "delta", "delta, warm"):
            is_durable.clear()
            training.advance()
            steps, began = 0, time.perf_counter()
            manager.save(training.step, **training.objects, rng=False)
            stall = time.perf_counter() - began
            while not is_durable.is_set() and time.perf_counter() - began < MAX_SAVE_SECONDS:
                training.advance()
                steps += 1
            seconds = time.perf_counter() - began
            manager.wait()
            rate = steps * training.tokens / seconds
            figures = {"tokens/s": rate, "of none": rate / alone, "steps": steps, "save, s": seconds, "stall, s": stall}
            job.add(save=f"{name}, {kind}", **figures)


def training(job: Job) -> None:
    """A run that saves with a budget of 1%: what each save loses, and where a run that restores one ends."""
    warnings.simplefilter("ignore")
    text = read_text(job)
    run, other = Training(job, text), Training(job, text)
    steps = _choose_steps(job, run)
    job.add(what="training", steps=steps * SAVES, **{"tokens a step": run.tokens, "text, MB": len(text) / 1e6})
    scheme = sp.Fisher(budget="1%", evaluate=lambda model: run.losses(model, 0))
    folder, states = job.folder / "run", []
    with sp.CheckpointManager(folder, scheme=scheme, background=True) as manager:
        for number in range(1, SAVES + 1):
            run.advance(steps)
            began = time.perf_counter()
            manager.save(run.step, **run.objects)
            stall = time.perf_counter() - began
            report = manager.wait()
            seconds = time.perf_counter() - began
            assert report is not None
            names = {"what": "keyframe" if report.keyframe else "delta", "step": run.step}
            if number <= COMPARED:
                states.append(_to_host(run.objects))
            figures = {"ratio": report.ratio, "stall, s": stall, "durable, s": seconds}
            figures["rise that the save reports, %"] = 100 * (report.loss_increase or 0.0)
            with job.attempt(**names):
                before, began = run.unseen_loss(run.model), time.perf_counter()
                other.model.load_state_dict(sp.load(folder, step=run.step, only="model.*", device=job.device)["model"])
                figures |= {"load, s": time.perf_counter() - began, "loss": before}
                figures["rise on unseen text, %"] = 100 * (run.unseen_loss(other.model) / before - 1)
            job.add(**names, **figures)
    end, last, middle = run.unseen_loss(run.model), run.step, COMPARED * steps
    job.add(what="uninterrupted run", step=last, loss=end)
    with job.attempt(what="restored in the middle"):
        with sp.CheckpointManager(folder, scheme=sp.Fisher(relative_error=0.3)) as manager:
            manager.restore(middle, **other.objects)
        other.step = middle
        other.advance(last - middle)
        loss = other.unseen_loss(other.model)
        job.add(
            what="restored in the middle",
            step=other.step,
            loss=loss,
            **{"above uninterrupted, %": 100 * (loss / end - 1)},
        )
    _compare_files(job, states)
    with job.attempt(what="restored exactly"):
        if job.fits(1.2 * (last - middle) * _seconds_of_step(run), what="restored exactly"):
            for name, value in other.objects.items():
                value.load_state_dict(states[-1][name])
            other.step = middle
            other.advance(last - middle)
            loss = other.unseen_loss(other.model)
            figures = {"above uninterrupted, %": 100 * (loss / end - 1)}
            job.add(what="restored exactly (noise)", step=other.step, loss=loss, **figures)


def _seconds_of_step(run: Training) -> float:
    run.advance(2)
    began = time.perf_counter()
    run.advance(5)
    return (time.perf_counter() - began) / 5


def _choose_steps(job: Job, run: Training) -> int:
    """Steps between two saves, so that a run and its second half take a third of the time."""
    if job.is_quick:
        return 3
    return max(10, min(400, int(0.33 * job.seconds_left / 1.5 / SAVES / _seconds_of_step(run))))


def _to_host(objects: Any) -> dict[str, Any]:
    """Copies of state dicts in host memory."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            return {key: copied(part) for key, part in value.items()}
        return [copied(part) for part in value] if isinstance(value, list) else value

    return {name: copied(value.state_dict()) for name, value in objects.items()}


def _compare_files(job: Job, states: list[dict[str, Any]]) -> None:
    """Rows of the files that the same states give on the device and in host memory, each a chain of its own."""
    for name, settings in (("fisher", {"relative_error": 0.3}), ("lossless", None)):
        schemes = [sp.Fisher(**settings) if settings else "lossless" for _ in range(2)]
        files: list[Path | None] = [None, None]
        for number, state in enumerate(states):
            names = {"what": f"file {number} of {name}"}
            with job.attempt(**names):
                for side, device in enumerate((job.device, torch.device("cpu"))):
                    file = job.folder / f"{name}-{device.type}-{side}" / f"{number}.safetensors"
                    file.parent.mkdir(exist_ok=True)
                    sp.save(_on(device, state), file, scheme=schemes[side], base=files[side])
                    files[side] = file
                is_equal = filecmp.cmp(*files, shallow=False)
                figures: dict[str, Any] = {"bytes": file.stat().st_size, "equal to the CPU's": is_equal}
                if not is_equal:
                    figures |= _differences(*(sp.load(file) for file in files))
                job.add(**names, **figures)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, part) for key, part in value.items()}
    return [_on(device, part) for part in value] if isinstance(value, list) else value


def _differences(one: Any, other: Any) -> dict[str, Any]:
    """How many tensors differ between two states, and the first three of them."""
    named = zip(_named_tensors(one), _named_tensors(other), strict=True)
    differing = [name for (name, x), (_, y) in named if not torch.equal(x, y)]
    return {"tensors that differ": len(differing), "such as": ", ".join(differing[:3])}


def _named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [pair for key, part in items for pair in _named_tensors(part, f"{name}/{key}")]
