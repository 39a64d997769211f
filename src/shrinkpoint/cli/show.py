"""`shrinkpoint show`: one checkpoint, or one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import humanize
from shrinkpoint.cli.arguments import (
    JsonOption,
    LocationArgument,
    StepOption,
    find_manifest,
    open_file,
    open_store,
    parse_location,
)
from shrinkpoint.cli.console import Column, print_json, print_line, print_pairs, print_table
from shrinkpoint.cli.report import (
    CheckpointReport,
    FileReport,
    TensorRow,
    checkpoint_report,
    directory_report,
    file_report,
)
from shrinkpoint.container import FileReader
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.manifest import LossIncrease
from shrinkpoint.tensors.info import JSON

_MAX_VALUES = 12


def command(
    place: LocationArgument,
    step: StepOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="One row a tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Every plain value of the state.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a checkpoint (of a store, or a framework's) or a file: its chain, what each role costs, its plain values."""
    location = parse_location(place, step)
    if location.is_run:
        _show_directory(location.newest_directory, tensors, values, json)
        return
    if location.is_file:
        with closing(open_file(location.path)) as source:
            report: CheckpointReport | None = None
            files = [file_report(FileReader(source, str(location.path)), str(location.path))]
    else:
        storage, listing = open_store(str(location.path))
        manifest = find_manifest(listing, location)
        report = checkpoint_report(manifest, forgotten=manifest.step in listing.forgotten)
        files = []
        for key in (manifest.key(payload.name) for payload in manifest.payloads):
            with closing(storage.open(key)) as source:
                files.append(file_report(FileReader(source, storage.describe(key)), storage.describe(key)))
    if json:
        print_json(_to_json(report, files, tensors))
        return
    _print_header(str(location.path), report, files[0])
    for file in files:
        _print_file(file, tensors, values)


def _to_json(report: CheckpointReport | None, files: Sequence[FileReport], tensors: bool) -> object:
    if report is None:
        return files[0].to_json(tensors=tensors)
    return {**report.to_json(), "files": [file.to_json(tensors=tensors) for file in files]}


def _print_header(place: str, report: CheckpointReport | None, file: FileReport) -> None:
    if report is None:
        print_line(place, "bold")
        ratio = humanize.ratio(file.raw_bytes, file.size)
        sizes = f"{humanize.size(file.raw_bytes)} of state in {humanize.size(file.size)} ({ratio})"
        print_pairs([("kind", _parent_text(file)), ("scheme", file.scheme), ("size", sizes), ("digest", file.digest)])
    else:
        print_line(f"{place}, step {report.step}", "bold")
        print_pairs(list(_checkpoint_rows(report, file)))


def _show_directory(directory: Path, tensors: bool, values: bool, json: bool) -> None:
    """Prints a framework's checkpoint."""
    report = directory_report(read_directory_manifest(directory), str(directory))
    files = [_file_report_at(directory / name) for name, _, _ in report.files]
    if json:
        print_json({**report.to_json(), "files": [file.to_json(tensors=tensors) for file in files]})
        return
    print_line(str(directory), "bold")
    print_pairs(list(_directory_rows(report)))
    for file in files:
        _print_file(file, tensors, values)


def _file_report_at(path: Path) -> FileReport:
    with closing(open_file(path)) as source:
        return file_report(FileReader(source, str(path)), str(path))


