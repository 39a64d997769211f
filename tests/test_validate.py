"""A wrong argument fails where it is given, in our words, and nothing was begun."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint import comm, validate
from shrinkpoint.comm.ddp import DDPCompression
from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train import Checkpointer, dcp

NO_COUNT = ["all", 0, -1, True, 1.5, math.nan, [1]]
"""In place of a whole number from 1."""
NO_COUNT_FROM_0 = ["all", -1, True, 1.5, None]
NO_FLAG = ["yes", 1, None, "background"]
NO_SCHEME = [None, sp.Fisher, 3, len, "zip", "fisher(error=3)"]
NO_SEED = ["x", -1, 1.5, True, None, 1 << 40]
NO_CHOICE = ["nonsense", None, 1, ["exact"]]
NO_NUMBER = ["x", None, math.nan, math.inf, True, -1.0, [1.0]]
NO_SHARE = ["201%", 5, "1", -0.5, math.nan, True, [0.1], "5 percent", "nan%", "%"]
NO_FUNCTION = [3.0, "loss", [len]]
NO_METRICS = [3, {"loss": "low"}, {"loss": None}, {"loss": 10**400}, {"loss": torch.ones(2)}]
NO_RECORDER = [True, "gradients", 3, sp.train.GradientRecorder, torch.nn.Linear(2, 2)]

Entry = Callable[..., Any]
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
SGD = torch.optim.SGD(MODEL.parameters())
MANAGER = sp.CheckpointManager(MemoryStorage())
REPLICAS = object.__new__(DDPCompression)
"""Made without a process group; nothing is asked of it before the arguments are checked."""


def searched(kind: type[Any]) -> Entry:
    return lambda **wrong: kind(**{"evaluate": len, **wrong})


COMMON = {"scheme": NO_SCHEME, "keyframe_every": NO_COUNT, "threads": NO_COUNT}
SEARCHED = {
    "threshold": NO_SHARE,
    "evaluate": NO_FUNCTION,
    "higher_is_better": NO_FLAG,
    "config": [3, "bins=8", {"bins": 5}],
    "optimizer": NO_CHOICE,
    "fallback": NO_CHOICE,
    "coarser": NO_FLAG,
    "group": ["group", 3, True],
    "progress": ["yes", 1, None],
    "seed": NO_SEED,
}
SIZES = {"nonfinite": NO_CHOICE, "min_numel": NO_COUNT_FROM_0, "sample_every": NO_COUNT_FROM_0}

TABLE: dict[str, tuple[Entry, dict[str, list[Any]]]] = {
    "CheckpointManager": (
        lambda **wrong: sp.CheckpointManager(MemoryStorage(), **wrong),
        {**COMMON, "keep": [3, sp.Keep], "background": NO_FLAG, "on_save": NO_FUNCTION},
    ),
    "Journal": (
        lambda **wrong: sp.train.Journal(**{"manager": MANAGER, "compression": REPLICAS, "update": len, **wrong}),
        {
            "manager": [3, "runs", None, sp.CheckpointManager],
            "compression": [3, MODEL, None],
            "update": NO_FUNCTION,
            "max_bytes": NO_COUNT,
            "sync_every": NO_COUNT,
            "check_every": [*NO_COUNT, None],
            "feedback": NO_CHOICE,
        },
    ),
    "Publisher": (
        lambda **wrong: sp.sync.Publisher(MemoryStorage(), **wrong),
        {"dtype": ["bf16", torch.int8, 16], "keyframe_every": NO_COUNT, "keep": NO_COUNT, "threads": NO_COUNT},
    ),
    "Publisher.publish": (
        lambda **wrong: sp.sync.Publisher(MemoryStorage()).publish(**{"model": MODEL, **wrong}),
        {"model": [3, [MODEL], None], "version": ["1", -1, 1.5, True, 10**12], "keyframe": NO_FLAG},
    ),
    "Subscriber": (
        lambda **wrong: sp.sync.Subscriber(MemoryStorage(), **wrong),
        {"poll": [*NO_NUMBER, 0], "threads": NO_COUNT, "max_bytes": NO_COUNT},
    ),
    "Subscriber.update": (
        lambda **wrong: sp.sync.Subscriber(MemoryStorage()).update(**{"model": MODEL, **wrong}),
        {"model": [3, [MODEL], None], "wait": NO_NUMBER},
    ),
    "watch_progress": (sp.watch_progress, {"listener": [*NO_FUNCTION, None]}),
    "Store": (
        lambda **wrong: sp.Store(MemoryStorage(), **wrong),
        {"keyframe_every": NO_COUNT, "threads": NO_COUNT},
    ),
    "Store.save": (
        lambda **wrong: sp.Store(MemoryStorage()).save(1, {}, **wrong),
        {"scheme": NO_SCHEME, "metrics": NO_METRICS, "keyframe": NO_FLAG, "adopt": NO_FLAG},
    ),
    "Store.begin": (lambda **wrong: sp.Store(MemoryStorage()).begin(1, **wrong), {"keyframe": NO_FLAG}),
    "Store.load": (lambda **wrong: sp.Store(MemoryStorage()).load(1, **wrong), {"tie": NO_FLAG, "keep": NO_FLAG}),
    "Store.restore": (
        lambda **wrong: sp.Store(MemoryStorage()).restore(**wrong),
        {"tie": NO_FLAG, "keep": NO_FLAG, "weights_only": NO_FLAG},
    ),
    "Store.prune": (
        lambda **wrong: sp.Store(MemoryStorage()).prune(**wrong),
        {"dry_run": NO_FLAG, "compact": NO_FLAG, "defer": NO_FLAG},
    ),
    "CheckpointManager.save": (
        lambda **wrong: sp.CheckpointManager(MemoryStorage()).save(1, extra={}, **wrong),
        {"metrics": NO_METRICS, "rng": [*NO_FLAG, torch.Generator()]},
    ),
    "CheckpointManager.restore": (
        lambda **wrong: sp.CheckpointManager(MemoryStorage()).restore(**wrong),
        {"rng": [*NO_FLAG, torch.Generator()], "strict": NO_FLAG},
    ),
    "Keep": (
        sp.Keep,
        {
            "last": NO_COUNT,
            "every": NO_COUNT,
            "best": NO_COUNT,
            "mode": NO_CHOICE,
            "metric": [None, 3],
            "within": ["soon", 3],
        },
    ),
    "Fisher": (
        sp.Fisher,
        {
            "budget": [0.01, "101%", "1", True, "1%"],
            "nats": [0, *NO_NUMBER[2:]],
            "ratio": [0.5, 1, *NO_NUMBER[2:]],
            "relative_error": [0, 3, *NO_SHARE],
            "evaluate": NO_FUNCTION,
            "higher_is_better": NO_FLAG,
            "terms": [0, *NO_NUMBER[2:]],
            "gradients": NO_RECORDER,
            "evaluate_every": NO_COUNT,
            "activations": [3, "seen", MODEL],
            "calibrate": NO_FUNCTION,
            "moments": NO_CHOICE,
            "seed": NO_SEED,
        },
    ),
    "Inshrinkerator": (
        searched(sp.Inshrinkerator),
        {
            **SEARCHED,
            "gradients": NO_RECORDER,
            "paper": NO_FLAG,
            "space": [None, 3, {}],
            "sigma": NO_NUMBER,
            "dither": NO_FLAG,
        },
    ),
    "QD": (searched(sp.QD), SEARCHED),
    "CNR": (searched(sp.CNR), SEARCHED),
    "GOBO": (searched(sp.GOBO), SEARCHED),
    "LCCheckpoint": (
        sp.LCCheckpoint,
        {
            "bits": [9, *NO_COUNT],
            "scope": ["layer", 1],
            "representative": ["median", 1],
            "paper": NO_FLAG,
            "optimizer": NO_CHOICE,
        },
    ),
    "SCAR": (sp.SCAR, {"fraction": [0, *NO_SHARE], "order": NO_CHOICE, "seed": NO_SEED, "optimizer": NO_CHOICE}),
    "TOPN": (sp.TOPN, {"fraction": [0, *NO_SHARE], "optimizer": NO_CHOICE}),
    "ExCP": (
        sp.ExCP,
        {
            "alpha": NO_NUMBER,
            "beta": NO_NUMBER,
            "bits": [1, 9, *NO_COUNT],
            "rule": NO_CHOICE,
            "paper": NO_FLAG,
            "paper_fp16": NO_FLAG,
            "seed": NO_SEED,
        },
    ),
    "Lossless": (sp.Lossless, {"chunk": [None, 1 << 40, *NO_COUNT]}),
    "RecentBatches": (
        lambda **wrong: sp.RecentBatches(**{"loss": len, **wrong}),
        {"loss": [None, *NO_FUNCTION], "batches": NO_COUNT, "max_bytes": NO_COUNT, "accumulate": NO_COUNT},
    ),
    "Activations": (
        lambda **wrong: sp.Activations(**{"model": MODEL, **wrong}),
        {
            "model": [None, MODEL.state_dict(), torch.nn.Linear],
            "every": NO_COUNT,
            "decay": [0, 1.5, *NO_NUMBER],
            "max_inputs": NO_COUNT,
        },
    ),
    "GradientRecorder": (
        lambda **wrong: sp.train.GradientRecorder(**{"model": MODEL, **wrong}),
        {
            "model": [None, MODEL.state_dict(), torch.nn.Linear],
            "save_interval": NO_COUNT,
            "batches": [None, *NO_COUNT],
            "beta": [1, 1.5, *NO_NUMBER],
            "paper": ["yes", 1],
            "squares": NO_FLAG,
        },
    ),
    "Checkpointer": (Checkpointer, {**COMMON, "background": NO_FLAG, "model": [None, 3]}),
    "dcp.Writer": (dcp.Writer, {**COMMON, "step": [-1, "x", True], "note": [None, 3], "chain": [3]}),
    "dcp.Reader": (dcp.Reader, {"threads": NO_COUNT}),
    "dcp.Manager": (
        lambda **wrong: dcp.Manager("never", **wrong),
        {"keep": NO_COUNT, "keyframe_every": NO_COUNT, "threads": NO_COUNT},
    ),
    "comm.parse": (comm.parse, {"text": [None, 3, comm.Uniform, "x9"]}),
    "comm.Link": (
        lambda **wrong: comm.Link(**{"compressor": "q4:64", **wrong}),
        {**SIZES, "compressor": [None, 3, comm.Uniform, len]},
    ),
    "comm.Uniform": (
        lambda **wrong: comm.Uniform(**{"bits": 4, **wrong}),
        {"bits": [9, 4.0, *NO_COUNT], "group": ["rows", 0, -64, True, 1.5], "dither": NO_FLAG},
    ),
    "comm.NormalFloat": (
        lambda **wrong: comm.NormalFloat(**{"bits": 3, **wrong}),
        {"bits": [5, *NO_COUNT], "group": [7, 48, 8192, "row"]},
    ),
    "comm.BlockFloat": (
        lambda **wrong: comm.BlockFloat(**{"bits": 4, **wrong}),
        {"bits": [1, 9, *NO_COUNT], "block": [7, 33, 8192, "x"]},
    ),
    "comm.TopK": (
        lambda **wrong: comm.TopK(**{"share": 0.1, **wrong}),
        {
            "share": [0.0, 1.01, 10, "10%", *NO_NUMBER[2:]],
            "values": ["fp8", 3],
            "per": ["row", 0, -4, True, 1 << 32, 1.5, None],
        },
    ),
    "comm.RandomK": (
        lambda **wrong: comm.RandomK(**{"share": 0.1, **wrong}),
        {"share": [0.0, 10, "10%"], "values": ["int8"], "seed": NO_SEED},
    ),
    "comm.SameIndices": (comm.SameIndices, {"values": ["fp8", 3]}),
    "comm.Hadamard": (
        lambda **wrong: comm.Hadamard(**{"compressor": comm.Uniform(4), **wrong}),
        {
            "compressor": ["q4", None, comm.Uniform],
            "block": [0, 7, 32, "x", True],
            "outlier_threshold": ["x", -1.0, math.inf, math.nan, True],
        },
    ),
    "comm.Cast": (comm.Cast, {"dtype": ["fp8", None, torch.bfloat16, []]}),
    "comm.EF": (
        lambda **wrong: comm.EF(**{"compressor": comm.TopK(0.1), **wrong}),
        {"compressor": ["top10", None, comm.TopK], "decay": [-0.1, 1.1, None, "1%"]},
    ),
    "comm.EF21": (comm.EF21, {"compressor": ["top10", None, comm.TopK]}),
    "comm.EFMixed": (comm.EFMixed, {"compressor": ["top10", None, comm.TopK]}),
    "comm.AQSGD": (
        lambda **wrong: comm.AQSGD(**{"compressor": comm.Uniform(4), **wrong}),
        {"compressor": ["q4", None], "warmup": NO_COUNT_FROM_0, "dtype": ["fp8", None, []], "most_bytes": NO_COUNT},
    ),
    "comm.insert_compression": (
        lambda **wrong: comm.insert_compression(**{"model": MODEL, "after": ["0"], "forward": "q4:64", **wrong}),
        {**SIZES, "model": [None, "gpt"], "after": ["0", None, 3, ["none"]], "micro_batches": NO_COUNT},
    ),
    "comm.compress_ddp": (
        lambda **wrong: comm.compress_ddp(**{"model": MODEL, **wrong}),
        {"model": [None, MODEL]},
    ),
    "comm.compress_fsdp": (
        lambda **wrong: comm.compress_fsdp(**{"root": MODEL, **wrong}),
        {
            "root": [None, 3],
            "min_numel": NO_COUNT_FROM_0,
            "nonfinite": NO_CHOICE,
            "timeout": NO_NUMBER,
        },
    ),
    "comm.compress_tensor_parallel": (
        lambda **wrong: comm.compress_tensor_parallel(**{"plan": {}, **wrong}),
        {
            "plan": [None, 3, "colwise"],
            "min_numel": NO_COUNT_FROM_0,
            "nonfinite": NO_CHOICE,
            "timeout": NO_NUMBER,
        },
    ),
    "comm.CompressedManager": (lambda **wrong: comm.CompressedManager(**wrong), {"manager": [None, 3]}),
    "comm.LocalSteps": (
        lambda **wrong: comm.LocalSteps(**{"model": MODEL, "optimizer": SGD, **wrong}),
        {
            "model": [None, "gpt", torch.nn.Linear],
            "optimizer": [None, [], [3], torch.optim.SGD],
            "every": NO_COUNT,
            "outer": [3, "sgd", comm.OuterSGD],
            "compressor": [3, comm.Uniform],
            "timeout": NO_NUMBER,
        },
    ),
    "comm.LowRank": (comm.LowRank, {"rank": [1025, *NO_COUNT], "compressor": ["q8:64", None, comm.Uniform]}),
    "comm.MomentSteps": (comm.MomentSteps, {"step": [0, 4.1, *NO_NUMBER], "compressor": ["q4:64", None, comm.Uniform]}),
    "comm.OuterSGD": (comm.OuterSGD, {"lr": [0, *NO_NUMBER], "momentum": [-0.1, 1.1, "x", True], "nesterov": NO_FLAG}),
    "comm.compress_pipeline": (
        lambda **wrong: comm.compress_pipeline([], **wrong),
        {**SIZES, "timeout": NO_NUMBER},
    ),
    "comm.recommend": (
        lambda **wrong: comm.recommend(**{"model": MODEL, **wrong}),
        {"model": [None, 3], "candidates": ["q4", 3], "max_error": ["x", -1.0], "seconds": [0, *NO_NUMBER]},
    ),
}


def refused(entry: Entry, name: str, wrong: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        entry(**{name: wrong})
    assert name in str(caught.value) or (name == "text" and "spec" in str(caught.value))
    assert caught.value.expected or caught.value.do
    assert "0x" not in str(caught.value) and len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize("title", TABLE)
def test_wrong_arguments_are_refused_and_named(title):
    entry, names = TABLE[title]
    for name, values in names.items():
        for wrong in values:
            refused(entry, name, wrong)


def test_a_metric_that_python_itself_does_not_print_is_refused():
    with pytest.raises(PolicyError, match="metrics: 'loss': inf; expected a number for each name"):
        validate.as_floats({"loss": 10**5000})


def test_a_loss_that_requires_grad_is_a_metric_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert validate.as_floats({"loss": torch.tensor([0.5], requires_grad=True)}) == {"loss": 0.5}


@pytest.mark.parametrize("name", ["scheme", "threads", "base", "path"])
def test_save_and_load_refuse_before_they_touch_a_disk(name, tmp_path):
    wrong = {"scheme": NO_SCHEME, "threads": NO_COUNT, "base": [3, ""], "path": [3, None, ""]}[name]
    for one in wrong:
        with pytest.raises(PolicyError, match=name):
            sp.save(**{"state": {"a": 1}, "path": tmp_path / "a", name: one})
        if name != "scheme":
            with pytest.raises(PolicyError, match=name):
                sp.load(**{"where": tmp_path / "a", "where" if name == "path" else name: one})
    assert [*tmp_path.iterdir()] == []


def test_a_refused_manager_or_save_leaves_no_directory(tmp_path):
    def save(**given):
        sp.Store(tmp_path / "run").save(1, {"a": 1}, **given)

    for entry, settings in (
        (partial(sp.CheckpointManager, tmp_path / "run"), {**COMMON, "background": NO_FLAG, "keep": [3]}),
        (save, {"scheme": NO_SCHEME, "metrics": NO_METRICS, "keyframe": NO_FLAG}),
    ):
        for name, values in settings.items():
            for wrong in values:
                refused(entry, name, wrong)
    assert not (tmp_path / "run").exists()


# frameworks


def test_settings_of_transformers_are_refused_and_named(tmp_path):
    pytest.importorskip("transformers")
    from shrinkpoint.train.transformers import ShrinkCallback, ShrinkConfig, ShrinkTrainer

    settings = {**COMMON, "background": NO_FLAG}
    for name, values in settings.items():
        for wrong in values:
            if not (name == "scheme" and callable(wrong)):  # `ShrinkConfig` takes what makes a scheme, too
                refused(ShrinkConfig, name, wrong)
            refused(ShrinkCallback, name, wrong)
    for name, values in {"batches": NO_COUNT, "gradients": NO_FLAG, "evaluate": [3, len]}.items():
        for wrong in values:
            refused(ShrinkConfig, name, wrong)
    for wrong in ("fisher", sp.Fisher(), ShrinkConfig, 3):
        refused(lambda **given: ShrinkTrainer(model=None, args=None, **given), "shrink", wrong)


def test_settings_of_lightning_are_refused_and_named():
    pytest.importorskip("lightning")
    from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback, Validation

    for name, values in {**COMMON, "background": NO_FLAG, "model": [None, 3]}.items():
        for wrong in values:
            refused(ShrinkIO, name, wrong)
    for wrong in NO_RECORDER:
        refused(ShrinkIOCallback, "gradients", wrong)
    for name, values in {"batches": NO_COUNT, "key": [None, 3]}.items():
        for wrong in values:
            refused(Validation, name, wrong)


def test_settings_of_accelerate_are_refused_and_named(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from shrinkpoint.train.accelerate import AcceleratorCheckpointer, load_state, record_gradients, save_state

    accelerator = accelerate.Accelerator(cpu=True)
    refused(AcceleratorCheckpointer, "accelerator", None)
    for entry in (
        AcceleratorCheckpointer,
        lambda a, **given: save_state(a, tmp_path / "a", **given),
        lambda a, **given: load_state(a, tmp_path / "a", **given),
    ):
        for name, values in {**COMMON, "background": NO_FLAG}.items():
            for wrong in values:
                refused(lambda entry=entry, **given: entry(accelerator, **given), name, wrong)
    for wrong in NO_COUNT_FROM_0:
        refused(lambda **given: record_gradients(accelerator, **given), "index", wrong)
    assert [*tmp_path.iterdir()] == []


# what type checkers see

PUBLIC = [getattr(sp, name) for name in sp.__all__ if callable(getattr(sp, name))]
PUBLIC += [getattr(comm, name) for name in comm.__all__ if callable(getattr(comm, name))]
PUBLIC += [getattr(dcp, name) for name in dcp.__all__]
EXPECTED_OPEN = {"ShrinkTrainer", "from_pretrained", "load_from_checkpoint"}
"""What hands everything else on to a class of the framework."""


def is_open(entry: Any) -> bool:
    parameters = inspect.signature(entry).parameters.values()
    return any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


def test_every_argument_of_a_public_name_is_explicit():
    packages = ["transformers", "lightning", "accelerate"]
    entries = list(PUBLIC)
    for package in packages:
        pytest.importorskip(package)
        module = importlib.import_module(f"shrinkpoint.train.{package}")
        entries += [getattr(module, name) for name in module.__all__]
    found = {entry.__name__ for entry in entries if is_open(entry) and not issubclass_of_error(entry)}
    assert found == EXPECTED_OPEN


def issubclass_of_error(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, BaseException)


def test_the_table_has_every_public_constructor_that_takes_settings():
    """But for what is only returned, and for classes that are bases."""
    returned = {
        "BitAllocation",
        "MessageContext",
        "CompressorContext",
        "ErrorFeedback",
        "LinkStats",
        "Compressor",
        "CompressionPoints",
        "CompressedPipeline",
        "Identity",
        "save",
        "load",
        "inspect",
        "ShrinkpointError",
    }
    known = {title.rpartition(".")[2] for title in TABLE} | returned
    assert {entry.__name__ for entry in PUBLIC} - known <= {"reset_chains", "latest_valid", "load"}
