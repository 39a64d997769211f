"""The sentence workload: a small word-level GPT, pre-trained here as a language model, fine-tuned to SST-2."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies.workloads import Batch, Stream, cosine, evaluating, shuffled
from shrinkpoint_lab.demo.workload import Block, GPTConfig

WORDS = 8192
PAD, UNKNOWN, END = 0, 1, 2
LENGTH = 40
SHAPE = GPTConfig(layers=3, width=160, heads=5, context=LENGTH, dropout=0.1)


class Reader(nn.Module):
    """Words to vectors, each of which knows the words before it; (batch, length) to (batch, length, width)."""

    def __init__(self, shape: GPTConfig = SHAPE) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, shape.width), nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.token(words) + self.position(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def language_loss(self, words: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the next word; the head is the embedding."""
        logits = F.linear(self(words[:, :-1]), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), ignore_index=PAD)


class Classifier(nn.Module):
    """The reader's mean over the words of a sentence, and one linear layer."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader, self.head = reader, nn.Linear(SHAPE.width, 2)

    def forward(self, words: Tensor) -> Tensor:
        there = (words != PAD).unsqueeze(2)
        out: Tensor = self.head((self.reader(words) * there).sum(1) / there.sum(1))
        return out


@dataclass(frozen=True)
class Corpus:
    """Texts as word numbers.

    Attributes:
        prose: windows (n, LENGTH + 1) for the language model; `held` of them are kept from training.
        sentences, labels: SST-2's training part, padded; dev_* its development part.
        known: the number of each word that has one of its own.
    """

    prose: Tensor
    held: Tensor
    sentences: Tensor
    labels: Tensor
    dev_sentences: Tensor
    dev_labels: Tensor
    known: dict[str, int]


@lru_cache
def corpus(data: Path) -> Corpus:
    """SST-2 and WikiText-2's test part to learn from; its validation part to be measured on."""
    wiki, held = (_words(data / "wikitext2" / f"{part}.txt.gz") for part in ("test", "valid"))
    (train, labels), (dev, dev_labels) = (_rows(data / "sst2" / f"{part}.tsv.gz") for part in ("train", "dev"))
    counts = Counter(wiki + [word for sentence in train for word in sentence])
    known = {word: 3 + place for place, (word, _) in enumerate(counts.most_common(WORDS - 3))}
    stream = wiki + [word for sentence in train for word in (*sentence, "<end>")]
    return Corpus(
        _windows(stream, known),
        _windows(held, known),
        _padded(train, known),
        torch.tensor(labels),
        _padded(dev, known),
        torch.tensor(dev_labels),
        known,
    )


def text_windows(path: Path, known: dict[str, int]) -> Tensor:
    """A compressed text as windows (n, LENGTH + 1) of word numbers."""
    return _windows(_words(path), known)


def _words(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().lower().replace("\n", " <end> ").split()


def _rows(path: Path) -> tuple[list[list[str]], list[int]]:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [text.split() or ["<end>"] for text, _ in rows], [int(label) for _, label in rows]


def _number(word: str, known: dict[str, int]) -> int:
    return END if word == "<end>" else known.get(word, UNKNOWN)


def _windows(words: Sequence[str], known: dict[str, int]) -> Tensor:
    numbers = torch.tensor([_number(word, known) for word in words])
    count = len(numbers) // (LENGTH + 1)
    return numbers[: count * (LENGTH + 1)].view(count, LENGTH + 1)


def _padded(sentences: Sequence[Sequence[str]], known: dict[str, int]) -> Tensor:
    rows = [torch.tensor([_number(word, known) for word in sentence[:LENGTH]]) for sentence in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def pretrain(data: Path, steps: int, size: int = 24) -> Reader:
    """A language model after so many steps of AdamW; peak 2e-3, a cosine to a tenth of it."""
    torch.manual_seed(0)
    texts, reader = corpus(data), Reader()
    optimizer = torch.optim.AdamW(reader.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.1))
    for step in range(steps):
        loss = reader.language_loss(texts.prose[shuffled(len(texts.prose), size, step, 0)])
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"          pre-training: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    return reader.eval()


def language_loss(reader: Reader, data: Path, windows: int = 96) -> float:
    """On evenly spaced held-out windows."""
    held = corpus(data).held
    with evaluating(reader):
        return reader.language_loss(held[torch.linspace(0, len(held) - 1, windows).long()]).item()


def stream(data: Path, seed: int, size: int) -> Stream:
    """Batches of SST-2 sentences, cut to the longest of the batch."""
    texts = corpus(data)

    def draw(_: torch.Generator, number: int) -> Batch:
        chosen = shuffled(len(texts.labels), size, number, seed)
        words = texts.sentences[chosen]
        return words[:, : int((words != PAD).sum(1).max())], texts.labels[chosen]

    return Stream(draw, seed)


def accuracy(model: nn.Module, data: Path, count: int | None = None) -> float:
    """On the development part (872 sentences), in per cent."""
    texts = corpus(data)
    words, labels = texts.dev_sentences[:count], texts.dev_labels[:count]
    with evaluating(model):
        return 100 * (model(words).argmax(1) == labels).float().mean().item()