def _directory_rows(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    yield "step", "" if report.step is None else str(report.step)
    yield "made", f"{report.created[:19].replace('T', ' ')} UTC, {_format_age(humanize.age(report.created))}"
    yield (
        "kind",
        "keyframe" if not report.depth else f"delta; {humanize.count(report.depth, 'file')} below, linked here",
    )
    yield "ranks", str(report.ranks) if report.ranks > 1 else ""
    yield from _manifest_rows(report)


def _checkpoint_rows(report: CheckpointReport, file: FileReport) -> Iterator[tuple[str, str]]:
    yield "made", f"{report.created[:19].replace('T', ' ')} UTC, {_format_age(humanize.age(report.created))}"
    yield "kind", _chain_text(report)
    yield from _manifest_rows(report)
    yield "forgotten", "deleted by the next `prune` unless a checkpoint depends on it" if report.forgotten else ""
    yield "file", file.where
    yield "digest", file.digest
    yield "id", report.id


def _manifest_rows(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    """The rows that checkpoints of stores and of frameworks share."""
    yield "scheme", report.scheme
    ratio = humanize.ratio(report.raw_bytes, report.stored_bytes)
    yield "size", f"{humanize.size(report.raw_bytes)} of state in {humanize.size(report.stored_bytes)} ({ratio})"
    yield "metrics", ", ".join(f"{name} {humanize.number(value)}" for name, value in report.metrics.items())
    yield "lost", _loss_settings(report.loss)
    yield "loss", str(LossIncrease.from_loss(report.loss))
    yield "stayed exact", _unquantized_text(report.loss)
    yield "lossy restores", str(report.lossy_restores or "")
    yield "note", report.note


def _loss_settings(loss: JSON) -> str:
    """What a scheme recorded of its loss, in short; --json shows all of it."""
    chosen = loss.get("chosen") if isinstance(loss, dict) else None
    if not isinstance(loss, dict) or not isinstance(chosen, dict):
        return f"nothing{_exact_reason(loss)}" if loss else ""
    settings = ", ".join(f"{str(name).replace('_', ' ')} {value}" for name, value in chosen.items())
    optimizer = loss.get("optimizer")
    return settings + (f"; optimizer {optimizer}" if optimizer in ("reset", "lossy") else "")


def _unquantized_text(loss: JSON) -> str:
    """The tensors that a lossy scheme left unquantized, by reason."""
    reasons = loss.get("stayed_exact") if isinstance(loss, dict) else None
    parts = []
    for reason, counts in reasons.items() if isinstance(reasons, dict) else ():
        if isinstance(counts, dict) and all(_is_count(counts.get(key)) for key in ("tensors", "bytes")):
            parts.append(f"{reason}: {counts['tensors']} ({humanize.size(counts['bytes'])})")
    return "; ".join(parts)


def _is_count(value: JSON) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _exact_reason(loss: JSON) -> str:
    """Why nothing was lost, if the scheme recorded it."""
    exact = loss.get("exact") if isinstance(loss, dict) else None
    return f": {exact}" if isinstance(exact, str) else ""


def _chain_text(report: CheckpointReport) -> str:
    if report.keyframe:
        return "keyframe"
    return f"delta; chain {' > '.join(_shorten(report.chain))}"


def _shorten(steps: Sequence[int]) -> list[str]:
    texts = [str(step) for step in steps]
    return texts if len(texts) <= 8 else [*texts[:2], f"({len(texts) - 5} more)", *texts[-3:]]


def _parent_text(file: FileReport) -> str:
    if not isinstance(file.parent, dict):
        return "keyframe" if file.parent is None else "delta"
    return f"delta on {file.parent.get('name', 'another file')} ({file.parent.get('digest', 'no digest')})"


def _format_age(age: str) -> str:
    return "just now" if age == "now" else f"{age} ago"


def _print_file(file: FileReport, tensors: bool, values: bool) -> None:
    print_line("")
    if tensors:
        print_table(_tensor_columns(file.tensors))
        print_line("")
    print_table(_role_columns(file), totals=True)
    if file.values:
        print_line("")
        rows = file.values if values else sorted(file.values, key=lambda pair: pair[0].count("/"))[:_MAX_VALUES]
        print_table(
            [Column("plain value", [p for p, _ in rows], wrap=True), Column("", [v for _, v in rows], wrap=True)]
        )
        if len(rows) < len(file.values):
            print_line(f"and {len(file.values) - len(rows)} more (--values)", "dim")


def _role_columns(file: FileReport) -> list[Column]:
    roles = file.roles
    tensors = [str(row.tensors) for row in roles]
    raw, stored = [row.raw_bytes for row in roles], [row.stored_bytes for row in roles]
    return [
        Column("role", [*(row.role for row in roles), "header", "all"]),
        Column("tensors", [*tensors, "", str(len(file.tensors))], align_right=True),
        Column("state", [*map(humanize.size, raw), "", humanize.size(file.raw_bytes)], align_right=True),
        Column(
            "stored",
            [*map(humanize.size, stored), humanize.size(file.overhead_bytes), humanize.size(file.size)],
            align_right=True,
        ),
        Column(
            "ratio",
            [*map(humanize.ratio, raw, stored), "", humanize.ratio(file.raw_bytes, file.size)],
            align_right=True,
        ),
    ]


def _tensor_columns(rows: Sequence[TensorRow]) -> list[Column]:
    return [
        Column("tensor", [row.name for row in rows], wrap=True),
        Column("dtype", [row.dtype for row in rows], drop_order=2),
        Column("shape", ["x".join(map(str, row.shape)) or "scalar" for row in rows], drop_order=3),
        Column("role", [row.role for row in rows], drop_order=5),
        Column("state", [humanize.size(row.raw_bytes) for row in rows], align_right=True, drop_order=4),
        Column(
            "stored", [("~" if row.shared else "") + humanize.size(row.stored_bytes) for row in rows], align_right=True
        ),
        Column(
            "ratio", [humanize.ratio(row.raw_bytes, row.stored_bytes) for row in rows], align_right=True, drop_order=1
        ),
        Column("how", [_encoding_text(row) for row in rows], drop_order=3),
    ]


def _encoding_text(row: TensorRow) -> str:
    if row.how == "same":
        return "as in base"
    return f"{row.how} on base" if row.needs_base else row.how
