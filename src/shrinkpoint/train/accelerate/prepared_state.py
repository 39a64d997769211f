"""Collects, checks and loads the state of everything that an Accelerator has prepared and registered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import state_dicts
from shrinkpoint.train.state_alignment import NAMES_KEY, collect_names

_log = logging.getLogger("shrinkpoint")
_UNSUPPORTED_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_PREPARE_ADVICE = "prepare and register the same objects as when it was saved"


def check_engine(accelerator: Accelerator) -> None:
    """Raise if the state of the distributed engine cannot be read.

    Raises:
        PolicyError: DeepSpeed, Megatron-LM, XLA, or FSDP of version 1.
    """
    engine = accelerator.distributed_type
    if engine in _UNSUPPORTED_ENGINES or (engine == DistributedType.FSDP and not accelerator.is_fsdp2):
        found = "FSDP of version 1" if engine == DistributedType.FSDP else engine.value
        do = "use accelerator.save_state, or fsdp_version=2"
        raise PolicyError("Accelerator", found=found, expected="DDP, FSDP2 or one process", do=do)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return a prepared model without its wrappers, except that of mixed precision.

    So names of tensors do not depend on the number of processes.
    """
    module: nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    return module


def has_sharded_model(accelerator: Accelerator) -> bool:
    """True if a model is sharded over processes."""
    return any(isinstance(parameter, DTensor) for model in accelerator._models for parameter in model.parameters())


