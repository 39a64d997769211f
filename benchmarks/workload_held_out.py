"""Trainings that measure how far predicted rises can be trusted: six kinds of model, optimizer and data.

Each takes about a minute on one core. `evaluate` and `test` measure the loss, that of each example included, on
held-out data that have nothing in common.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import workload_text
from torch import Tensor, nn
from torch.nn import functional as F
from workload_image import ResNet, augmented, cifar, fashion, normal
from workloads import Batch, Course, Stream, Workload, cosine, evaluating, shuffled

from shrinkpoint_lab.demo.workload import GPT, GPTConfig

TUNED = ("vit adamw", "lstm adam", "vae rmsprop", "vit fine-tuned")
"""On these the rules of the scheme were chosen."""
HELD_OUT = ("gpt words .999", "resnet loss adamw")
"""On these nothing was chosen."""
NAMES = (*TUNED, *HELD_OUT)

Losses = Callable[[nn.Module, Batch], Tensor]
"""The loss of each example of a batch."""


class ExampleLosses:
    """The mean loss on fixed examples; `reading` has that of each, which schemes ask for."""

    def __init__(self, losses: Losses, batch: Batch, size: int = 250) -> None:
        self._losses, self._batch, self._size = losses, batch, size

    def reading(self, model: nn.Module) -> Tensor:
        with evaluating(model):
            batches = zip(*(side.split(self._size) for side in self._batch), strict=True)
            return torch.cat([self._losses(model, batch) for batch in batches])

    def __call__(self, model: nn.Module) -> float:
        return float(self.reading(model).double().mean())


class ViT(nn.Module):
    """A pre-norm vision transformer of 32 x 32 images in patches of 8 (Dosovitskiy et al. 2021), with dropout."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class WordLSTM(nn.Module):
    """The classic word-level language model: embedding, one LSTM, a head of its own, dropout between them."""

    def __init__(self, words: int, width: int = 96, hidden: int = 192) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, width), nn.Dropout(0.2)
        self.lstm, self.head = nn.LSTM(width, hidden, batch_first=True), nn.Linear(hidden, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(words)))
        out: Tensor = self.head(self.dropout(hidden))
        return out


class ByteGPT(GPT):
    """The demo's GPT, but what it returns are scores, so that every window has a loss."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class ConvVAE(nn.Module):
    """A variational autoencoder of 28 x 28 images (Kingma and Welling 2014) with strided convolutions."""

    def __init__(self, latents: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 2 * latents),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latents, 128), nn.ReLU(), nn.Linear(128, 1568), nn.ReLU(), nn.Unflatten(1, (32, 7, 7)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """The negative evidence bound of each image, in nats."""
        mean, log_variance = self.encoder(images).chunk(2, 1)
        pixels = self.decoder(mean + noise * (0.5 * log_variance).exp())
        error = F.binary_cross_entropy_with_logits(pixels, images, reduction="none").sum((1, 2, 3))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        out: Tensor = error + divergence
        return out


def named(name: str, data: Path, *, quick: bool) -> Workload:
    """A workload of `NAMES`."""
    makers = {
        "vit adamw": vit,
        "lstm adam": lstm,
        "vae rmsprop": vae,
        "vit fine-tuned": vit_fine_tuned,
        "gpt words .999": gpt_words,
        "resnet loss adamw": resnet_loss,
    }
    return makers[name](data, quick=quick)


def _workload(
    name: str, steps: int, build: Callable[[int], Course], losses: Losses, held: tuple[Batch, Batch], quick: bool,
    clip: float | None = None,
) -> Workload:  # fmt: skip
    evaluate, test = (ExampleLosses(losses, batch) for batch in held)
    return Workload(
        name,
        "loss",
        False,
        24 if quick else steps,
        2 if quick else steps // 16,
        build,
        lambda model, batch: losses(model, batch).mean(),
        evaluate,
        test,
        clip=clip,
    )


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Of each example; of texts, the mean over its tokens."""
    scores = model(batch[0])
    losses = F.cross_entropy(scores.flatten(0, -2), batch[1].flatten(), reduction="none")
    return losses.unflatten(0, batch[1].shape).flatten(1).mean(1) if batch[1].dim() > 1 else losses


def _split(images: Tensor, classes: Tensor, *, quick: bool) -> tuple[Batch, Batch]:
    """`evaluate`'s 500 images and `test`'s 2000."""
    count = 32 if quick else 500
    return (images[:count], classes[:count]), (images[count : 5 * count], classes[count : 5 * count])


def _classifier(
    name: str, steps: int, model: Callable[[], nn.Module], train: Batch, test: Batch, peak: float, quick: bool,
    crop: int = 32, size: int = 64,
) -> Workload:  # fmt: skip
    """AdamW with betas of .9 and .999 and a weight decay of .05, on random crops; clip 1."""
    edge = (32 - crop) // 2
    held = _split(normal(test[0][:, :, edge : 32 - edge, edge : 32 - edge]), test[1], quick=quick)

    def batch(generator: torch.Generator, number: int, seed: int) -> Batch:
        chosen = shuffled(len(train[1]), size, number, seed)
        return augmented(train[0][chosen], generator, crop), train[1][chosen]

    def build(seed: int) -> Course:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=peak, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.05))
        return Course(net, optimizer, scheduler, Stream(lambda g, n: batch(g, n, seed), seed))

    return _workload(name, steps, build, _cross_entropy, held, quick, clip=1.0)


