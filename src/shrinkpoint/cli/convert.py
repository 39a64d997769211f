"""`shrinkpoint convert`: checkpoints that others wrote into ours, and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import HigherIsBetterOption, JsonOption, ThresholdOption, import_function, parse_share
from shrinkpoint.cli.bucket_files import has_objects, local_copy, local_target, show_place, shown_name
from shrinkpoint.cli.console import (
    Column,
    print_json,
    print_line,
    print_loss_warnings,
    print_note,
    print_table,
    show_progress,
)
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.progress import Task, track
from shrinkpoint.storage import LocalStorage, Storage, is_object_url, resolve_storage, what_is_at
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.storage.sizing import SizingStorage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import list_steps

if TYPE_CHECKING:
    from shrinkpoint.convert.discover import CheckpointSeries, SourceCheckpoint
    from shrinkpoint.convert.import_ import ImportRow
    from shrinkpoint.schemes.base import Scheme


class ConvertForm(str, Enum):
    """The forms that `--to` names."""

    SHRINKPOINT = "shrinkpoint"
    ORIGINAL = "original"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


_MAX_LISTED = 3  # Number of files without a checksum that are named
_TO_HELP = "What to write; default: shrinkpoint from a foreign SRC, original from one of shrinkpoint."
_ONLY_HELP = 'Only checkpoints of a run with matching names, such as "*.ckpt"; repeatable.'
_EVALUATE_HELP = "Function that gets a converted state and returns its loss; for schemes that measure."
_OPAQUE_HELP = "Keep files that cannot be read without running code as bytes, however large."
SourceArgument = Annotated[
    Path, typer.Argument(metavar="SRC", help="A file, a directory, a whole run, a store; or a URL of one.")
]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(metavar="DST", help="A store, a .safetensors file, or the place for the original form; or a URL."),
]
FormOption = Annotated[ConvertForm | None, typer.Option("--to", help=_TO_HELP)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Write nothing; print the sizes before and after.")]
OneStepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="Only the checkpoint of this step.")
]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help=_ONLY_HELP)]
SchemeOption = Annotated[
    str, typer.Option("--scheme", metavar="SCHEME", help='How to compress, such as "fisher(relative_error=0.3)".')
]
EvaluateOption = Annotated[str | None, typer.Option("--evaluate", metavar="MODULE:FUNCTION", help=_EVALUATE_HELP)]
KeyframeOption = Annotated[
    int, typer.Option("--keyframe-every", min=1, metavar="N", help="Checkpoints in a chain, its keyframe included.")
]
NoVerifyOption = Annotated[bool, typer.Option("--no-verify", help="Do not decode the result and compare it with SRC.")]
OpaqueOption = Annotated[bool, typer.Option("--opaque", help=_OPAQUE_HELP)]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files at DST that differ.")]


@dataclass(frozen=True)
class _Options:
    """Options of the command line."""

    source: Path
    copy: Path  # what is read: of a URL, its copy on this machine
    out: Path | None  # None for a dry run
    scheme: str
    keyframe_every: int
    verify: bool
    opaque: bool
    force: bool
    json: bool


def command(
    source: SourceArgument,
    out: TargetArgument = None,
    to: FormOption = None,
    dry_run: DryRunOption = False,
    step: OneStepOption = None,
    only: OnlyOption = None,
    scheme: SchemeOption = "lossless",
    evaluate: EvaluateOption = None,
    higher: HigherIsBetterOption = False,
    threshold: ThresholdOption = "1%",
    keyframe_every: KeyframeOption = 20,
    no_verify: NoVerifyOption = False,
    opaque: OpaqueOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Convert torch, safetensors, DCP, Hugging Face, Lightning and Accelerate checkpoints to shrinkpoint, and back.

    A directory of checkpoints becomes one chain, in the order of the steps in their names. No code in a file is run.
    The result is decoded and compared with SRC, bit for bit.
    """
    if out is None and not dry_run:
        raise PolicyError("convert", found="no DST", expected="a place to write to", do="add DST, or --dry-run")
    from shrinkpoint.convert.discover import discover
    from shrinkpoint.schemes.registry import make_scheme

    share, target = parse_share(threshold), None if dry_run else out
    with ExitStack() as stack:
        with show_progress(f"reading {show_place(source)}"):
            copy = stack.enter_context(local_copy(source))
        options = _Options(source, copy, target, scheme, keyframe_every, not no_verify, opaque, force, json)
        series = discover(copy, only=only or [], step=step)
        form = to or (ConvertForm.ORIGINAL if series.checkpoints[0].is_ours else ConvertForm.SHRINKPOINT)
        if target is None and form is not ConvertForm.SHRINKPOINT:
            found, expected = f"--dry-run with --to {form.value}", "a conversion to shrinkpoint"
            raise PolicyError("convert", found=found, expected=expected, do="leave out --dry-run")
        for path in series.ignored_paths:
            name = shown_name(str(path), copy, source)
            print_note(f"{name}: left out: its name has no step, or it is not a checkpoint of this run")
        if target is not None and form is not ConvertForm.SHRINKPOINT:
            _export(series, target, options, form.value)
            return
        function = None if evaluate is None else import_function(evaluate, "--evaluate")
        _import(series, options, make_scheme(scheme, evaluate=function, threshold=share, higher_is_better=higher))


