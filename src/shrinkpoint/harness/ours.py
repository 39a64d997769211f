"""The schemes of this library as systems: a chain in memory, written by a store and read back by a walk along it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import shrinkpoint.schemes as schemes
from shrinkpoint.errors import PolicyError, UnmeasuredLossWarning
from shrinkpoint.harness.memory import Peak
from shrinkpoint.harness.series import Series
from shrinkpoint.harness.system import Returned
from shrinkpoint.harness.watch import Watch
from shrinkpoint.schemes import Scheme
from shrinkpoint.schemes.target import Evaluate
from shrinkpoint.state import unflatten
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.file import Decoded, SaveReport
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.walk import walk

Make = Callable[..., Scheme]


@dataclass(frozen=True)
class Chain:
    """One scheme.

    Attributes:
        make: called without arguments, or with `evaluate=` where `searches`; once for every run.
        searches: it needs a quality.
        evaluate: of a state; None: such a scheme cannot run.
        keyframe_every: checkpoints between two keyframes; None: only the first is one.
        threads: native threads; with one, speeds are those of a core.
    """

    name: str
    make: Make = field(repr=False)
    searches: bool = False
    evaluate: Evaluate | None = field(default=None, repr=False)
    keyframe_every: int | None = None
    threads: int = 1

    def run(self, series: Series) -> Iterator[Returned]:
        """See `System`. All is written first, since a store holds what it writes the next delta against."""
        watch = Watch(self.evaluate or _unasked)
        scheme = self.make(evaluate=watch) if self.searches else self.make()
        storage = MemoryStorage()
        with Store(storage, keyframe_every=self.keyframe_every, threads=self.threads) as store:
            written = {one.step: self._save(store, scheme, watch, one.step, one.state) for one in series}
            for manifest, decoded, seconds in _read(store, self.threads):
                report, encode, searched, peak = written[manifest.step]
                tensors = decoded.reference.tensors
                yield Returned(
                    step=manifest.step, keyframe=report.keyframe, stored=report.stored_bytes,
                    roles={name: role.stored for name, role in report.roles.items()}, tensors=tensors,
                    state=unflatten(decoded.tree, tensors, where=f"step {manifest.step}"), encode=encode,
                    decode=seconds, searched=searched, peak=peak, retention=report.retention, choice=_choice(report),
                )  # fmt: skip

    def _save(
        self, store: Store, scheme: Scheme, watch: Watch, step: int, state: Any
    ) -> tuple[SaveReport, float, float, int | None]:
        watch.lap()
        peak, began = Peak(), time.perf_counter()
        with warnings.catch_warnings():  # that the scheme does not measure the loss is no news: the harness does
            warnings.simplefilter("ignore", UnmeasuredLossWarning)
            report = store.save(step, state, scheme=scheme)
        took, searched = time.perf_counter() - began, watch.lap()["seconds"]
        return report, took - searched, searched, peak.rise


def _read(store: Store, threads: int) -> Iterator[tuple[Manifest, Decoded, float]]:
    """Every checkpoint from its bytes, along each chain once, with the seconds that its own file took."""
    manifests = {one.id: one for one in store.list()}
    tips = [one for one in manifests.values() if not any(one.id in _below(other) for other in manifests.values())]
    for tip in sorted(tips, key=lambda one: one.step):
        files = walk(store.storage, tip, threads=threads)
        while True:
            began = time.perf_counter()
            found = next(files, None)
            if found is None:
                break
            base, decoded = found
            yield manifests[base.id], decoded, time.perf_counter() - began


def _below(manifest: Manifest) -> set[str]:
    return {base.id for base in manifest.bases}


def _choice(report: SaveReport) -> Any:
    return report.search.get("chosen") if isinstance(report.search, dict) else None


def _unasked(_: Any) -> float:
    raise AssertionError("a scheme that measures nothing asked for a quality")


@dataclass(frozen=True)
class Known:
    """A scheme that can be asked for by its text: how it is made, and whether it needs a quality."""

    make: Make
    searches: bool = False


_DECIDED = ("config", "nats", "ratio", "relative_error")
"""Settings of a scheme that measures, with which it need not: what is lost is decided."""


def known(text: str) -> Known:
    """What a text of `schemes.maker` asks for.

    Raises:
        PolicyError: it is none.
    """
    make = schemes.maker(text)
    measures = isinstance(make.func, type) and issubclass(make.func, schemes.Searched | schemes.Fisher)
    return Known(make, measures and not make.keywords.keys() & {*_DECIDED})


SYSTEMS: Mapping[str, Known] = {
    text: known(text)
    for text in (
        "lossless", "inshrinkerator", "inshrinkerator(paper=True)", 'inshrinkerator(optimizer="lossy")', "qd", "cnr",
        "gobo", "fisher", "fisher(relative_error=.15)", "fisher(relative_error=.3)", "fisher(relative_error=.6)",
        "fisher(relative_error=1)", 'fisher(relative_error=.3, moments="exact")', "lc-checkpoint(bits=2)",
        "lc-checkpoint(bits=3)", "lc-checkpoint(bits=2, paper=True)", "lc-checkpoint(bits=3, paper=True)",
        'lc-checkpoint(bits=3, optimizer="lossy")', "scar", "topn", "excp", "excp(paper=True)",
        "excp(paper=True, paper_fp16=True)", 'excp(paper=True, rule="released", paper_fp16=True)',
    )
}  # fmt: skip
"""What the harness compares where nothing is named, by the texts that it prints."""


def system(
    name: str, *, evaluate: Evaluate | None = None, threshold: float = 0.01, higher_is_better: bool = False,
    keyframe_every: int | None = None, threads: int = 1,
) -> Chain:  # fmt: skip
    """The scheme of this text.

    Args:
        threshold: for a scheme that measures, where its text says none.

    Raises:
        PolicyError: there is no such scheme, or it needs a quality and there is none.
    """
    found = known(name)
    if not found.searches:
        return Chain(name, found.make, keyframe_every=keyframe_every, threads=threads)
    if evaluate is None:
        expected = "a function of the state that returns a loss"
        raise PolicyError(name, found="nothing to evaluate", expected=expected, do="pass --evaluate module:function")
    make = partial(_measured, found.make, threshold=threshold, higher_is_better=higher_is_better)
    make(evaluate=evaluate)  # a wrong setting is refused now
    return Chain(name, make, True, evaluate, keyframe_every, threads)


def _measured(make: Any, *, threshold: float, higher_is_better: bool, evaluate: Evaluate) -> Scheme:
    """The scheme; what its text says comes first."""
    usual: dict[str, Any] = {"threshold": threshold}
    if issubclass(make.func, schemes.Fisher):
        usual = {"budget": f"{100 * threshold:g}%"}
    usual["higher_is_better"] = higher_is_better
    made: Scheme = make.func(**{**usual, **make.keywords}, evaluate=evaluate)
    return made
