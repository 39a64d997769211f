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
from shrinkpoint.cli.arguments import import_function
from shrinkpoint.cli.console import Column, print_json, print_line, print_note, print_table, spinner
from shrinkpoint.convert import discover, export
from shrinkpoint.convert.discover import CheckpointSeries, SourceCheckpoint
from shrinkpoint.convert.import_ import Importer, ImportRow, SizingStorage, read_flat_with_opaque, verify_import
from shrinkpoint.convert.part import safe_join
from shrinkpoint.errors import CorruptError, LossWarning, PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.registry import make_scheme
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store.checkpoint_file import write_file
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.compare import describe_difference, same_bits
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.tensors.names import as_tensor, is_array, named_leaves


@dataclass(frozen=True)
class ConvertOptions:
    """What the command line asks for.

    Attributes:
        source: the file, directory or store to convert.
        out: where to write; None: a dry run.
        scheme: the text of the scheme.
        evaluate: `module:function` of the quality function; None: there is none.
        threshold: how much worse a checkpoint may be, as a share.
        higher_is_better: the quality function returns a score, not a loss.
        keyframe_every: checkpoints in a chain, its keyframe included.
        verify: decode what was written and compare it with the source.
        opaque: take files that cannot be read without running them as bytes, however large.
        force: replace what is at `out` and differs.
        json: print JSON.
    """

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
        """Makes the scheme that `--scheme` names.

        Raises:
            PolicyError: there is no such scheme, or it searches and there is nothing to evaluate.
        """
        return make_scheme(
            self.scheme,
            evaluate=None if self.evaluate is None else import_function(self.evaluate),
            threshold=self.threshold,
            higher_is_better=self.higher_is_better,
        )


def import_run(series: CheckpointSeries, options: ConvertOptions, *, dry_run: bool) -> None:
    """Converts a series into a store or a single file of ours; a dry run only measures what it would take."""
    _print_ignored(series)
    scheme = options.make_scheme()
    out = None if dry_run else options.out
    if out is not None and out.suffix == ".safetensors" and not out.is_dir():
        _import_to_file(series, out, options, scheme)
        return
    storage: Storage = SizingStorage() if out is None else _open_store(options.source, out)
    began = time.perf_counter()
    rows, verify_counts = _import_all(storage, series.checkpoints, options, scheme), None
    seconds = time.perf_counter() - began
    if out is not None and options.verify:
        verify_counts = _verify_all(storage, series.checkpoints, options)
    _print_report(rows, options, out, seconds, verify_counts)
    _print_opaque(rows)


def export_run(series: CheckpointSeries, out: Path, options: ConvertOptions, form: str) -> None:
    """Writes a series in a form that others read: one checkpoint to `out`, several of a run into it."""
    _print_ignored(series)
    _check_separate(options.source, out)
    used_names: set[str] | None = set() if series.is_run_dir and len(series.checkpoints) > 1 else None
    rows = [_export_checkpoint(checkpoint, out, options, form, used_names) for checkpoint in series.checkpoints]
    if options.json:
        print_json({"from": str(options.source), "to": str(out), "verified": options.verify, "written": rows})
        return
    for row in rows:
        size = "there already" if row["done"] else humanize.size(row["bytes"])
        print_line(f"{row['out']}: {row['form']}, {size}, from {row['name']}")
        if row["left_out"]:
            values = humanize.count(row["left_out"], "plain value")
            print_note(f"{row['out']}: {values} left out: safetensors holds tensors only (--to torch has all)")
    _print_verified(len(rows) if options.verify else None, options)


def _import_all(
    storage: Storage, checkpoints: Sequence[SourceCheckpoint], options: ConvertOptions, scheme: Scheme
) -> list[ImportRow]:
    rows = []
    importer = Importer(
        storage, scheme=scheme, keyframe_every=options.keyframe_every, force=options.force, opaque=options.opaque
    )
    with importer, _print_loss_warnings():
        for number, checkpoint in enumerate(checkpoints, 1):
            with spinner(f"{number}/{len(checkpoints)} {checkpoint.name}"):
                rows.append(importer.import_checkpoint(checkpoint))
    return rows


def _verify_all(storage: Storage, checkpoints: Sequence[SourceCheckpoint], options: ConvertOptions) -> tuple[int, int]:
    """How many checkpoints were decoded and compared, and how many of them bit for bit."""
    with spinner("comparing what was written with its source"):
        exact = [is_exact for _, is_exact in verify_import(storage, checkpoints, opaque=options.opaque)]
    return len(exact), sum(exact)


