"""Who is compared in `rate_distortion.py`: schemes of this library, and rivals, each with its settings, on a recorded
chain."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison_methods import Moonclip
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint_lab.bench.series import SeriesEntry
from shrinkpoint_lab.bench.systems import StoreSystem

HERE = Path(__file__).resolve().parent
WORKER = HERE / "rate_distortion_rivals.py"
MOMENTS = ("moment1", "moment2")
Evaluate = Callable[[Any], float]


@dataclass(frozen=True)
class Chain:
    """Checkpoints of one training.

    Attributes:
        entries: step and state: model and optimizer.
        evaluate: the quality of a nested state.
        scored: the quality is a score, not a loss.
    """

    entries: Sequence[SeriesEntry]
    evaluate: Evaluate = field(repr=False)
    scored: bool

    @property
    def name(self) -> str:
        return "chain"

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[SeriesEntry]:
        return iter(self.entries)


@dataclass(frozen=True)
class Coded:
    """One checkpoint as a method wrote it.

    Attributes:
        weight_bytes: of the weights, and all that is not an optimizer's: headers, digests, buffers.
        state_bytes: of the whole state; None where the method has no notion of moments.
        weights: decoded, by their names in the model.
        encode, evaluate, decode: seconds; `encode` without `evaluate`.
        buffer_bytes: of `weight_bytes`, those of a model's buffers; None: a method does not tell.
    """

    keyframe: bool
    weight_bytes: int
    state_bytes: int | None
    weights: Mapping[str, Tensor] = field(repr=False)
    encode: float
    decode: float
    evaluate: float = 0.0
    buffer_bytes: int | None = None


def model_weights(state: Any) -> dict[str, Tensor]:
    """The floating-point tensors of a state's model; tied ones once, under the name that `flatten` gives them."""
    tensors = flatten({"model": state["model"]}).tensors
    return {name.removeprefix("model/"): x for name, x in tensors.items() if x.is_floating_point()}


@dataclass(frozen=True)
class Scheme:
    """A scheme of ours, or a published one as we have it.

    Attributes:
        make: the scheme, from the quality function and from whether that is a score.
        alone: the state has weights only.
    """

    make: Callable[[Evaluate, bool], Any]
    alone: bool = False

    def run(self, chain: Chain) -> Iterator[Coded]:
        system = StoreSystem("scheme", lambda quality: self.make(quality, chain.scored), chain.evaluate)
        entries = chain.entries
        if self.alone:
            entries = [SeriesEntry(one.step, {"model": one.state["model"]}) for one in entries]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what schemes say of single checkpoints is what is measured
            for one in system.run(Chain(entries, chain.evaluate, chain.scored)):
                moments = sum(size for role, size in one.roles.items() if role in MOMENTS)
                yield Coded(
                    one.keyframe,
                    one.stored - moments,
                    None if self.alone else one.stored,
                    model_weights(one.state),
                    one.encode_seconds,
                    one.decode_seconds,
                    one.evaluate_seconds,
                    one.roles.get("buffer", 0),
                )


@dataclass(frozen=True)
class Package:
    """A rival of `rate_distortion_rivals.py`, in a process of another Python.

    Attributes:
        rival: its name there.
        settings: of its class there.
        every: of the checkpoints, only each so-manieth (a slow one that has no deltas).
    """

    rival: str
    settings: Mapping[str, Any]
    every: int = 1

    def run(self, chain: Chain) -> Iterator[Coded | None]:
        weights = [model_weights(one.state) for one in chain.entries]
        chosen, names = range(0, len(weights), self.every), list(weights[0])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for number, step in enumerate(chosen):
                arrays = {f"x{n}": weights[step][name].float().numpy() for n, name in enumerate(names)}
                np.savez(folder / f"{number}.npz", **arrays)
            job = {"rival": self.rival, "settings": dict(self.settings), "names": names, "checkpoints": len(chosen)}
            (folder / "job.json").write_text(json.dumps(job))
            rows = worker(folder)
            for place in range(len(weights)):
                if place not in chosen:
                    yield None
                    continue
                number = chosen.index(place)
                with np.load(folder / f"decoded-{number}.npz") as file:
                    decoded = {name: torch.from_numpy(file[f"x{n}"]) for n, name in enumerate(names)}
                row = rows[number]
                yield Coded(number == 0, row["bytes"], None, decoded, row["encode"], row["decode"])


