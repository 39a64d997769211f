"""The small files that `Trainer._save` writes next to the weights, and what the Trainer's state says about a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_peft_available

_SPEED_SUFFIXES = ("_runtime", "_per_second", "_preparation_time")


def save_auxiliary_files(trainer: Any, model: Any, output_dir: str) -> None:
    """Write configuration, tokenizer and training arguments, as `Trainer._save` does next to the weights."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel):
        _save_config(model, output_dir)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(output_dir)
    torch.save(trainer.args, Path(output_dir) / TRAINING_ARGS_NAME)


def has_adapters(model: Any) -> bool:
    """Whether only adapters of a model are saved (PEFT)."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    if not is_peft_available():
        return False
    from peft import PeftModel  # type: ignore[import-not-found,unused-ignore]

    return isinstance(model, PeftModel)


def save_interval(args: Any) -> int | None:
    """Number of optimizer steps between two saves; None if it is not fixed."""
    steps = args.save_steps if args.save_strategy == SaveStrategy.STEPS else 0
    return int(steps) if steps >= 1 else None


def eval_metrics(state: Any) -> dict[str, float]:
    """Metrics that were evaluated at the current step, without timings.

    Args:
        state: the `TrainerState`.
    """
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not name.endswith(_SPEED_SUFFIXES)
    }


def _save_config(model: Any, output_dir: str) -> None:
    """Write what `save_pretrained` writes without the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, output_dir, config=model.config)
    model.config.save_pretrained(output_dir)
    if model.can_generate():
        model.generation_config.save_pretrained(output_dir)