def _import_to_file(series: CheckpointSeries, out: Path, options: ConvertOptions, scheme: Scheme) -> None:
    if len(series.checkpoints) > 1:
        found, do = f"{len(series.checkpoints)} checkpoints", "name a directory, or choose one with --step"
        raise PolicyError(str(out), found=found, expected="one for a single file", do=do)
    _check_separate(options.source, out)
    _check_overwrite(out, options)
    checkpoint, began = series.checkpoints[0], time.perf_counter()
    state, opaque = read_flat_with_opaque(checkpoint, options.opaque)
    with spinner(f"writing {out}"), _print_loss_warnings():
        written = write_file(
            LocalStorage(out.absolute().parent),
            out.name,
            scheme.quantize(state, None),
            scheme=scheme,
            reference=None,
            parent=None,
        )
    verify_counts = None
    if options.verify:
        decoded, _ = decode_file(out.absolute())
        is_exact = scheme.id == "lossless"
        difference = describe_difference(state, decoded) if is_exact else ""
        if difference:
            raise CorruptError(str(out), found=difference, expected=f"what {checkpoint.name} holds", do="report this")
        verify_counts = (1, int(is_exact))
    row = ImportRow(
        step=checkpoint.step,
        name=checkpoint.name,
        raw=state.nbytes,
        before=checkpoint.nbytes,
        after=written.report.stored_bytes,
        keyframe=True,
        seconds=time.perf_counter() - began,
        opaque=opaque,
    )
    _print_report([row], options, out, row.seconds, verify_counts)
    _print_opaque([row])


def _export_checkpoint(
    checkpoint: SourceCheckpoint, out: Path, options: ConvertOptions, form: str, used_names: set[str] | None
) -> dict[str, Any]:
    """Writes a checkpoint to `out`, or into it under a name that is not used yet; returns its row of the report."""
    with spinner(f"{checkpoint.name}"):
        state = checkpoint.read(opaque=options.opaque)
        info = export.target_form(state, form, str(checkpoint.path))
        target = out
        if used_names is not None:
            target = safe_join(out, info["name"] or f"step-{checkpoint.step}", str(checkpoint.path))
            target = target.with_name(export.unique_name(target.name, checkpoint.step, form, used_names))
            used_names.add(target.name.casefold())
        exact = info["form"] == "torch" or (form == "original" and not isinstance(checkpoint, discover.NativeDirectory))
        done = target.exists() and not options.force and _is_exported(target, state, info, exact)
        left_out = 0
        if not done:
            _check_overwrite(target, options)
            left_out = export.write_checkpoint(target, state, info)
            difference = _describe_difference(target, state, info, exact) if options.verify else ""
            if difference:
                expected = f"what {checkpoint.name} holds"
                raise CorruptError(str(target), found=difference, expected=expected, do="report this")
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "out": str(target),
        "form": info["form"],
        "bytes": sum(path.stat().st_size for path in [target, *target.rglob("*")] if path.is_file()),
        "left_out": left_out,
        "done": done,
    }


def _is_exported(target: Path, state: Any, info: dict[str, Any], exact: bool) -> bool:
    """Whether the target already holds what would be written."""
    try:
        return not _describe_difference(target, state, info, exact)
    except (ShrinkpointError, OSError):  # the target is something else altogether
        return False


def _describe_difference(target: Path, state: Any, info: dict[str, Any], exact: bool) -> str:
    """In what a file or a directory differs from a state; "" where it holds what its form can hold of it.

    Args:
        exact: also compare the types of the containers, and which tensors share memory.
    """
    content, reread = export.content_of(state), export.reread(target, info)
    if exact:
        expected_state, written_state = flatten(content), flatten(reread)
        if expected_state.tree != written_state.tree:
            return "other plain values or another nest"
        expected, written = dict[str, Any](expected_state.tensors), dict[str, Any](written_state.tensors)
    elif info["form"] == "safetensors":
        expected, written = dict[str, Any](export.tensors_of(content)[0]), reread
    else:
        expected, written = named_leaves(content), named_leaves(reread)
    different = (name for name, leaf in expected.items() if not _equal_leaves(leaf, written.get(name)))
    return next((f"{name} is different" for name in different), "")


def _equal_leaves(left: Any, right: Any) -> bool:
    if not is_array(left):
        return repr(left) == repr(right)
    if not is_array(right):
        return False
    return same_bits(as_tensor(left), as_tensor(right))


def _open_store(source: Path, out: Path) -> Storage:
    _check_separate(source, out)
    if out.is_file():
        raise PolicyError(str(out), found="a file", expected="the directory of a store", do="choose another name")
    if out.is_dir() and not discover.is_store(out) and not discover.is_new_store(out):
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
    """Prints every distinct warning of a scheme as a note when the block has ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, LossWarning)):
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
    gain = f"{before / after:.2f} times smaller" if after else "nothing"
    place = "would take" if out is None else f"take, in {out},"
    print_line(
        f"{humanize.count(len(rows), 'checkpoint')} of {humanize.size(before)} {place} {humanize.size(after)}: "
        f"{gain}, {humanize.size(max(0, before - after))} saved"
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
