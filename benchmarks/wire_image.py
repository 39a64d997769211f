"""The image task: a ResNet-18 of an eighth of the width and a stem of stride 2 on CIFAR-10, cut after three groups."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wire_task import Drawn, Task, epochs_of
from workload_image import accuracy, augmented, cifar, normal
from workloads import Course, Stream, cosine

WIDTH = 8
PAD = 2
IMAGES, EPOCHS, BATCH, PEAK = 10_000, 10, 64, 0.05


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


class ResNet18(nn.Module):
    """Four groups of two blocks; (batch, 3, any, any) to (batch, 10)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.linear = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.linear(self.layer4(self.layer3(self.layer2(x))).mean((2, 3)))
        return out


def classify(model: nn.Module, drawn: Drawn) -> Tensor:
    return F.cross_entropy(model(drawn[0]), drawn[1])


def task(data: Path, *, still: bool = False, quick: bool = False) -> Task:
    """From scratch: SGD, momentum .9, weight decay 5e-4, a cosine from .05 to zero; crops and mirrors.

    Args:
        still: each image as it is, without crop and mirror, so that an activation changes only by the training.
    """
    count, epochs, size = (64, 2, 8) if quick else (IMAGES, EPOCHS, BATCH)
    images, classes = (side[:count] for side in cifar(data, "test" if quick else "train"))
    held_images, labels = cifar(data, "test")
    held_out = (held_images[:64], labels[:64]) if quick else (held_images, labels)
    steps, chosen = epochs * (count // size), epochs_of(count, size)

    def build(seed: int) -> Course:
        net = ResNet18().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(net.parameters(), lr=PEAK, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, steps, 0.0))

        def draw(generator: torch.Generator, number: int) -> Drawn:
            ids = chosen(seed, number)
            picked = images[ids]
            pixels = normal(picked) if still else augmented(F.pad(picked, (PAD,) * 4), generator, 32)
            return pixels, classes[ids], ids

        return Course(net, optimizer, scheduler, Stream(draw, seed))

    facts = {"parameters": sum(p.numel() for p in ResNet18().parameters()), "batch": size, "samples": count}
    return Task(
        "still" if still else "image",
        "top-1 %",
        True,
        ("layer1", "layer2", "layer3"),
        steps,
        epochs,
        build,
        classify,
        lambda net: accuracy(net, held_out),
        facts=facts,
    )
