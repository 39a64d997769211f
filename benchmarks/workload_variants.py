"""Workloads as others, but for the optimizer: what a scheme does with moments depends on how these are averaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import workload_image
import workload_text
from workloads import Course, Workload, cosine

VARIANTS = ("gpt .999", "resnet adamw")


def slow(data: Path, *, quick: bool = False) -> Workload:
    """The GPT with beta2 = .999: second moments are averages over a thousand steps, not twenty."""
    base = workload_text.gpt(data, quick=quick)

    def build(seed: int) -> Course:
        course = base.build(seed)
        for group in course.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)
        return course

    return replace(base, name="gpt .999", build=build)


def adamw(data: Path, *, quick: bool = False) -> Workload:
    """The ResNet-20 with AdamW: betas .9/.999, weight decay .05, peak 4e-3."""
    base = workload_image.resnet(data, quick=quick)

    def build(seed: int) -> Course:
        course = base.build(seed)
        optimizer = torch.optim.AdamW(course.model.parameters(), lr=4e-3, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(30, base.steps, 0.0))
        return Course(course.model, optimizer, scheduler, course.stream)

    return replace(base, name="resnet adamw", build=build)


def variant(name: str, data: Path, *, quick: bool) -> Workload:
    """One of `VARIANTS`."""
    return (slow if name == "gpt .999" else adamw)(data, quick=quick)