def worker(folder: Path) -> list[dict[str, Any]]:
    """What `rate_distortion_rivals.py` prints; raises `RuntimeError` with its last line if it fails."""
    python = os.environ.get("SHRINKPOINT_RIVALS") or str(HERE.parent / ".venv" / "rivals" / "bin" / "python")
    if not Path(python).exists():
        raise RuntimeError(f"{python} is not there: make rivals")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([python, str(WORKER), str(folder)], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError((run.stderr.strip().splitlines() or ["?"])[-1])
    return [json.loads(line) for line in run.stdout.splitlines()]


@dataclass(frozen=True)
class MoonclipChain:
    """moonclip, of whole states and of weights; its files are counted.

    Attributes:
        save_dtype: None: without loss.
    """

    save_dtype: str | None = None

    def run(self, chain: Chain) -> Iterator[Coded]:
        settings = {} if self.save_dtype is None else {"save_dtype": self.save_dtype}
        kind = type("Chosen", (Moonclip,), {"settings": settings})
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            whole, alone = (kind(Path(folder), 1, chain.evaluate) for folder in (one, other))
            written = []
            for entry in chain.entries:
                weights = {"model": entry.state["model"]}
                alone_bytes, _ = _added(alone, Path(other), entry.step, weights)
                state_bytes, seconds = _added(whole, Path(one), entry.step, entry.state)
                written.append((alone_bytes, state_bytes, seconds))
            for number, (entry, (alone_bytes, state_bytes, seconds)) in enumerate(
                zip(chain.entries, written, strict=True)
            ):
                began = time.perf_counter()
                state = whole.load(entry.step, {})
                decode = time.perf_counter() - began
                yield Coded(number == 0, alone_bytes, state_bytes, model_weights(state), seconds, decode)


def _added(method: Moonclip, folder: Path, step: int, state: Any) -> tuple[int, float]:
    """Bytes by which the folder grew, and seconds."""
    given, before = method.input(state, flatten(state)), _size(folder)
    began = time.perf_counter()
    method.save(step, given)
    return _size(folder) - before, time.perf_counter() - began


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Method:
    """One setting of a rival.

    Attributes:
        rival: whose curve it is on; "others" of a rival are no curve.
        setting: what was asked for; "default" where nothing was.
        kind: how it is run.
        seeds: on how many of the seeds: one, where more would take long and say little.
        quick: it needs no other package, and runs in a toy.
    """

    rival: str
    setting: str
    kind: Scheme | Package | MoonclipChain
    seeds: int = 9
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.rival}, {self.setting}"


def _fisher() -> list[Method]:
    def asked(**settings: Any) -> Scheme:
        def make(evaluate: Evaluate, scored: bool) -> Any:
            quality = {"evaluate": evaluate, "higher_is_better": scored} if "budget" in settings else {}
            return sp.Fisher(**settings, **quality)

        return Scheme(make)

    def probed(error: float) -> Scheme:
        def make(evaluate: Evaluate, scored: bool) -> Any:
            return sp.Fisher(relative_error=error, evaluate=evaluate, higher_is_better=scored)

        return Scheme(make, alone=True)

    errors = (0.05, 0.1, 0.2, 0.3, 0.34, 0.45, 0.6, 0.8, 1.1)
    found = [Method("fisher", f"error {x}", asked(relative_error=x), quick=x == 0.3) for x in errors]
    found += [Method("fisher", f"budget {x}", asked(budget=x)) for x in ("0.1%", "1%")]
    return found + [Method("fisher, weights alone", f"error {x}", probed(x), seeds=1) for x in (0.15, 0.3, 0.6)]


def _searched() -> list[Method]:
    def asked(kind: Any, threshold: float, **settings: Any) -> Scheme:
        def make(evaluate: Evaluate, scored: bool) -> Any:
            return kind(threshold=threshold, evaluate=evaluate, higher_is_better=scored, **settings)

        return Scheme(make)

    found = []
    for rival, kind in (("Inshrinkerator", sp.Inshrinkerator), ("QD+", sp.QD)):
        for threshold in (0.001, 0.01, 0.05):
            seeds = 9 if threshold == 0.01 else 1
            found.append(Method(rival, f"{100 * threshold:g} %", asked(kind, threshold), seeds))
    paper = asked(sp.Inshrinkerator, 0.01, paper=True)
    return [*found, Method("Inshrinkerator, coder of the paper", "1 %", paper, 1)]


