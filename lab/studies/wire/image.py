"""The image tasks: a ResNet-18 on CIFAR-10, cut after three groups, of an eighth of its width or of half of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies.wire.task import Drawn, Task, epochs_of
from lab.studies.workloads import Course, Stream, cosine
from lab.studies.workloads.image import accuracy, augmented, cifar, normal

PAD = 2


@dataclass(frozen=True)
class ImageTask:
    """What may differ between trainings on images.

    Attributes:
        width: channels of the first group of blocks; ResNet-18 has 64.
        stem: stride of the first convolution; ResNet-18 for these images has 1.
        images: of the training set, from its start.
        epochs: over these images.
        batch: images of a step.
        peak: of the learning rate.
        still: each image as it is, without crop and mirror, so that an activation changes only by the training.
        half: True if convolutions are computed in bfloat16, which takes a processor with AMX a third of the time. What
            crosses is float32 all the same.
    """

    width: int = 8
    stem: int = 2
    images: int = 10_000
    epochs: int = 10
    batch: int = 64
    peak: float = 0.05
    still: bool = False
    half: bool = False


TASKS = {
    "image": ImageTask(),
    "still": ImageTask(still=True),
    "wide": ImageTask(width=32, stem=1, images=20_000, epochs=20, batch=128, peak=0.1, half=True),
}


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution where the shape changes (He et al. 2016, option B)."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)
        same = stride == 1 and narrow == wide
        across = (nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.shortcut = nn.Sequential(*(() if same else across))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class Group(nn.Sequential):
    """Two blocks; what leaves them, and may cross to the next stage, is float32."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__(Block(narrow, wide, stride), Block(wide, wide, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.float()


class ResNet18(nn.Module):
    """Four groups of two blocks; (batch, 3, any, any) to (batch, 10), float32."""

    def __init__(self, width: int, stem: int, half: bool) -> None:
        super().__init__()
        self.half_precision = half
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, stem, 1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = Group(width, width, 1)
        self.layer2 = Group(width, 2 * width, 2)
        self.layer3 = Group(2 * width, 4 * width, 2)
        self.layer4 = Group(4 * width, 8 * width, 2)
        self.linear = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half_precision):
            x = self.layer1(F.relu(self.bn1(self.conv1(x))))
            out: Tensor = self.linear(self.layer4(self.layer3(self.layer2(x))).mean((2, 3)))
        return out.float()


def classify(model: nn.Module, drawn: Drawn) -> Tensor:
    return F.cross_entropy(model(drawn[0]), drawn[1])


def task(name: str, data: Path, *, quick: bool = False) -> Task:
    """From scratch: SGD, momentum 0.9, weight decay 5e-4, a cosine from the peak to zero; crops and mirrors.

    Args:
        name: a key of `TASKS`.
    """
    kind = TASKS[name]
    count, epochs, size = (64, 2, 8) if quick else (kind.images, kind.epochs, kind.batch)
    images, classes = (side[:count] for side in cifar(data, "test" if quick else "train"))
    held_images, labels = cifar(data, "test")
    held_out = (held_images[:64], labels[:64]) if quick else (held_images, labels)
    steps, chosen = epochs * (count // size), epochs_of(count, size)

    def build(seed: int) -> Course:
        net = ResNet18(kind.width, kind.stem, kind.half).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(net.parameters(), lr=kind.peak, momentum=0.9, weight_decay=5e-4, foreach=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, steps, 0.0))

        def draw(generator: torch.Generator, number: int) -> Drawn:
            ids = chosen(seed, number)
            picked = images[ids]
            pixels = normal(picked) if kind.still else augmented(F.pad(picked, (PAD,) * 4), generator, 32)
            return pixels, classes[ids], ids

        return Course(net, optimizer, scheduler, Stream(draw, seed))

    parameters = sum(p.numel() for p in ResNet18(kind.width, kind.stem, kind.half).parameters())
    return Task(
        name,
        "top-1 %",
        True,
        ("layer1", "layer2", "layer3"),
        steps,
        epochs,
        build,
        classify,
        lambda net: accuracy(net, held_out),
        facts={"parameters": parameters, "batch": size, "samples": count},
    )
