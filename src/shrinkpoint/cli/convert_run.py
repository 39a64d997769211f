"""Runs the conversions of `shrinkpoint convert` and prints what they did."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.cli import humanize
from shrinkpoint.cli.console import print_json, print_line, print_note, spinner
from shrinkpoint.cli.table import Column, print_table
from shrinkpoint.convert import export, native
from shrinkpoint.convert.discover import CheckpointSeries
from shrinkpoint.convert.dry_run import SizingStorage
from shrinkpoint.convert.import_ import Importer, ImportRow, read_flat_with_opaque, verify_import
from shrinkpoint.convert.part import safe_join
from shrinkpoint.convert.source import SourceCheckpoint
from shrinkpoint.errors import CorruptError, LossWarning, PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store.checkpoint_file import write_file
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.compare import describe_difference, same_bits
from shrinkpoint.tensors.flatten import flatten
from shrinkpoint.tensors.leaves import as_tensor, is_array, named_leaves


@dataclass(frozen=True)
class ConvertOptions:
    """What the command line asks for."""

    source: Path
    out: Path | None
    scheme: str
    evaluate: str | None
    threshold: float
    higher_is_better: bool
    keyframe_every: int
    verify: bool
    opaque: bool
    force: bool
    json: bool

    def make_scheme(self) -> Scheme:
        """The scheme, by the name that `bench` knows it under.

        Raises:
            PolicyError: nobody knows it, or it searches and there is nothing to evaluate.
        """
        from shrinkpoint.bench.measure import import_function as function
        from shrinkpoint.bench.systems import make_system

        evaluate = None if self.evaluate is None else function(self.evaluate)
        chain = make_system(
            self.scheme, evaluate=evaluate, threshold=self.threshold, higher_is_better=self.higher_is_better
        )
        return chain.make(evaluate=evaluate) if chain.needs_evaluation else chain.make()


def import_run(series: CheckpointSeries, options: ConvertOptions, *, dry_run: bool) -> None:
    """Into a store or a file of ours; or only onto the scale."""
    _print_ignored(series)
    scheme = options.make_scheme()
    out = None if dry_run else options.out
    if out is not None and out.suffix == ".safetensors" and not out.is_dir():
        _import_to_file(series, out, options, scheme)
        return
    storage: Storage = SizingStorage() if out is None else _open_store(options.source, out)
    began = time.perf_counter()
    rows, verified = _import_all(storage, series.checkpoints, options, scheme), None
    took = time.perf_counter() - began
    if out is not None and options.verify:
        verified = _verify_all(storage, series.checkpoints, options)
    _print_report(rows, options, out, took, verified)
    _print_opaque(rows)


def export_run(series: CheckpointSeries, out: Path, options: ConvertOptions, form: str) -> None:
    """As others read it: one checkpoint to `out`, several of a run into it."""
    _print_ignored(series)
    _check_separate(options.source, out)
    several = series.is_run_dir and len(series.checkpoints) > 1
    taken_: set[str] = set()
    written = [_export_checkpoint(one, out, options, form, taken_ if several else None) for one in series.checkpoints]
    if options.json:
        print_json({"from": str(options.source), "to": str(out), "verified": options.verify, "written": written})
        return
    for row in written:
        said = "there already" if row["done"] else humanize.size(row["bytes"])
        print_line(f"{row['out']}: {row['form']}, {said}, from {row['name']}")
        if row["left_out"]:
            values = humanize.count(row["left_out"], "plain value")
            print_note(f"{row['out']}: {values} left out: safetensors holds tensors only (--to torch has all)")
    _print_verified(len(written) if options.verify else None, options)


def _import_all(
    storage: Storage, checkpoints: Sequence[SourceCheckpoint], options: ConvertOptions, scheme: Scheme
) -> list[ImportRow]:
    rows = []
    into = Importer(
        storage, scheme=scheme, keyframe_every=options.keyframe_every, force=options.force, opaque=options.opaque
    )
    with into, _print_loss_warnings():
        for number, one in enumerate(checkpoints, 1):
            with spinner(f"{number}/{len(checkpoints)} {one.name}"):
                rows.append(into.import_checkpoint(one))
    return rows


def _verify_all(storage: Storage, checkpoints: Sequence[SourceCheckpoint], options: ConvertOptions) -> tuple[int, int]:
    """How many were decoded and compared, and how many of them bit for bit."""
    done = []
    with spinner("comparing what was written with its source"):
        done += [exact for _, exact in verify_import(storage, checkpoints, opaque=options.opaque)]
    return len(done), sum(done)


def _import_to_file(series: CheckpointSeries, out: Path, options: ConvertOptions, scheme: Scheme) -> None:
    if len(series.checkpoints) > 1:
        found, do = f"{len(series.checkpoints)} checkpoints", "name a directory, or choose one with --step"
        raise PolicyError(str(out), found=found, expected="one for a single file", do=do)
    _check_separate(options.source, out)
    _check_overwrite(out, options)
    one, began = series.checkpoints[0], time.perf_counter()
    flat, opaque = read_flat_with_opaque(one, options.opaque)
    with spinner(f"writing {out}"), _print_loss_warnings():
        written = write_file(
            LocalStorage(out.absolute().parent),
            out.name,
            scheme.quantize(flat, None),
            scheme=scheme,
            reference=None,
            parent=None,
        )
    verified = None
    if options.verify:
        decoded, _ = decode_file(out.absolute())
        exact = scheme.id == "lossless"
        what = describe_difference(flat, decoded) if exact else ""
        if what:
            raise CorruptError(str(out), found=what, expected=f"what {one.name} holds", do="report this")
        verified = (1, int(exact))
    seconds = time.perf_counter() - began
    row = ImportRow(
        one.step, one.name, flat.nbytes, one.nbytes, written.report.stored_bytes, True, seconds, opaque=opaque
    )
    _print_report([row], options, out, seconds, verified)
    _print_opaque([row])


def _export_checkpoint(
    checkpoint: SourceCheckpoint, out: Path, options: ConvertOptions, form: str, used_names: set[str] | None
) -> dict[str, Any]:
    """Write one to `out`, or into it under a name that is not taken yet."""
    with spinner(f"{checkpoint.name}"):
        state = checkpoint.read(opaque=options.opaque)
        said = export.target_form(state, form, str(checkpoint.path))
        target = out
        if used_names is not None:
            target = safe_join(out, said["name"] or f"step-{checkpoint.step}", str(checkpoint.path))
            target = target.with_name(export.unique_name(target.name, checkpoint.step, form, used_names))
            used_names.add(target.name.casefold())
        exact = said["form"] == "torch" or (form == "original" and not isinstance(checkpoint, native.NativeDirectory))
        done = target.exists() and not options.force and _is_exported(target, state, said, exact)
        if not done:
            _check_overwrite(target, options)
            left_out = export.write_checkpoint(target, state, said)
            what = _describe_difference(target, state, said, exact) if options.verify else ""
            if what:
                raise CorruptError(str(target), found=what, expected=f"what {checkpoint.name} holds", do="report this")
    size = sum(path.stat().st_size for path in [target, *target.rglob("*")] if path.is_file())
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "out": str(target),
        "form": said["form"],
        "bytes": size,
        "left_out": 0 if done else left_out,
        "done": done,
    }


def _is_exported(target: Path, state: Any, description: dict[str, Any], exact: bool) -> bool:
    """Whether what is there already is what would be written."""
    try:
        return not _describe_difference(target, state, description, exact)
    except (ShrinkpointError, OSError):  # it is something else altogether
        return False


def _describe_difference(target: Path, state: Any, description: dict[str, Any], exact: bool) -> str:
    """In what a file or a directory differs from a state; "" where it holds what its form can hold of it.

    Args:
        exact: also the kinds of the nests have to be the same, and what shares memory.
    """
    content, found = export.content_of(state), export.reread(target, description)
    if exact:
        flat, other = flatten(content), flatten(found)
        if flat.tree != other.tree:
            return "other plain values or another nest"
        given, there = dict[str, Any](flat.tensors), dict[str, Any](other.tensors)
    elif description["form"] == "safetensors":
        given, there = dict[str, Any](export.tensors_of(content)[0]), found
    else:
        given, there = named_leaves(content), named_leaves(found)
    return next(
        (f"{name} is different" for name, leaf in given.items() if not _equal_leaves(leaf, there.get(name))), ""
    )


def _equal_leaves(a: Any, b: Any) -> bool:
    if not is_array(a):
        return repr(a) == repr(b)
    if not is_array(b):
        return False
    one, other = as_tensor(a), as_tensor(b)
    return one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)


def _open_store(source: Path, out: Path) -> Storage:
    _check_separate(source, out)
    if out.is_file():
        raise PolicyError(str(out), found="a file", expected="the directory of a store", do="choose another name")
    if out.is_dir() and not native.is_store(out) and not native.is_new_store(out):
        found = "a directory with other things in it"
        raise PolicyError(str(out), found=found, expected="a store, or a new directory", do="choose another name")
    return LocalStorage(out)


def _check_separate(source: Path, out: Path) -> None:
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        do = "choose a place outside"
        raise PolicyError(str(out), found=f"a place in, above or at {source}", expected="another one", do=do)


def _check_overwrite(out: Path, options: ConvertOptions) -> None:
    if out.exists() and not options.force and (out.is_file() or any(out.iterdir())):
        raise PolicyError(
            str(out), found="something that exists", expected="a new name", do="add --force to replace it"
        )


@contextmanager
def _print_loss_warnings() -> Iterator[None]:
    """What a scheme warns of becomes a note, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, LossWarning)):
        print_note(text)


