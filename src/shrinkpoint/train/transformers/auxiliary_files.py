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


def save_auxiliary_files(trainer: Any, model: Any, output_dir: str) -> None:
    """Write what `Trainer._save` writes beside the weights."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel):
        _save_config(model, output_dir)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(output_dir)
    torch.save(trainer.args, Path(output_dir) / TRAINING_ARGS_NAME)


def _save_config(model: Any, output_dir: str) -> None:
    """What `save_pretrained` says of a model without its weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, output_dir, config=model.config)
    model.config.save_pretrained(output_dir)
    if model.can_generate():
        model.generation_config.save_pretrained(output_dir)


def has_adapters(model: Any) -> bool:
    """Whether what is saved of a model are adapters."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    if not is_peft_available():
        return False
    from peft import PeftModel  # type: ignore[import-not-found,unused-ignore]

    return isinstance(model, PeftModel)


def save_interval(args: Any) -> int | None:
    """Optimizer steps from save to save; None: nobody knows."""
    steps = args.save_steps if args.save_strategy == SaveStrategy.STEPS else 0
    return int(steps) if steps >= 1 else None


def eval_metrics(state: Any) -> dict[str, float]:
    """What was evaluated at this step."""
    now = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    numbers = {name: value for entry in now for name, value in entry.items() if name.startswith("eval_")}
    speeds = ("_runtime", "_per_second", "_preparation_time")
    return {name: float(x) for name, x in numbers.items() if isinstance(x, int | float) and not name.endswith(speeds)}