def _import(series: CheckpointSeries, options: _Options, scheme: Scheme) -> None:
    from shrinkpoint.convert.import_ import Importer, import_to_file, verify_import

    checkpoints, out, exact = series.checkpoints, options.out, None
    if out is not None and out.suffix == ".safetensors" and not out.is_dir():
        if len(checkpoints) > 1:
            found, do = f"{len(checkpoints)} checkpoints", "choose a directory as DST, or one checkpoint with --step"
            raise PolicyError(str(out), found=found, expected="one checkpoint for a single file", do=do)
        _check_separate(options.source, out)
        _check_overwrite(out, options)
        with show_progress(f"writing {show_place(out)}"), print_loss_warnings():
            rows = [import_to_file(checkpoints[0], out, scheme, opaque=options.opaque, verify=options.verify)]
        seconds = rows[0].seconds
        if options.verify:
            exact = [scheme.id == "lossless"]
    else:
        storage: Storage = SizingStorage() if out is None else _open_store(options.source, out)
        began, rows = time.perf_counter(), []
        importer = Importer(storage, scheme, options.keyframe_every, force=options.force, opaque=options.opaque)
        with importer, show_progress("converting"), print_loss_warnings():
            for checkpoint in track(checkpoints, "converting"):
                with Task(checkpoint.name):
                    rows.append(importer.import_checkpoint(checkpoint))
        seconds = time.perf_counter() - began
        if out is not None and options.verify:
            with show_progress("comparing what was written with its source"):
                comparisons = verify_import(storage, checkpoints, opaque=options.opaque)
                exact = [is_exact for _, is_exact in track(comparisons, "comparing", len(checkpoints))]
    _print_report(rows, options, seconds, exact)
    for name in dict.fromkeys(name for row in rows for name in row.opaque):
        print_note(f"{name}: kept as bytes, unread: reading it would run code")
    _print_unchecked([row.unchecked for row in rows])


def _export(series: CheckpointSeries, out: Path, options: _Options, form: str) -> None:
    _check_separate(options.source, out)
    used_names: set[str] | None = set() if series.is_run_dir and len(series.checkpoints) > 1 else None
    with local_target(out, force=options.force) as path, show_progress("converting"):
        checkpoints = track(series.checkpoints, "converting")
        rows = [_export_checkpoint(checkpoint, path, options, form, used_names) for checkpoint in checkpoints]
    rows = [{**row, "out": shown_name(row["out"], path, out)} for row in rows]
    if options.json:
        document = {"from": show_place(options.source), "to": show_place(out)}
        print_json({**document, "verified": options.verify, "written": rows})
        return
    for row in rows:
        size = "there already" if row["done"] else humanize.size(row["bytes"])
        print_line(f"{row['out']}: {row['form']}, {size}, from {row['name']}")
        if row["left_out"]:
            values = humanize.count(row["left_out"], "plain value")
            print_note(f"{row['out']}: {values} left out: safetensors holds tensors only (--to torch has all)")
    _print_unchecked([row["unchecked"] for row in rows])
    if options.verify:
        _print_verified(len(rows), options)


def _print_unchecked(names: Iterable[Iterable[str]]) -> None:
    files = [*dict.fromkeys(chain.from_iterable(names))]
    if files:
        more = f" and {len(files) - _MAX_LISTED} more" if files[_MAX_LISTED:] else ""
        listed = ", ".join(files[:_MAX_LISTED]) + more
        print_note(f"no checksum in {listed}: damage from before this conversion cannot be found there")


def _export_checkpoint(
    checkpoint: SourceCheckpoint, out: Path, options: _Options, form: str, used_names: set[str] | None
) -> dict[str, Any]:
    """Writes a checkpoint to `out`, or into it under a name that is not used yet; returns its row of the report."""
    from shrinkpoint.convert import export
    from shrinkpoint.convert.discover import NativeDirectory
    from shrinkpoint.convert.part import safe_join

    with show_progress(checkpoint.name):
        state, unchecked = checkpoint.read_with_unchecked(opaque=options.opaque)
        info = export.target_form(state, form, str(checkpoint.path))
        target, num_omitted = out, 0
        if used_names is not None:
            target = safe_join(out, info["name"] or f"step-{checkpoint.step}", str(checkpoint.path))
            target = target.with_name(export.unique_name(target.name, checkpoint.step, form, used_names))
            used_names.add(target.name.casefold())
        exact = info["form"] == "torch" or (form == "original" and not isinstance(checkpoint, NativeDirectory))

        def difference() -> str:
            return export.describe_written_difference(target, state, info, exact=exact)

        done = False
        if target.exists() and not options.force:
            with suppress(ShrinkpointError, OSError):  # the target is something else altogether
                done = not difference()
        if not done:
            _check_overwrite(target, options)
            num_omitted = export.write_checkpoint(target, state, info)
            if options.verify and (text := difference()):
                raise CorruptError(str(target), found=text, expected=f"what {checkpoint.name} holds", do="report this")
    files = [path for path in (target, *target.rglob("*")) if path.is_file()]
    row = {"step": checkpoint.step, "name": checkpoint.name, "out": str(target), "form": info["form"]}
    row |= {"bytes": sum(path.stat().st_size for path in files), "left_out": num_omitted, "done": done}
    return row | {"unchecked": unchecked}


