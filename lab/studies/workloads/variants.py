"""Workloads as others, but for one thing: the optimizer, since moments differ by how they are averaged; size; start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies.workloads import Batch, Course, Workload, cosine, evaluating
from lab.studies.workloads import image as workload_image
from lab.studies.workloads import sentence as workload_sentence
from lab.studies.workloads import text as workload_text

VARIANTS = ("gpt .999", "gpt 10M", "resnet adamw", "reader")
PRETRAINING = 500
"""Steps of the reader as a language model."""


def slow(data: Path, *, quick: bool = False) -> Workload:
    """The GPT with beta2 = 0.999: second moments are averages over a thousand steps, not twenty."""
    base = workload_text.gpt(data, quick=quick)

    def build(seed: int) -> Course:
        course = base.build(seed)
        for group in course.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)
        return course

    return replace(base, name="gpt .999", build=build)


def adamw(data: Path, *, quick: bool = False) -> Workload:
    """The ResNet-20 with AdamW: betas 0.9/0.999, weight decay 0.05, peak 4e-3."""
    base = workload_image.resnet(data, quick=quick)

    def build(seed: int) -> Course:
        course = base.build(seed)
        optimizer = torch.optim.AdamW(course.model.parameters(), lr=4e-3, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, base.steps, 0.0))
        return Course(course.model, optimizer, scheduler, course.stream)

    return replace(base, name="resnet adamw", build=build)


def large(data: Path, *, quick: bool = False) -> Workload:
    """The GPT with 10.8 M parameters; a peak of 1e-3, as fits its width."""
    return replace(workload_text.gpt(data, shape=workload_text.LARGE, peak=1e-3, quick=quick), name="gpt 10M")


@lru_cache
def _reader(data: Path, steps: int) -> workload_sentence.Reader:
    return workload_sentence.pretrain(data, steps)


def fine_tuned(data: Path, *, quick: bool = False) -> Workload:
    """A language model of words, fine-tuned to SST-2: AdamW (betas 0.9/0.999, decay 0.01), clip 1, peak 5e-4, a cosine.

    The quality is the loss on the development part: 300 sentences for a search, the other 572 for the study.
    """
    texts = workload_sentence.corpus(data)
    steps, interval = (16, 4) if quick else (700, 25)
    count = 32 if quick else 300

    def build(seed: int) -> Course:
        reader = _reader(data, 3 if quick else PRETRAINING)
        torch.manual_seed(seed)  # of the new head, and of dropout: training a reader draws numbers, a kept one does not
        model = workload_sentence.Classifier(copy.deepcopy(reader)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, steps, 0.1))
        return Course(model, optimizer, scheduler, workload_sentence.stream(data, seed, 32))

    def quality(part: slice) -> Callable[[nn.Module], float]:
        words, labels = texts.dev_sentences[part], texts.dev_labels[part]

        def evaluate(model: nn.Module) -> float:
            with evaluating(model):
                return F.cross_entropy(model(words), labels).item()

        return evaluate

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    seen, unseen = quality(slice(count)), quality(slice(count, None))
    facts = {"sentences": len(texts.labels), "batch": 32, "pre-training": PRETRAINING}
    return Workload("reader", "loss", False, steps, interval, build, loss, seen, unseen, clip=1.0, facts=facts)


def variant(name: str, data: Path, *, quick: bool) -> Workload:
    """One of `VARIANTS`."""
    made = {"gpt .999": slow, "gpt 10M": large, "resnet adamw": adamw, "reader": fine_tuned}[name]
    return made(data, quick=quick)
