"""What an Accelerator was given to prepare and to register: collected for a save, checked and loaded for a restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.tensors.flatten import flatten
from shrinkpoint.tensors.rng import get_rng_state
from shrinkpoint.tensors.rng import set_rng_state as reinstate_rng
from shrinkpoint.train import state_dicts
from shrinkpoint.train.accelerate import dataloaders

_log = logging.getLogger("shrinkpoint")
_UNSUPPORTED_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_PREPARE_ADVICE = "prepare and register what was prepared and registered when it was saved"


def check_engine(accelerator: Accelerator) -> None:
    """Refuse what keeps its state to itself.

    Raises:
        PolicyError: DeepSpeed, Megatron-LM, XLA, or the first FSDP.
    """
    kind = accelerator.distributed_type
    if kind in _UNSUPPORTED_ENGINES or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        found = "FSDP of version 1" if kind == DistributedType.FSDP else kind.value
        do = "use accelerator.save_state, or fsdp_version=2"
        raise PolicyError("Accelerator", found=found, expected="DDP, FSDP2 or one process", do=do)


def unwrap_models(accelerator: Accelerator) -> list[nn.Module]:
    """The prepared models without their wrappers, so that their names are the same on one process and on many."""
    return [unwrap_model(model) for model in accelerator._models]


def unwrap_model(model: nn.Module) -> nn.Module:
    """A model as it was before it was prepared; mixed precision stays."""
    out: nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    return out


def has_sharded_model(accelerator: Accelerator) -> bool:
    """Whether a model is spread over processes."""
    return any(isinstance(x, DTensor) for model in accelerator._models for x in model.parameters())


@dataclass(frozen=True)
class PreparedState:
    """What one process has to save.

    Attributes:
        state: what all processes have alike; without models and optimizers where they are sharded.
        objects: the live objects behind it.
        per_rank: what no other process has.
    """

    state: dict[str, Any]
    objects: dict[str, Any]
    per_rank: dict[str, Any]


def collect_prepared(accelerator: Accelerator, directory: Path, *, models: bool) -> PreparedState:
    """Call the hooks that were registered, then take down the state.

    Args:
        models: False: without models and optimizers, which somebody else saves.

    Raises:
        StateError: a registered object has something that cannot be stored.
    """
    modules = unwrap_models(accelerator) if models else []
    given = [module.state_dict() for module in modules]
    weights = list(given)
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(directory))
    state: dict[str, Any] = {"model": weights, "optimizer": []}
    parts: dict[str, Any] = {}
    left = [module for module, one in zip(modules, given, strict=True) if any(one is kept for kept in weights)]
    if left and len(left) == len(weights):
        parts["model"] = _unwrap_single(left)
    if models:
        state["optimizer"] = [optimizer.state_dict() for optimizer in accelerator._optimizers]
    state = {name: _unwrap_single(value) for name, value in state.items() if value}
    return PreparedState(
        state | _auxiliary_state(accelerator) | {"sharded": not models}, parts, _per_rank_state(accelerator)
    )


def check_prepared(
    accelerator: Accelerator, state: Any, models: Sequence[nn.Module], where: str, *, strict: bool
) -> None:
    """Make sure that a state fits; changes nothing.

    Args:
        models: those that the hooks have left to be loaded.

    Raises:
        MismatchError: it does not.
    """
    if not isinstance(state, dict) or not isinstance(state.get("ranks"), list):
        do = "load it with what saved it"
        raise MismatchError(where, found="no state of an Accelerator", expected="what save_state saves", do=do)
    for name, ours in _expected_counts(accelerator, state):
        theirs = len(_as_list(state.get(name)))
        if theirs != ours:
            raise MismatchError(where, found=f"{theirs} of {name!r}", expected=f"{ours}", do=_PREPARE_ADVICE)
    if accelerator.scaler is not None and "scaler" not in state:
        do = "set the same mixed_precision"
        raise MismatchError(where, found="no gradient scaler", expected="that of mixed precision", do=do)
    for thing, saved, name in [*_pair_models(accelerator, state, models), *_pair_optimizers(accelerator, state)]:
        state_dicts.check_state_dicts(thing, saved, f"{where}, {name}", strict=strict)
    for number, (scheduler, saved) in enumerate(
        zip(accelerator._schedulers, _as_list(state["scheduler"]), strict=True)
    ):
        inner = getattr(scheduler, "scheduler", scheduler)
        state_dicts.check_state_dicts(inner, saved, f"{where}, scheduler {number}", strict=strict)


def load_prepared(
    accelerator: Accelerator, state: dict[str, Any], models: Sequence[nn.Module], where: str, *, strict: bool
) -> None:
    """Load what `check` approved of."""
    for thing, saved, name in [*_pair_models(accelerator, state, models), *_pair_optimizers(accelerator, state)]:
        state_dicts.load_state_dicts(thing, saved, f"{where}, {name}", strict=strict)
    load_auxiliary_state(accelerator, state, where)


def load_auxiliary_state(accelerator: Accelerator, state: dict[str, Any], where: str) -> None:
    """Load all but models and optimizers; the random generators last, for whatever is loaded may draw from them."""
    for things, name in ((accelerator._schedulers, "scheduler"), (accelerator._custom_objects, "objects")):
        for thing, saved in zip(things, state[name], strict=True):
            thing.load_state_dict(saved)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["step"]
    _restore_per_rank(accelerator, state["ranks"], where)


def _auxiliary_state(accelerator: Accelerator) -> dict[str, Any]:
    """What all processes have alike, but for models and optimizers."""
    state = {
        "scheduler": [scheduler.state_dict() for scheduler in accelerator._schedulers],
        "objects": [_registered_state(index, one) for index, one in enumerate(accelerator._custom_objects)],
        "step": accelerator.step,
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    return state


def _registered_state(index: int, obj: Any) -> Any:
    """The state of an object, if it can be stored; the error names the object."""
    return _check_storable(obj.state_dict(), f"{type(obj).__qualname__}, object {index} of register_for_checkpointing")


def _check_storable(state: Any, name: str) -> Any:
    try:
        flatten(state)
    except StateError as error:
        raise StateError(f"{name}, {error.where}", found=error.found, expected=error.expected, do=error.do) from error
    return state


def _per_rank_state(accelerator: Accelerator) -> dict[str, Any]:
    stands = [
        _check_storable(dataloaders.get_loader_state(loader), f"dataloader {index}")
        for index, loader in enumerate(accelerator._dataloaders)
    ]
    return {"rng": get_rng_state(), "loaders": stands}


def _restore_per_rank(accelerator: Accelerator, ranks: list[Any], where: str) -> None:
    """What was this process's own; a process that was not there when it was saved keeps its own."""
    rank, count = accelerator.process_index, accelerator.num_processes
    if len(ranks) != count and accelerator.is_main_process:
        _log.warning(
            "%s was saved by %d processes and is loaded by %d: random numbers and batches go on differently",
            where,
            len(ranks),
            count,
        )
    if rank >= len(ranks) or ranks[rank] is None:
        return
    for loader, state in zip(accelerator._dataloaders, ranks[rank]["loaders"], strict=False):
        dataloaders.set_loader_state(loader, state)
    reinstate_rng(ranks[rank]["rng"])