def _print_report(
    rows: Sequence[ImportRow],
    options: ConvertOptions,
    out: Path | None,
    seconds: float,
    verify_counts: tuple[int, int] | None,
) -> None:
    raw, before, after = (sum(getattr(row, key) for row in rows) for key in ("raw", "before", "after"))
    if options.json:
        print_json(
            {
                "from": str(options.source),
                "to": None if out is None else str(out),
                "dry_run": out is None,
                "scheme": options.scheme,
                "raw_bytes": raw,
                "before_bytes": before,
                "after_bytes": after,
                "seconds": seconds,
                "verified": None if verify_counts is None else verify_counts[0],
                "exact": None if verify_counts is None else verify_counts[1],
                "checkpoints": [row.to_json() for row in rows],
            }
        )
        return
    print_table(_columns(rows, raw, before, after, seconds), totals=True)
    kept = f"{before / after:.2f} times smaller" if after else "nothing"
    place = "would take" if out is None else f"take, in {out},"
    print_line(
        f"{humanize.count(len(rows), 'checkpoint')} of {humanize.size(before)} {place} {humanize.size(after)}: "
        f"{kept}, {humanize.size(max(0, before - after))} saved"
    )
    _print_verified(verify_counts and verify_counts[0], options)
    if verify_counts and verify_counts[1] < verify_counts[0]:
        print_note("what a lossy scheme wrote was compared but for its values")