def collect_prepared(
    accelerator: Accelerator, directory: Path | ObjectUrl, *, models: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Call the registered hooks, then collect the state.

    Args:
        directory: passed to the hooks.
        models: include models and optimizers.

    Returns:
        The part that is equal on all processes, the live objects behind it by its keys, and random generators and
        dataloaders of this process.

    Raises:
        StateError: a registered object holds something that cannot be stored.
    """
    modules = [unwrap_model(model) for model in accelerator._models] if models else []
    module_states = [module.state_dict() for module in modules]
    weights = list(module_states)
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(directory))  # may remove or add entries of `weights`
    state: dict[str, Any] = {"model": weights, "optimizer": []}
    objects: dict[str, Any] = {}
    saved_ids = {id(entry) for entry in weights}
    saved_modules = [module for module, entry in zip(modules, module_states, strict=True) if id(entry) in saved_ids]
    if saved_modules and len(saved_modules) == len(weights):
        objects["model"] = _unwrap_single(saved_modules)
    if models:
        state["optimizer"] = [optimizer.state_dict() for optimizer in accelerator._optimizers]
    state = {name: _unwrap_single(value) for name, value in state.items() if value}
    schedulers = [scheduler.state_dict() for scheduler in accelerator._schedulers]
    registered = [
        _check_storable(obj.state_dict(), f"{type(obj).__qualname__}, object {index} of register_for_checkpointing")
        for index, obj in enumerate(accelerator._custom_objects)
    ]
    state |= {"scheduler": schedulers, "objects": registered, "step": accelerator.step}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    state["sharded"] = not models
    if models and (names := collect_names(live_objects(accelerator))):
        state[NAMES_KEY] = names
    # Random generators and positions of dataloaders of this process
    loader_states = [
        _check_storable(get_loader_state(loader), f"dataloader {index}")
        for index, loader in enumerate(accelerator._dataloaders)
    ]
    return state, objects, {"rng": get_rng_state(), "loaders": loader_states}


def live_objects(accelerator: Accelerator) -> dict[str, Any]:
    """Unsharded models, optimizers and schedulers, by their keys in a state."""
    models = [unwrap_model(model) for model in accelerator._models]
    objects = {"model": models, "optimizer": accelerator._optimizers}
    single = {name: _unwrap_single(values) for name, values in objects.items() if values}
    return {**single, "scheduler": accelerator._schedulers}


def check_prepared(
    accelerator: Accelerator,
    state: Any,
    models: list[nn.Module],
    where: str,
    *,
    strict: bool,
    saved_dtypes: Mapping[int, torch.dtype] = state_dicts.NO_DTYPES,
) -> None:
    """Call the registered hooks, then raise unless a state fits what is prepared and registered; it is not changed.

    Args:
        models: those to be loaded; hooks may remove some of them.
        where: for the error.
        strict: raise if keys of a model are missing or unexpected.
        saved_dtypes: of `AlignedState`.

    Raises:
        MismatchError: it does not fit.
    """
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, where)
    if not isinstance(state, dict) or not isinstance(state.get("ranks"), list):
        raise not_ours(where)
    expected_counts = {"scheduler": len(accelerator._schedulers), "objects": len(accelerator._custom_objects)}
    if not state.get("sharded"):
        expected_counts = {"optimizer": len(accelerator._optimizers), **expected_counts}
    for name, expected_count in expected_counts.items():
        count = len(_as_list(state.get(name)))
        if count != expected_count:
            raise MismatchError(where, found=f"{count} of {name!r}", expected=f"{expected_count}", do=_PREPARE_ADVICE)
    if accelerator.scaler is not None and "scaler" not in state:
        found, do = "no gradient scaler", "set the same mixed_precision"
        raise MismatchError(where, found=found, expected="that of mixed precision", do=do)
    for obj, saved, name in _pair_models_and_optimizers(accelerator, state, models):
        state_dicts.check_state_dicts(obj, saved, f"{where}, {name}", strict=strict, saved_dtypes=saved_dtypes)
    saved_schedulers = _as_list(state["scheduler"])
    for index, (scheduler, saved) in enumerate(zip(accelerator._schedulers, saved_schedulers, strict=True)):
        inner = getattr(scheduler, "scheduler", scheduler)
        state_dicts.check_state_dicts(inner, saved, f"{where}, scheduler {index}", strict=strict)
    for obj, saved, name in _pair_registered(accelerator, state):
        state_dicts.check_state_dicts(obj, saved, f"{where}, {name}", strict=strict)


def not_ours(where: str) -> MismatchError:
    """The error for a checkpoint that was not saved from an Accelerator."""
    found, expected = "no state of an Accelerator", "what save_state saves"
    return MismatchError(where, found=found, expected=expected, do="load it with the program that saved it")


def load_prepared(
    accelerator: Accelerator,
    state: dict[str, Any],
    models: Sequence[nn.Module],
    where: str,
    *,
    strict: bool,
    saved_dtypes: Mapping[int, torch.dtype],
) -> None:
    """Load a state that `check_prepared` has accepted."""
    load_registered(accelerator, state, where, strict=strict)
    for obj, saved, name in _pair_models_and_optimizers(accelerator, state, models):
        state_dicts.load_state_dicts(obj, saved, f"{where}, {name}", strict=strict, saved_dtypes=saved_dtypes)
    load_auxiliary_state(accelerator, state, where)


def load_registered(accelerator: Accelerator, state: dict[str, Any], where: str, *, strict: bool) -> None:
    """Load the objects of `register_for_checkpointing`, before anything else.

    Those whose state only they themselves can check come first: where one refuses it, nothing else has changed.

    Raises:
        MismatchError: an object refuses its state.
    """
    pairs = sorted(_pair_registered(accelerator, state), key=lambda pair: state_dicts.is_checked(pair[0]))
    for obj, saved, name in pairs:
        state_dicts.load_state_dicts(obj, saved, f"{where}, {name}", strict=strict)


def load_auxiliary_state(accelerator: Accelerator, state: dict[str, Any], where: str) -> None:
    """Load everything but models, optimizers and registered objects; random generators last: loading may draw."""
    for scheduler, saved in zip(accelerator._schedulers, state["scheduler"], strict=True):
        scheduler.load_state_dict(saved)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["step"]
    # Generators and dataloaders of this process, if a process of its rank has saved them
    rank_states, rank, world_size = state["ranks"], accelerator.process_index, accelerator.num_processes
    if len(rank_states) != world_size and accelerator.is_main_process:
        text = "%s was saved by %d processes and is loaded by %d: random numbers and batches will differ"
        _log.warning(text, where, len(rank_states), world_size)
    if rank < len(rank_states) and rank_states[rank] is not None:
        for loader, loader_state in zip(accelerator._dataloaders, rank_states[rank]["loaders"], strict=False):
            set_loader_state(loader, loader_state)
        set_rng_state(rank_states[rank]["rng"])


def _check_storable(state: Any, name: str) -> Any:
    """Return the state if it can be stored; the error names the object."""
    try:
        flatten(state)
    except StateError as error:
        raise StateError(f"{name}, {error.where}", found=error.found, expected=error.expected, do=error.do) from error
    return state


def _pair_registered(accelerator: Accelerator, state: dict[str, Any]) -> list[tuple[Any, Any, str]]:
    """Each object of `register_for_checkpointing`, with its saved state and a name for errors."""
    pairs = zip(accelerator._custom_objects, _as_list(state["objects"]), strict=True)
    return [(obj, saved, f"object {index} of register_for_checkpointing") for index, (obj, saved) in enumerate(pairs)]


def _pair_models_and_optimizers(
    accelerator: Accelerator, state: dict[str, Any], models: Sequence[nn.Module]
) -> list[tuple[Any, Any, str]]:
    """Each model and optimizer to be loaded, with its saved state and a name for errors."""
    saved = _as_list(state.get("optimizer"))
    optimizers = zip(accelerator._optimizers, saved, strict=not state.get("sharded"))
    # Each model to be loaded, with its saved state; hooks may have removed models from either side
    saved_models = _as_list(state.get("model"))
    count = f"{len(saved_models)} models in the checkpoint"
    if len(saved_models) > len(accelerator._models):
        raise MismatchError("model", found=count, expected=f"{len(accelerator._models)}", do=_PREPARE_ADVICE)
    if len(models) > len(saved_models):
        raise MismatchError("model", found=count, expected=f"{len(models)}", do=_PREPARE_ADVICE)
    indices = list(range(len(models)))
    if len(saved_models) == len(accelerator._models):
        index_by_id = {id(model): index for index, model in enumerate(accelerator._models)}
        indices = [index_by_id.get(id(model), index) for index, model in enumerate(models)]
    return [
        *[(unwrap_model(model), saved_models[index], "model") for model, index in zip(models, indices, strict=True)],
        *((*pair, "optimizer") for pair in optimizers),
    ]


def _unwrap_single(items: list[Any]) -> Any:
    """The item of a list with one item, so that schemes find "model" under that name; else the list."""
    return items[0] if len(items) == 1 else items


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# Positions of dataloaders, so that the same batches follow


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
    """True if an epoch that the generator shuffled has begun and not ended."""
    # A dataloader that skips batches (`skip_first_batches`) is another object with the same generator.
    active_loaders = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(active is not None and _generator(active, _sampler(active)) is generator for active in active_loaders)