def vit(data: Path, *, quick: bool = False) -> Workload:
    """A vision transformer on CIFAR-10."""
    part = "test" if quick else "train"
    return _classifier("vit adamw", 480, ViT, cifar(data, part), cifar(data, "test"), 1e-3, quick)


def vit_fine_tuned(data: Path, *, quick: bool = False) -> Workload:
    """The same after 240 steps on CIFAR-10, on clothes, with a new head and a peak of 3e-4."""

    def model() -> nn.Module:
        net = ViT()
        net.load_state_dict(_pretrained(data, quick))
        net.head.reset_parameters()
        return net

    train, test = fashion(data)
    return _classifier("vit fine-tuned", 320, model, train, test, 3e-4, quick)


@lru_cache
def _pretrained(data: Path, quick: bool) -> dict[str, Tensor]:
    workload = vit(data, quick=quick)
    course = workload.build(17)
    for _ in range(2 if quick else 240):
        workload.advance(course)
    return course.model.state_dict()


def resnet_loss(data: Path, *, quick: bool = False) -> Workload:
    """A ResNet-20 on CIFAR-10."""
    part = "test" if quick else "train"
    images = cifar(data, part), cifar(data, "test")
    return _classifier("resnet loss adamw", 400, lambda: ResNet(3), *images, 4e-3, quick, crop=24, size=32)


def vae(data: Path, *, quick: bool = False) -> Workload:
    """A convolutional VAE of clothes; RMSprop (alpha .99) at a peak of 1e-3, noise of the held-out images fixed."""
    grey = [normal_images[0][:, :1, 2:30, 2:30].float() / 255 for normal_images in fashion(data)]
    train, test = grey
    noise = torch.randn(len(test), 16, generator=torch.Generator().manual_seed(3))
    steps = 480

    def batch(generator: torch.Generator, number: int, seed: int) -> Batch:
        return train[shuffled(len(train), 64, number, seed)], torch.randn(64, 16, generator=generator)

    def build(seed: int) -> Course:
        model = ConvVAE()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.05))
        return Course(model, optimizer, scheduler, Stream(lambda g, n: batch(g, n, seed), seed))

    return _workload(
        "vae rmsprop", steps, build, lambda model, batch: model(*batch), _split(test, noise, quick=quick), quick
    )


def lstm(data: Path, *, quick: bool = False) -> Workload:
    """The 3000 most frequent words of WikiText-2; Adam at a peak of 4e-3, 16 windows of 35 words, clip 1."""
    train, held = _words(data)
    steps, context = 480, 35
    windows = workload_text.windows(held, context, 32 if quick else 500)
    cut = 16 if quick else 100

    def build(seed: int) -> Course:
        model = WordLSTM(int(train.max()) + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.05))
        stream = Stream(lambda g, _: workload_text.drawn(train, 16, context, g), seed)
        return Course(model, optimizer, scheduler, stream)

    held_out = _alternating(windows, cut)
    return _workload("lstm adam", steps, build, _cross_entropy, held_out, quick, clip=1.0)


def _alternating(windows: Batch, count: int) -> tuple[Batch, Batch]:
    """`count` evenly spaced windows, and all others."""
    chosen = torch.zeros(len(windows[0]), dtype=torch.bool)
    chosen[torch.linspace(0, len(chosen) - 1, count).long()] = True
    seen, unseen = ((windows[0][which], windows[1][which]) for which in (chosen, ~chosen))
    return seen, unseen


@lru_cache
def _words(data: Path) -> tuple[Tensor, Tensor]:
    """Numbers of the words of the test and of the validation text; 0: rare."""
    texts = [
        gzip.decompress((data / "wikitext2" / f"{part}.txt.gz").read_bytes()).decode().replace("\n", " <eos> ").split()
        for part in ("test", "valid")
    ]
    frequent = {word: number for number, (word, _) in enumerate(Counter(texts[0]).most_common(2999), 1)}
    train, held = (torch.from_numpy(np.array([frequent.get(word, 0) for word in text])) for text in texts)
    return train, held


def gpt_words(data: Path, *, quick: bool = False) -> Workload:
    """A GPT on the bytes of WikiText-2; AdamW with betas of .9 and .999, weight decay .1, a peak of 2e-3."""
    train, held = (
        torch.frombuffer(
            bytearray(gzip.decompress((data / "wikitext2" / f"{part}.txt.gz").read_bytes())), dtype=torch.uint8
        )
        for part in ("test", "valid")
    )
    steps, shape = 480, GPTConfig(layers=3, width=128, heads=4, context=64, dropout=0.0)
    windows = workload_text.windows(held, shape.context, 32 if quick else 1000)

    def build(seed: int) -> Course:
        model = ByteGPT(shape)
        optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=2e-3, betas=(0.9, 0.999))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.05))
        stream = Stream(lambda g, _: workload_text.drawn(train, 16, shape.context, g), seed)
        return Course(model, optimizer, scheduler, stream)

    held_out = _alternating(windows, 16 if quick else 200)
    return _workload("gpt words .999", steps, build, _cross_entropy, held_out, quick, clip=1.0)