def _expected_counts(accelerator: Accelerator, state: dict[str, Any]) -> Iterator[tuple[str, int]]:
    if not state.get("sharded"):
        yield "optimizer", len(accelerator._optimizers)
    yield "scheduler", len(accelerator._schedulers)
    yield "objects", len(accelerator._custom_objects)


def _pair_models(
    accelerator: Accelerator, state: dict[str, Any], models: Sequence[nn.Module]
) -> list[tuple[Any, Any, str]]:
    """Each model that is to be loaded, and what of.

    Raises:
        MismatchError: there are more models than were saved, or fewer than were prepared then.
    """
    saved = _as_list(state.get("model"))
    if len(saved) > len(accelerator._models):
        found, expected = f"{len(saved)} models in the checkpoint", f"{len(accelerator._models)}"
        raise MismatchError("model", found=found, expected=expected, do=_PREPARE_ADVICE)
    places = range(len(models))
    if len(saved) == len(accelerator._models):
        known = [id(model) for model in accelerator._models]
        places = [known.index(id(model)) if id(model) in known else at for at, model in enumerate(models)]  # type: ignore[assignment]
    if len(models) > len(saved):
        found = f"{len(saved)} models in the checkpoint"
        raise MismatchError("model", found=found, expected=f"{len(models)}", do=_PREPARE_ADVICE)
    return [(unwrap_model(model), saved[at], "model") for model, at in zip(models, places, strict=True)]


def _pair_optimizers(accelerator: Accelerator, state: dict[str, Any]) -> list[tuple[Any, Any, str]]:
    pairs = zip(accelerator._optimizers, _as_list(state.get("optimizer")), strict=not state.get("sharded"))
    return [(optimizer, saved, "optimizer") for optimizer, saved in pairs]


def _unwrap_single(items: list[Any]) -> Any:
    """One thing itself, so that it has the name in the state that a scheme knows it by."""
    return items[0] if len(items) == 1 else items


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