def _open_store(source: Path, out: Path) -> Storage:
    from shrinkpoint.convert.discover import is_new_store, is_store

    _check_separate(source, out)
    if is_object_url(out):
        storage = resolve_storage(out)
        if not list_steps(storage) and any(layout.step_of(key) is None for key in storage.list()):
            found, do = "a place with other things below it", "choose another name"
            raise PolicyError(storage.describe(), found=found, expected="a store, or a new place", do=do)
        return storage
    if (found := what_is_at(out)) not in ("a directory", "no such file"):
        raise PolicyError(str(out), found=found, expected="the directory of a store", do="choose another name")
    if out.is_dir() and not is_store(out) and not is_new_store(out):
        found = "a directory with other things in it"
        raise PolicyError(str(out), found=found, expected="a store, or a new directory", do="choose another name")
    return LocalStorage(out)


def _check_separate(source: Path, out: Path) -> None:
    if is_object_url(source) != is_object_url(out):
        return
    a, b = (path if is_object_url(path) else path.resolve() for path in (source, out))
    if a == b or a in b.parents or b in a.parents:
        found, do = f"a path that overlaps {show_place(source)}", "choose a path outside of it"
        raise PolicyError(show_place(out), found=found, expected="a separate path", do=do)


def _check_overwrite(out: Path, options: _Options) -> None:
    is_free = not has_objects(parse_object_url(out)) if is_object_url(out) else not out.exists()
    if not is_free and not options.force and (not out.is_dir() or any(out.iterdir())):
        found, do = "a path that exists", "add --force to replace it"
        raise PolicyError(show_place(out), found=found, expected="a new name", do=do)


def _print_report(rows: Sequence[ImportRow], options: _Options, seconds: float, exact: list[bool] | None) -> None:
    """Prints what an import took; `exact` says of each verified checkpoint whether it was compared bit for bit."""
    out = options.out
    raw, before, after = (sum(getattr(row, key) for row in rows) for key in ("raw", "before", "after"))
    if options.json:
        document = {
            "from": show_place(options.source),
            "to": None if out is None else show_place(out),
            "dry_run": out is None,
            "scheme": options.scheme,
            "raw_bytes": raw,
            "before_bytes": before,
            "after_bytes": after,
            "seconds": seconds,
            "verified": None if exact is None else len(exact),
            "exact": None if exact is None else sum(exact),
        }
        print_json({**document, "checkpoints": [asdict(row) for row in rows]})
        return
    kinds = ["there" if row.done else "keyframe" if row.keyframe else "delta" for row in rows]
    cells = [
        (str(row.step), row.name, kind, *_amounts(row.raw, row.before, row.after, row.seconds))
        for row, kind in zip(rows, kinds, strict=True)
    ]
    columns = zip(*cells, ("all", "", "", *_amounts(raw, before, after, seconds)), strict=True)
    titles = ("step", "from", "kind", "tensors", "now", "after", "ratio", "seconds")
    drop_orders = (0, 3, 4, 2, 0, 0, 0, 1)
    print_table(
        [
            Column(title, column, title not in ("from", "kind"), drop_order, wrap=title == "from")
            for title, column, drop_order in zip(titles, columns, drop_orders, strict=True)
        ],
        totals=True,
    )
    gain = f"{before / after:.2f}x smaller" if after else "nothing"
    verb = "would take" if out is None else "takes" if len(rows) == 1 else "take"
    sizes = f"{humanize.size(before)} {verb} {humanize.size(after)}" + ("" if out is None else f" in {show_place(out)}")
    saved = humanize.size(max(0, before - after))
    print_line(f"{humanize.count(len(rows), 'checkpoint')} of {sizes}: {gain}, {saved} saved")
    if exact is not None:
        _print_verified(len(exact), options)
        if not all(exact):
            print_note("of lossy checkpoints everything but the values was compared")


def _amounts(raw: int, before: int, after: int, seconds: float) -> tuple[str, ...]:
    return *map(humanize.size, (raw, before, after)), humanize.ratio(before, after), f"{seconds:.2f}"


def _print_verified(count: int, options: _Options) -> None:
    print_line(
        f"verified: {humanize.count(count, 'checkpoint')} decoded and compared with {show_place(options.source)}"
    )
