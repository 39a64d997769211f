"""Loads a Hugging Face model straight from a compressed checkpoint, and exports it for those that read no others.

A checkpoint may hold adapters (PEFT) in place of a model's weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import is_peft_available, logging

from shrinkpoint.errors import MismatchError, MissingExtraError, NotFoundError, PolicyError
from shrinkpoint.storage import Storage, atomic_replace, check_no_loss, local_path
from shrinkpoint.train.transformers.checkpoint_dirs import WEIGHT_FILES
from shrinkpoint.train.transformers.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    GENERATION_FILE,
    SMALL_FILES,
    PretrainedWeights,
    find_adapter,
    load_weights,
)

_MAX_LISTED = 3
_MODEL_ARGUMENTS = ("dtype", "torch_dtype", "quantization_config")
"""Arguments that `AutoConfig` would take away from the model."""


def from_pretrained(
    model_class: Any,
    where: str | Path | Storage,
    *model_args: Any,
    step: int | None = None,
    key: str | Sequence[str | int] | None = None,
    strict: bool = True,
    config: Any = None,
    threads: int | None = None,
    max_bytes: int | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model as `model_class.from_pretrained` does, from a compressed checkpoint.

    Only the weights are decoded, into the memory that the model then uses; nothing is written to the disk. A checkpoint
    of adapters (PEFT) brings the base that `adapter_config.json` names, with the adapter in it.

    Args:
        model_class: a model's class, or an Auto class such as `AutoModelForCausalLM`.
        where: a checkpoint directory of a `ShrinkTrainer` or another integration, its run, a file, or a store, also one
            in a bucket ("s3://bucket/run").
        step: of a run or store: which checkpoint; None: the newest.
        key: the key of the weights in the state, or a path of keys; None: "model", or what the integrations use.
        strict: False: tensors that the model has and the checkpoint lacks are initialized, and others ignored.
        config: a configuration, or what its class's `from_pretrained` takes; None: `config.json` in the directory, or
            beside the base of a file.
        threads: native threads for decoding; None: every core.
        max_bytes: as of `shrinkpoint.load`.
        model_args, kwargs: passed on: `dtype`, `device_map`, `attn_implementation`, `key_mapping`, ...

    Returns:
        The model in evaluation mode; with `output_loading_info=True` also what was missing.

    Raises:
        NotFoundError: there is no such checkpoint, no weights in it, or no configuration.
        MismatchError: names or shapes of the weights are not those of the model.
        ChainError, FormatError, StorageError: the checkpoint does not load.
        PolicyError: an argument that means nothing here.
        MissingExtraError: the checkpoint has an adapter, and PEFT is not installed.
    """
    if not hasattr(model_class, "from_pretrained"):
        found, do = repr(model_class)[:80], "pass e.g. AutoModelForCausalLM"
        raise PolicyError("from_pretrained", found=found, expected="a class of a model, or an Auto class", do=do)
    for name in ("state_dict", "gguf_file", "subfolder", "variant"):
        if kwargs.get(name) is not None:
            found, do = f"{name}=", f"leave it out, or call {model_class.__name__}.from_pretrained"
            raise PolicyError("from_pretrained", found=found, expected="weights of a compressed checkpoint", do=do)
    device_map = kwargs.get("device_map")
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        found, do = "a part of the model on the disk", "export it first, with export_pretrained"
        raise PolicyError("device_map", found=found, expected="devices, or the CPU", do=do)
    if key is None and (adapter := find_adapter(where, step)) is not None:
        _check_adapter(adapter)
        options = kwargs if config is None else {"config": config, **kwargs}
        return model_class.from_pretrained(str(adapter), *model_args, **options)
    weights = load_weights(where, step, key, threads=threads, max_bytes=max_bytes)
    with weights.small_files() as directory:
        return _build_model(model_class, weights, directory, model_args, config=config, strict=strict, kwargs=kwargs)


@dataclass(frozen=True)
class PretrainedExport:
    """Report of `export_pretrained`.

    Attributes:
        path: the directory.
        tensors: how many.
        nbytes: of all files.
        files: their names, sorted.
    """

    path: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...]


