"""What can be measured: systems that turn checkpoints into bytes and back, and the schemes of this library as
systems.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

import shrinkpoint.schemes as schemes
from shrinkpoint.bench.meters import CallTimer, PeakMemory
from shrinkpoint.bench.series import Series
from shrinkpoint.errors import PolicyError, UnmeasuredLossWarning
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import Evaluate
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.chain import store_chain
from shrinkpoint.store.checkpoint_file import DecodedFile, SaveReport
from shrinkpoint.store.decode import iter_chain
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.tensors.flatten import unflatten
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class RoundTrip:
    """One checkpoint, as it came back.

    Attributes:
        step: of the series.
        keyframe: it needs no other checkpoint.
        stored: bytes of all of it.
        roles: bytes by role, where the system tells them apart.
        tensors: by the names that `state.flatten` gives.
        state: the nest, as it was given.
        encode_seconds: seconds, without those spent in the user's evaluation.
        decode_seconds: seconds.
        evaluate_seconds: seconds spent in the user's evaluation.
        peak: bytes by which memory rose at most while it was encoded; None: unknown here.
        retention: of the weights' progress; None: not measured.
        choice: what a search chose.
    """

    step: int
    keyframe: bool
    stored: int
    roles: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(repr=False)
    state: Any = field(repr=False)
    encode_seconds: float
    decode_seconds: float
    evaluate_seconds: float = 0.0
    peak: int | None = None
    retention: float | None = None
    choice: JSON = None


class System(Protocol):
    """A scheme of ours, or a rival."""

    @property
    def name(self) -> str: ...

    def run(self, series: Series) -> Iterator[RoundTrip]:
        """Every checkpoint of a series in its order, each written as the one after the one before it."""
        ...


SchemeFactory = Callable[..., Scheme]


@dataclass(frozen=True)
class StoreSystem:
    """One scheme.

    Attributes:
        make: called without arguments, or with `evaluate=` where `needs_evaluation`; once for every run.
        needs_evaluation: it needs a quality.
        evaluate: of a state; None: such a scheme cannot run.
        keyframe_every: checkpoints between two keyframes; None: only the first is one.
        threads: native threads; with one, speeds are those of a core.
    """

    name: str
    make: SchemeFactory = field(repr=False)
    needs_evaluation: bool = False
    evaluate: Evaluate | None = field(default=None, repr=False)
    keyframe_every: int | None = None
    threads: int = 1

    def run(self, series: Series) -> Iterator[RoundTrip]:
        """See `System`. All is written first, since a store holds what it writes the next delta against."""
        watch = CallTimer(self.evaluate or _never_called)
        scheme = self.make(evaluate=watch) if self.needs_evaluation else self.make()
        storage = MemoryStorage()
        with Store(storage, keyframe_every=self.keyframe_every, threads=self.threads) as store:
            written = {one.step: self._save(store, scheme, watch, one.step, one.state) for one in series}
            for manifest, decoded, seconds in _read_back(store, self.threads):
                report, encode, searched, peak = written[manifest.step]
                tensors = decoded.reference.tensors
                yield RoundTrip(
                    step=manifest.step,
                    keyframe=report.keyframe,
                    stored=report.stored_bytes,
                    roles={name: role.stored for name, role in report.roles.items()},
                    tensors=tensors,
                    state=unflatten(decoded.tree, tensors, where=f"step {manifest.step}"),
                    encode_seconds=encode,
                    decode_seconds=seconds,
                    evaluate_seconds=searched,
                    peak=peak,
                    retention=report.retention,
                    choice=_choice(report),
                )

    def _save(
        self, store: Store, scheme: Scheme, timer: CallTimer, step: int, state: Any
    ) -> tuple[SaveReport, float, float, int | None]:
        timer.lap()
        peak, began = PeakMemory(), time.perf_counter()
        with warnings.catch_warnings():  # that the scheme does not measure the loss is no news: the harness does
            warnings.simplefilter("ignore", UnmeasuredLossWarning)
            report = store.save(step, state, scheme=scheme)
        took, searched = time.perf_counter() - began, timer.lap()["seconds"]
        return report, took - searched, searched, peak.rise


def _read_back(store: Store, threads: int) -> Iterator[tuple[Manifest, DecodedFile, float]]:
    """Every checkpoint from its bytes, along each chain once, with the seconds that its own file took."""
    manifests = {one.id: one for one in store.list()}
    tips = [one for one in manifests.values() if not any(one.id in _base_ids(other) for other in manifests.values())]
    for tip in sorted(tips, key=lambda one: one.step):
        files = iter_chain(store_chain(store.storage, tip), threads=threads)
        while True:
            began = time.perf_counter()
            found = next(files, None)
            if found is None:
                break
            file, decoded = found
            yield manifests[file.id], decoded, time.perf_counter() - began


def _base_ids(manifest: Manifest) -> set[str]:
    return {base.id for base in manifest.bases}


def _choice(report: SaveReport) -> Any:
    return report.loss_report.get("chosen") if isinstance(report.loss_report, dict) else None


def _never_called(_: Any) -> float:
    raise AssertionError("a scheme that measures nothing asked for a quality")


@dataclass(frozen=True)
class SystemSpec:
    """A scheme that can be asked for by its text: how it is made, and whether it needs a quality."""

    make: SchemeFactory
    needs_evaluation: bool = False


_FIXED_LOSS_OPTIONS = ("config", "nats", "ratio", "relative_error")
"""Settings of a scheme that measures, with which it need not: what is lost is decided."""


def system_spec(text: str) -> SystemSpec:
    """What a text of `schemes.maker` asks for.

    Raises:
        PolicyError: it is none.
    """
    make = schemes.scheme_factory(text)
    measures = isinstance(make.func, type) and issubclass(make.func, schemes.SearchScheme | schemes.Fisher)
    return SystemSpec(make, measures and not make.keywords.keys() & {*_FIXED_LOSS_OPTIONS})


SYSTEMS: Mapping[str, SystemSpec] = {
    text: system_spec(text)
    for text in (
        "lossless",
        "inshrinkerator",
        "inshrinkerator(paper=True)",
        'inshrinkerator(optimizer="lossy")',
        "qd",
        "cnr",
        "gobo",
        "fisher",
        "fisher(relative_error=.15)",
        "fisher(relative_error=.3)",
        "fisher(relative_error=.6)",
        "fisher(relative_error=1)",
        'fisher(relative_error=.3, moments="exact")',
        "lc-checkpoint(bits=2)",
        "lc-checkpoint(bits=3)",
        "lc-checkpoint(bits=2, paper=True)",
        "lc-checkpoint(bits=3, paper=True)",
        'lc-checkpoint(bits=3, optimizer="lossy")',
        "scar",
        "topn",
        "excp",
        "excp(paper=True)",
        "excp(paper=True, paper_fp16=True)",
        'excp(paper=True, rule="released", paper_fp16=True)',
    )
}
"""What the harness compares where nothing is named, by the texts that it prints."""


def make_system(
    name: str,
    *,
    evaluate: Evaluate | None = None,
    threshold: float = 0.01,
    higher_is_better: bool = False,
    keyframe_every: int | None = None,
    threads: int = 1,
) -> StoreSystem:
    """The scheme of this text.

    Args:
        threshold: for a scheme that measures, where its text says none.

    Raises:
        PolicyError: there is no such scheme, or it needs a quality and there is none.
    """
    found = system_spec(name)
    if not found.needs_evaluation:
        return StoreSystem(name, found.make, keyframe_every=keyframe_every, threads=threads)
    if evaluate is None:
        expected = "a function of the state that returns a loss"
        raise PolicyError(name, found="nothing to evaluate", expected=expected, do="pass --evaluate module:function")
    make = partial(_make_evaluated_scheme, found.make, threshold=threshold, higher_is_better=higher_is_better)
    make(evaluate=evaluate)  # a wrong setting is refused now
    return StoreSystem(name, make, True, evaluate, keyframe_every, threads)


def _make_evaluated_scheme(make: Any, *, threshold: float, higher_is_better: bool, evaluate: Evaluate) -> Scheme:
    """The scheme; what its text says comes first."""
    usual: dict[str, Any] = {"threshold": threshold}
    if issubclass(make.func, schemes.Fisher):
        usual = {"budget": f"{100 * threshold:g}%"}
    usual["higher_is_better"] = higher_is_better
    made: Scheme = make.func(**{**usual, **make.keywords}, evaluate=evaluate)
    return made
