"""Where a prepared dataloader stands: what it needs to go on with the same batches."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler


def get_loader_state(loader: Any) -> dict[str, Any]:
    """A storable nest.

    A generator that shuffles is taken between two epochs only: within one it has moved on already, and the epoch that
    is begun again after a restore would be another one.
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
    """Set a dataloader to what `state_of` saw; what either of them lacks stays as it is."""
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
    """What shuffles, and is kept the same on all processes."""
    for generator in (getattr(loader, "synchronized_generator", None), getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _is_mid_epoch(generator: torch.Generator, loader: Any) -> bool:
    """Whether an epoch that it shuffled has begun and not ended, of this dataloader or of one that skips batches."""
    running = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(one is not None and _generator(one, _sampler(one)) is generator for one in running)
