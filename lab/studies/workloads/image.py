"""The image workloads: ResNets for small images (He et al. 2016, section 4.2; option A shortcuts), and their data.

Module names are those of the published CIFAR-10 networks, so their weights load strictly.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies.workloads import Batch, Course, Stream, Workload, cosine, evaluating, shuffled

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What the published networks were trained with."""
CROP = 24


class Block(nn.Module):
    """Two convolutions beside a shortcut that drops pixels and pads channels."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)
        self.stride, self.pad = stride, (wide - narrow) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.pad:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(out + x)


class ResNet(nn.Module):
    """6 n + 2 layers in three groups of n blocks; (batch, 3, any, any) to (batch, classes).

    Args:
        stem: stride of the first convolution.
    """

    def __init__(self, blocks: int, *, width: int = 16, stem: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, stem, 1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = self._group(blocks, width, width, 1)
        self.layer2 = self._group(blocks, width, 2 * width, 2)
        self.layer3 = self._group(blocks, 2 * width, 4 * width, 2)
        self.linear = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def _group(blocks: int, narrow: int, wide: int, stride: int) -> nn.Sequential:
        first = Block(narrow, wide, stride)
        return nn.Sequential(first, *(Block(wide, wide, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return out


def pretrained(data: Path, depth: int) -> ResNet:
    """The published CIFAR-10 network of this depth (20, 32, 44 or 56)."""
    (path,) = (data / "resnet_cifar10").glob(f"resnet{depth}-*.th")
    saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet((depth - 2) // 6)
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in saved.items()})
    return model.to(memory_format=torch.channels_last)


@lru_cache
def cifar(data: Path, part: str) -> Batch:
    """Images uint8 (n, 3, 32, 32) and classes int64; `part` is "train" or "test"."""
    found = np.load(data / "cifar10" / f"cifar10_{part}.npz")
    pixels = found["d"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    pixels[:, 0] += pixels[:, 1]
    pixels[:, 2] += pixels[:, 1]
    return torch.from_numpy(pixels), torch.from_numpy(found["y"]).long()


@lru_cache
def fashion(data: Path) -> tuple[Batch, Batch]:
    """Training and test images uint8 (n, 3, 32, 32), grey three times and padded with black, and their classes."""
    found = np.load(data / "fashion_mnist" / "fashion_mnist.npz")
    out = []
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        grey = F.pad(torch.from_numpy(found[x]).reshape(-1, 1, 28, 28), (2, 2, 2, 2))
        out.append((grey.expand(-1, 3, -1, -1), torch.from_numpy(found[y]).long()))
    return out[0], out[1]


def normal(images: Tensor) -> Tensor:
    """uint8 to float32 of mean 0 and deviation 1, channels last."""
    mean, deviation = (torch.tensor(side).view(1, 3, 1, 1) for side in (MEAN, DEVIATION))
    return ((images.float() / 255 - mean) / deviation).contiguous(memory_format=torch.channels_last)


def accuracy(model: nn.Module, batch: Batch, size: int = 250) -> float:
    """Share of images whose class comes first, in per cent."""
    right = 0
    with evaluating(model):
        for images, classes in zip(*(side.split(size) for side in batch), strict=True):
            right += int((model(normal(images)).argmax(1) == classes).sum())
    return 100 * right / len(batch[1])


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def augmented(images: Tensor, generator: torch.Generator, crop: int) -> Tensor:
    """A random crop and a random mirroring of each image; normalised."""
    count, _, height, _ = images.shape
    down, across = (torch.randint(height - crop + 1, (count, 1), generator=generator) for _ in range(2))
    mirror = torch.rand(count, 1, generator=generator) < 0.5
    line = torch.arange(crop)
    rows, columns = down + line, across + torch.where(mirror, line.flip(0), line)
    places = torch.arange(count)[:, None, None]
    out = images.permute(0, 2, 3, 1)[places, rows[:, :, None], columns[:, None, :]]
    return normal(out.permute(0, 3, 1, 2))


def resnet(data: Path, *, wide: bool = False, quick: bool = False) -> Workload:
    """ResNet-20 on random 24 x 24 crops; SGD, momentum 0.9, weight decay 5e-4, peak 0.1, a cosine to zero.

    Args:
        wide: twice the width behind a stem of stride 2: four times the parameters for the same work an image.
    """
    steps, interval, size, peak = (16, 4, 16, 0.05) if quick else (1248, 39, 64, 0.1)
    images, classes = cifar(data, "test" if quick else "train")
    held, labels = cifar(data, "test")
    edge = 4 if wide else 0  # a stem of stride 2 sees the whole image
    middle = held[:, :, 4 - edge : 28 + edge, 4 - edge : 28 + edge]
    cut = 64 if quick else 1000
    seen, unseen = (middle[:cut], labels[:cut]), (middle[cut : 4 * cut], labels[cut : 4 * cut])

    def model() -> ResNet:
        made = ResNet(3, width=32, stem=2) if wide else ResNet(3)
        return made.to(memory_format=torch.channels_last)

    def build(seed: int) -> Course:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, steps, 0.0))

        def draw(generator: torch.Generator, number: int) -> Batch:
            chosen = shuffled(len(classes), size, number, seed)
            picked = F.pad(images[chosen], (4, 4, 4, 4)) if wide else images[chosen]
            return augmented(picked, generator, 32 if wide else CROP), classes[chosen]

        return Course(net, optimizer, scheduler, Stream(draw, seed))

    facts = {"parameters": sum(p.numel() for p in model().parameters()), "batch": size, "images": len(classes)}
    return Workload(
        "wide" if wide else "resnet",
        "top-1 %",
        True,
        steps,
        interval,
        build,
        classify,
        lambda net: accuracy(net, seen),
        lambda net: accuracy(net, unseen),
        facts=facts,
    )
