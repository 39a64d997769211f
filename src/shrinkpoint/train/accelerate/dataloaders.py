"""Saves and restores the position of a prepared dataloader, so that the same batches follow."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler


def get_loader_state(loader: Any) -> dict[str, Any]:
    """Return the state of a dataloader as a nest that can be stored.

    The generator that shuffles is included between two epochs only: within an epoch it has advanced already, and the
    epoch that starts again after a restore would have another order.
    """
    state: dict[str, Any] = {}
    if isinstance(getattr(loader, "iteration", None), int):
        state["iteration"] = loader.iteration
    sampler = _sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        state["sampler"] = {"seed": sampler.initial_seed, "epoch": sampler.epoch}
    elif (generator := _generator(loader, sampler)) is not None and not _is_mid_epoch(generator, loader):
        state["generator"] = generator.get_state()
    if getattr(loader, "use_stateful_dataloader", False):
        state["loader"] = loader.state_dict()
    return state


def set_loader_state(loader: Any, state: dict[str, Any]) -> None:
    """Restore what `get_loader_state` returned, as far as the dataloader has these parts."""
    if "iteration" in state and hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    sampler = _sampler(loader)
    if "sampler" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed, sampler.epoch = state["sampler"]["seed"], state["sampler"]["epoch"]
    generator = _generator(loader, sampler)
    if "generator" in state and generator is not None:
        generator.set_state(state["generator"])
    if "loader" in state and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(state["loader"])


def _sampler(loader: Any) -> Any:
    return loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None


def _generator(loader: Any, sampler: Any) -> torch.Generator | None:
    """The generator that shuffles, equal on all processes; None if there is none."""
    for generator in (getattr(loader, "synchronized_generator", None), getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _is_mid_epoch(generator: torch.Generator, loader: Any) -> bool:
    """Whether an epoch that the generator shuffled has begun and not ended.

    A dataloader that skips batches (`skip_first_batches`) is another object with the same generator.
    """
    active_loaders = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(active is not None and _generator(active, _sampler(active)) is generator for active in active_loaders)