def _published() -> list[Method]:
    def asked(kind: Any, **settings: Any) -> Scheme:
        return Scheme(lambda *_: kind(**settings))

    found = []
    for bits in (2, 3, 4):
        found.append(Method("LC-Checkpoint", f"{bits} bits", asked(sp.LCCheckpoint, bits=bits), quick=bits == 3))
        paper = asked(sp.LCCheckpoint, bits=bits, paper=True)
        found.append(Method("LC-Checkpoint, as in the paper", f"{bits} bits", paper, 1))
    released = asked(sp.ExCP, paper=True, rule="released", paper_fp16=True)
    found.append(Method("ExCP, as released", "default", released, quick=True))
    for alpha, bits in ((5e-5, 4), (5e-6, 4), (0.0, 3), (0.0, 4), (0.0, 6)):
        setting = asked(sp.ExCP, alpha=alpha, bits=bits)
        found.append(Method("ExCP", f"alpha {alpha:g}, {bits} bits", setting, 9 if alpha or bits == 4 else 1))
    return [*found, Method("lossless", "default", Scheme(lambda *_: sp.schemes.Lossless()), quick=True)]


def _packages() -> list[Method]:
    def nncodec(family: str, setting: str, seeds: int = 1, **settings: Any) -> Method:
        return Method(f"NNCodec{family}", setting, Package("nncodec", settings), seeds)

    contexts: dict[str, Any] = {"tca": True, "hdsp": True}
    one = {"qp": -24, "key_qp": -30, "nonweight_qp": -40}
    found = [
        nncodec("", f"qp {qp}", 9, qp=qp, key_qp=min(qp, -30), nonweight_qp=qp - 16, **contexts)
        for qp in (-36, -32, -28, -26, -24, -22, -20, -16)
    ]
    found += [nncodec(", no differences", f"qp {qp}", qp=qp, differences=False) for qp in (-40, -32, -24)]
    found += [
        nncodec(", others", "qp -24, vectors and keyframe as by default", qp=-24),
        nncodec(", others", "qp -24, no contexts", **one),
        nncodec(", others", "qp -24, tca", tca=True, **one),
        nncodec(", others", "qp -24, hdsp", hdsp=True, **one),
        nncodec(", others", "qp -24, contexts, opt_qp", opt_qp=True, **contexts, **one),
        nncodec(", others", "qp -24, contexts, lambda 1", lambda_scale=1, **contexts, **one),
        nncodec(", others", "qp -24, contexts, no dependent quantization", use_dq=False, **contexts, **one),
    ]
    for bits in (2.0, 3.0, 4.0, 5.0):
        found.append(Method("EntroPack", f"{bits:g} bits", Package("entropack", {"bits": bits}, every=3), 1))
    refined = {"bits": 3.0, "row_rdo_iterations": 2}
    found.append(Method("EntroPack, others", "3 bits, rows refined", Package("entropack", refined, every=3), 1))
    for bits in (0.3, 1.0):
        settings = {"bits": bits, "key_bits": 4.0, "residuals": True}
        found.append(Method("EntroPack of residuals", f"{bits:g} bits", Package("entropack", settings), 1))
    for setting, settings in (
        ("int4", {"strategy": "int4"}),
        ("int4, 5 % outliers", {"strategy": "int4", "outlier_fraction": 0.05}),
        ("sparse", {"strategy": "sparse"}),
        ("one bit", {"strategy": "quantized"}),
    ):
        family = "deltatensors" if setting.startswith("int4") else "deltatensors, others"
        found.append(Method(family, setting, Package("deltatensors", settings), 9 if setting == "int4" else 1))
    return found


def methods() -> list[Method]:
    """All that are compared."""
    casts = [Method("moonclip", f"{dtype or 'default'}", MoonclipChain(dtype)) for dtype in (None, "bf16")]
    return [*_fisher(), *_published(), *_searched(), *_packages(), *casts]