def export_pretrained(
    where: str | Path | Storage,
    out: str | Path,
    *,
    step: int | None = None,
    key: str | Sequence[str | int] | None = None,
    model_class: Any = None,
    config: Any = None,
    max_shard_size: int | str | None = None,
    force: bool = False,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> PretrainedExport:
    """Write the model of a compressed checkpoint as a directory that every `from_pretrained` reads.

    The values are those of the checkpoint, bit for bit, in its dtypes; names and files are those of `save_pretrained`.
    Files of the tokenizer, of a processor and of the generation's settings are copied from where `config.json` lies.
    Of a checkpoint of adapters the adapter is written, which `PeftModel.from_pretrained` reads.

    Args:
        where, step, key, threads, max_bytes: as of `from_pretrained`.
        out: the directory, which must be new.
        model_class: None: the one that the configuration names.
        config: a configuration; None: `config.json` in the directory of the checkpoint.
        max_shard_size: bytes of a file, or a text such as "5GB"; a larger model gets several, and an index. None: that
            of transformers.
        force: replace `out`, if all files in it are replaced, or are weights of an earlier export.

    Raises:
        NotFoundError, MismatchError, ChainError, FormatError: as `from_pretrained`.
        PolicyError: `out` exists; the configuration names no class of transformers.
        StorageError: reading or writing failed; `out` is what it was.
    """
    target = local_path(out, "out").absolute()
    if target.exists() and not force:
        do = "pass force=True to replace it"
        raise PolicyError(str(out), found="a path that exists", expected="a new name", do=do)
    adapter = find_adapter(where, step) if key is None else None
    with _without_progress(), atomic_replace(target) as temporary:
        temporary.mkdir()
        if adapter is not None:
            tensors = _copy_adapter(adapter, temporary)
        else:
            weights = load_weights(where, step, key, threads=threads, max_bytes=max_bytes)
            tensors = len(weights.tensors)
            _write_model(weights, temporary, model_class, config, max_shard_size)
        check_no_loss(target, temporary, WEIGHT_FILES)
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        nbytes, names = sum(path.stat().st_size for path in files), [path.name for path in files]
    return PretrainedExport(target, tensors, nbytes, tuple(names))


def _write_model(
    weights: PretrainedWeights, target: Path, model_class: Any, config: Any, max_shard_size: int | str | None
) -> None:
    """Write weights as `save_pretrained` does, with the small files that belong to them."""
    with weights.small_files() as directory:
        if not isinstance(config, PreTrainedConfig):
            config, _ = _load_config(AutoConfig, _config_source(config, weights, directory), {})
        if model_class is None:
            names = config.architectures or []
            model_class = getattr(transformers, names[0], None) if names else None
            if model_class is None:
                found = f"the architecture {names[0]!r}" if names else "a configuration without architectures"
                expected, do = "the name of a class of transformers", "pass model_class=, such as AutoModelForCausalLM"
                raise PolicyError(weights.where, found=found, expected=expected, do=do)
        dtype, saved = _main_dtype(weights.tensors), dict(weights.tensors)
        model = _build_model(model_class, weights, directory, (), config=config, strict=True, kwargs={"dtype": dtype})
        state = model.state_dict()
        # the dtype of the model is one, those of the checkpoint may be several
        for name, tensor in saved.items():
            if name in state and state[name].shape == tensor.shape and state[name].dtype != tensor.dtype:
                state[name] = tensor
        with torch.device("meta"):  # a model that was loaded writes names as it found them; a new one, public names
            writer = type(model)(model.config).to(dtype)
        if model.can_generate():
            writer.generation_config = model.generation_config
        shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        try:
            writer.save_pretrained(target, state_dict=state, **shards)
        except ValueError as error:  # a size that is none
            found, do = str(error)[:200], "pass e.g. '5GB'"
            raise PolicyError("max_shard_size", found=found, expected="a size", do=do) from error
        for path in [] if directory is None else sorted(directory.iterdir()):
            if path.is_file() and path.name != CONFIG_FILE and SMALL_FILES.fullmatch(path.name):
                shutil.copyfile(path, target / path.name)


def _build_model(
    model_class: Any,
    weights: PretrainedWeights,
    directory: Path | None,
    model_args: Sequence[Any],
    *,
    config: Any,
    strict: bool,
    kwargs: Mapping[str, Any],
) -> Any:
    options = dict(kwargs)
    if not isinstance(config, PreTrainedConfig):
        config_class = AutoConfig if _is_auto(model_class) else model_class.config_class
        config, options = _load_config(config_class, _config_source(config, weights, directory), options)
    if _is_auto(model_class):
        model_class, config = _resolve_auto(model_class, config, options)
    if directory is not None and (directory / GENERATION_FILE).is_file():
        options.setdefault("generation_config", GenerationConfig.from_pretrained(str(directory)))
    returns_info = options.pop("output_loading_info", False)
    ignores_sizes = options.pop("ignore_mismatched_sizes", False)

    def load(tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
        return model_class.from_pretrained(  # type: ignore[no-any-return]
            None,
            *model_args,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_fit` is what refuses them
            **options,
        )

    try:
        model, info = load(dict(weights.tensors))
    except NotImplementedError:  # transformers compares tied weights of another shape, which have no memory yet
        model, info = load(_without_aliases(weights.tensors))
    _check_fit(info, weights, type(model).__name__, strict=strict, ignores_sizes=ignores_sizes)
    # Parameters that share memory and are not tied in the model get memory of their own
    addresses: set[int] = set()
    for parameter in model.parameters():
        if parameter.numel() and parameter.device.type != "meta":
            if parameter.data_ptr() in addresses:
                parameter.data = parameter.data.clone()
            addresses.add(parameter.data_ptr())
    model.config.name_or_path = weights.where
    return (model, info) if returns_info else model


def _is_auto(model_class: Any) -> bool:
    return hasattr(model_class, "from_config")


def _config_source(config: Any, weights: PretrainedWeights, directory: Path | None) -> Any:
    """Source of a configuration; raises NotFoundError if there is none."""
    if config is not None:
        return config
    if directory is None:
        places = " or ".join(str(path) for path in weights.directories[:2]) or "it"
        do = "pass config=, or write one there: model.config.save_pretrained(directory)"
        raise NotFoundError(weights.where, found="no configuration", expected=f"{CONFIG_FILE} in {places}", do=do)
    return str(directory)


def _load_config(config_class: Any, source: Any, options: Mapping[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A configuration with those options that are its attributes, and the other options."""
    others = {name: value for name, value in options.items() if name not in _MODEL_ARGUMENTS}
    try:
        config, unused = config_class.from_pretrained(str(source), return_unused_kwargs=True, **others)
    except (OSError, ValueError, KeyError) as error:
        expected, do = "a configuration of transformers", "pass config=, a configuration or its directory"
        raise PolicyError(str(source), found=f"{error!s:.300}", expected=expected, do=do) from error
    # the Auto class needs these again
    reserved = {name: options[name] for name in (*_MODEL_ARGUMENTS, "trust_remote_code") if name in options}
    return config, {**unused, **reserved}


def _resolve_auto(auto_class: Any, config: PreTrainedConfig, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class that an Auto class makes of a configuration, and the configuration that this class takes."""
    trust = {name: options[name] for name in ("trust_remote_code",) if name in options}
    with torch.device("meta"):
        model = auto_class.from_config(config, **trust)
    return type(model), config if type(model.config) is type(config) else model.config


def _check_fit(
    info: Mapping[str, Any], weights: PretrainedWeights, name: str, *, strict: bool, ignores_sizes: bool
) -> None:
    """Raise unless names and shapes of the weights are those of the model."""
    problems = []
    if strict:
        problems += _problem(sorted(info["missing_keys"]), "that it needs and the checkpoint lacks")
        # tied weights are unexpected too, and the model has their values under another name
        tensors, unexpected = weights.tensors, info["unexpected_keys"]
        loaded = {tensor.data_ptr() for name, tensor in tensors.items() if name not in unexpected}
        lost = [name for name in unexpected if name not in tensors or tensors[name].data_ptr() not in loaded]
        problems += _problem(sorted(lost), "that it does not have")
    wrong = [] if ignores_sizes else sorted(info["mismatched_keys"], key=lambda item: str(item[0]))
    texts = [f"{key} {list(saved)} for {list(own)}" for key, saved, own in wrong]
    problems += _problem(texts, "of another shape")
    if not problems:
        return
    do = "pass the class and the configuration that were trained"
    do += "; ignore_mismatched_sizes=True initializes these" if wrong else ""
    do += "; strict=False takes what fits" if len(problems) > bool(wrong) else ""
    raise MismatchError(weights.where, found=" and ".join(problems), expected=f"the tensors of a {name}", do=do)


def _problem(names: Sequence[str], what: str) -> list[str]:
    shown = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    return [f"{len(names)} {what} ({shown})"] if names else []


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without those that are another one under a second name, as `save_pretrained` writes tied weights."""
    first = {(tensor.data_ptr(), tensor.shape, tensor.stride()): name for name, tensor in reversed([*tensors.items()])}
    kept = set(first.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept or not tensor.numel()}


def _main_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.get_default_dtype())


@contextmanager
def _without_progress() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _copy_adapter(directory: Path, target: Path) -> int:
    """Copy an adapter, and the tokenizer beside it, into a new directory; returns the number of its tensors."""
    _check_complete(directory)
    for path in sorted(directory.iterdir()):
        if path.name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) or SMALL_FILES.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)
    with safe_open(target / ADAPTER_WEIGHTS, framework="pt") as file:
        return len(file.keys())


def _check_adapter(directory: Path) -> None:
    """Raise unless PEFT is installed, and finds the adapter's weights and its base."""
    if not is_peft_available():
        expected, do = f"what reads the adapter in {directory}", "run pip install peft"
        raise MissingExtraError("peft", found="not installed", expected=expected, do=do)
    _check_complete(directory)
    config: Any = None
    with suppress(ValueError):  # damaged: PEFT says so
        config = json.loads((directory / ADAPTER_CONFIG).read_bytes())
    if isinstance(config, dict) and not config.get("base_model_name_or_path"):
        found = f"a base without a name in {ADAPTER_CONFIG}"
        expected = "the directory or the name of the adapter's base"
        do = f"build the base, and call PeftModel.from_pretrained(base, {str(directory)!r})"
        raise NotFoundError(str(directory), found=found, expected=expected, do=do)


def _check_complete(directory: Path) -> None:
    if not (directory / ADAPTER_WEIGHTS).is_file():
        do = "load another checkpoint of the run: step="
        raise NotFoundError(str(directory), found=f"no {ADAPTER_WEIGHTS}", expected="that of the adapter", do=do)