def _columns(rows: Sequence[ImportRow], raw: int, before: int, after: int, seconds: float) -> list[Column]:
    times = [f"{row.seconds:.2f}" for row in rows]
    return [
        Column("step", [*(str(row.step) for row in rows), "all"], align_right=True),
        Column("from", [*(row.name for row in rows), ""], drop_order=3, wrap=True),
        Column(
            "kind",
            [*("there" if row.done else "keyframe" if row.keyframe else "delta" for row in rows), ""],
            drop_order=4,
        ),
        Column(
            "tensors", [*(humanize.size(row.raw) for row in rows), humanize.size(raw)], align_right=True, drop_order=2
        ),
        Column("now", [*(humanize.size(row.before) for row in rows), humanize.size(before)], align_right=True),
        Column("after", [*(humanize.size(row.after) for row in rows), humanize.size(after)], align_right=True),
        Column(
            "ratio",
            [*(humanize.ratio(row.before, row.after) for row in rows), humanize.ratio(before, after)],
            align_right=True,
        ),
        Column("seconds", [*times, f"{seconds:.2f}"], align_right=True, drop_order=1),
    ]


def _print_ignored(series: CheckpointSeries) -> None:
    for path in series.ignored_paths:
        print_note(f"{path}: left out, its name says no step or it is no checkpoint of this run")


def _print_opaque(rows: Sequence[ImportRow]) -> None:
    for name in dict.fromkeys(name for row in rows for name in row.opaque):
        print_note(f"{name}: taken along as it is, for it cannot be read without running code that it names")


def _print_verified(count: int | None, options: ConvertOptions) -> None:
    if count is not None and not options.json:
        print_line(f"verified: {humanize.count(count, 'checkpoint')} decoded and compared with {options.source}")
