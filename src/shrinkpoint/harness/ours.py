"""The schemes of this library as systems: a chain in memory, written by a store and read back by a walk along it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """A scheme that can be asked for by name: how it is made, and whether it needs a quality."""

    make: Make
    searches: bool = False


def _searching(kind: Make, **settings: Any) -> Known:
    return Known(lambda **given: kind(**settings, **given), True)


def _fisher(*, threshold: float, higher_is_better: bool, evaluate: Evaluate) -> Scheme:
    return schemes.Fisher(budget=f"{100 * threshold:g}%", evaluate=evaluate, higher_is_better=higher_is_better)


SYSTEMS: Mapping[str, Known] = {
    "lossless": Known(schemes.Lossless),
    "inshrinkerator": _searching(schemes.Inshrinkerator),
    "inshrinkerator paper": _searching(schemes.Inshrinkerator, paper=True),
    "inshrinkerator, lossy moments": _searching(schemes.Inshrinkerator, optimizer="lossy"),
    "qd": _searching(schemes.QD),
    "cnr": _searching(schemes.CNR),
    "gobo": _searching(schemes.GOBO),
    "fisher": _searching(_fisher),
    "fisher .15": Known(lambda: schemes.Fisher(relative_error=0.15)),
    "fisher .3": Known(lambda: schemes.Fisher(relative_error=0.3)),
    "fisher .6": Known(lambda: schemes.Fisher(relative_error=0.6)),
    "fisher 1": Known(lambda: schemes.Fisher(relative_error=1.0)),
    "fisher .3, exact moments": Known(lambda: schemes.Fisher(relative_error=0.3, moments="exact")),
    "lc 2 bits": Known(lambda: schemes.LCCheckpoint(bits=2)),
    "lc 3 bits": Known(lambda: schemes.LCCheckpoint(bits=3)),
    "lc 2 bits paper": Known(lambda: schemes.LCCheckpoint(bits=2, paper=True)),
    "lc 3 bits paper": Known(lambda: schemes.LCCheckpoint(bits=3, paper=True)),
    "lc 3 bits, lossy moments": Known(lambda: schemes.LCCheckpoint(bits=3, optimizer="lossy")),
    "scar": Known(schemes.SCAR),
    "topn": Known(schemes.TOPN),
    "excp": Known(schemes.ExCP),
    "excp paper": Known(lambda: schemes.ExCP(paper=True)),
    "excp paper fp16": Known(lambda: schemes.ExCP(paper=True, paper_fp16=True)),
    "excp released": Known(lambda: schemes.ExCP(paper=True, rule="released", paper_fp16=True)),
}
"""By the names that the harness prints."""


def system(
    name: str, *, evaluate: Evaluate | None = None, threshold: float = 0.01, higher_is_better: bool = False,
    keyframe_every: int | None = None, threads: int = 1,
) -> Chain:  # fmt: skip
    """The scheme of this name.

    Raises:
        PolicyError: nobody knows it, or it needs a quality and there is none.
    """
    if name not in SYSTEMS:
        raise PolicyError("schemes", found=repr(name), expected=", ".join(SYSTEMS), do="name some of these")
    known = SYSTEMS[name]
    if known.searches and evaluate is None:
        expected = "a function of the state that returns a loss"
        raise PolicyError(name, found="nothing to evaluate", expected=expected, do="pass --evaluate module:function")
    make = known.make
    if known.searches:
        more = {"threshold": threshold, "higher_is_better": higher_is_better}
        return Chain(name, lambda **given: make(**more, **given), True, evaluate, keyframe_every, threads)
    return Chain(name, make, keyframe_every=keyframe_every, threads=threads)
