"""What local steps are measured on: a byte-level GPT on a text, and a small ResNet on images."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from workload_image import CROP, ResNet, augmented, cifar, normal
from workload_text import drawn, loss_of, text, windows
from workloads import Batch, evaluating

from shrinkpoint_lab.demo.workload import GPT, GPTConfig


class Task(ABC):
    """A model, the optimizer of each rank, batches of a rank, and quality on data that no rank trains on.

    Attributes:
        steps: of a run.
        warmup: steps until the learning rate is at its peak; then it falls by a cosine.
        floor: the last learning rate over the peak.
        clip: the largest norm of a rank's gradient, or None.
    """

    name: ClassVar[str]
    steps: ClassVar[int]
    peak: ClassVar[float]
    warmup: ClassVar[int]
    floor: ClassVar[float]
    clip: ClassVar[float | None] = None
    batch: ClassVar[int]

    def prepare(self) -> None:  # noqa: B027
        """Make what runs begin with, once, in a process of its own; nothing by default."""

    @abstractmethod
    def build(self, peak: float) -> tuple[nn.Module, Optimizer]: ...

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Batch: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    @abstractmethod
    def test(self, model: nn.Module) -> dict[str, float]:
        """The loss on held-out data, and what else says how good the model is."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a reader of the results must know."""


class Text(Task):
    """AdamW (betas .9/.95, weight decay .1), clip 1, a cosine to a tenth of the peak; windows of a text."""

    name, steps, peak, warmup, floor, clip, batch = "text", 900, 3e-3, 30, 0.1, 1.0, 4
    shape = GPTConfig(layers=2, width=64, heads=4, context=64, dropout=0.0)

    def __init__(self, data: Path) -> None:
        self.source, whole = text(data)
        cut = int(0.9 * len(whole))
        self._train, self._held_out = whole[:cut], windows(whole[cut:], self.shape.context, 512)

    def build(self, peak: float) -> tuple[nn.Module, Optimizer]:
        model = GPT(self.shape)
        return model, torch.optim.AdamW(model.param_groups(0.1), lr=peak, betas=(0.9, 0.95), fused=True)

    def draw(self, generator: torch.Generator) -> Batch:
        return drawn(self._train, self.batch, self.shape.context, generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(*batch)
        return out

    def test(self, model: nn.Module) -> dict[str, float]:
        return {"loss": loss_of(model, self._held_out)}

    def facts(self) -> dict[str, Any]:
        return {"text": self.source, "context": self.shape.context, "held_out": len(self._held_out[0])}


class Continued(Text):
    """The same from weights that one process has trained for 2,000 steps at the peak, 8 windows each: after a plateau.

    All methods and seeds begin with these weights, as DiLoCo's paper does (arXiv 2311.08105).
    """

    name = "continued"
    first_steps, first_batch = 2000, 8

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self._start = Path(tempfile.gettempdir(), f"shrinkpoint-local-steps-{self.source}-{self.first_steps}.pt")

    def prepare(self) -> None:
        """Train the weights that all runs begin with, unless a file has them."""
        if self._start.exists():
            return
        torch.manual_seed(1000)
        model, optimizer = super().build(self.peak)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))
        generator = torch.Generator().manual_seed(1000)
        for _ in range(self.first_steps):
            optimizer.zero_grad()
            model(*drawn(self._train, self.first_batch, self.shape.context, generator)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        partial = self._start.with_suffix(".partial")
        torch.save({"model": model.state_dict(), **self.test(model)}, partial)
        partial.rename(self._start)

    def build(self, peak: float) -> tuple[nn.Module, Optimizer]:
        model, optimizer = super().build(peak)
        model.load_state_dict(torch.load(self._start, weights_only=True)["model"])
        return model, optimizer

    def facts(self) -> dict[str, Any]:
        first = {"first_steps": self.first_steps, "first_batch": self.first_batch}
        return super().facts() | first | {"first_loss": torch.load(self._start, weights_only=True)["loss"]}


class Image(Task):
    """SGD, momentum .9, weight decay 5e-4, a cosine to zero; crops of CIFAR-10 and mirrors, a ResNet-8."""

    name, steps, peak, warmup, floor, batch = "image", 900, 0.05, 30, 0.0, 32

    def __init__(self, data: Path) -> None:
        self._images, self._classes = cifar(data, "train")
        images, classes = cifar(data, "test")
        edge = (32 - CROP) // 2
        self._held_out = images[:, :, edge:-edge, edge:-edge], classes

    def build(self, peak: float) -> tuple[nn.Module, Optimizer]:
        model = ResNet(1, stem=2).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4)

    def draw(self, generator: torch.Generator) -> Batch:
        ids = torch.randint(len(self._classes), (self.batch,), generator=generator)
        return augmented(self._images[ids], generator, CROP), self._classes[ids]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def test(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            parts = zip(*(side.split(250) for side in self._held_out), strict=True)
            figures = [
                (F.cross_entropy(out := model(normal(x)), y), (out.argmax(1) == y).float().mean()) for x, y in parts
            ]
        loss, accuracy = torch.tensor(figures).mean(0).tolist()
        return {"loss": loss, "accuracy": 100 * accuracy}

    def facts(self) -> dict[str, Any]:
        return {"images": len(self._classes), "held_out": len(self._held_out[1])}


TASKS: dict[str, type[Task]] = {task.name: task for task in (Text, Continued, Image)}


def average_buffers(model: nn.Module) -> None:
    """Replace the running averages of every rank by their mean over the ranks; nothing where there are none."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())
