"""`shrinkpoint show`: one checkpoint, or one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import (
    JsonOption,
    LocationArgument,
    StepOption,
    find_manifest,
    open_store,
    parse_location,
)
from shrinkpoint.cli.console import Column, paged, print_json, print_line, print_pairs, print_table
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.report.files import FileReport, TensorRow, read_file_report
from shrinkpoint.storage import ObjectUrl, directory_storage, is_object_url
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.save_report import LossIncrease
from shrinkpoint.tensors.info import JSON

_MAX_VALUES = 12


def command(
    place: LocationArgument,
    step: StepOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print one row per tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Print all plain values, not only the first 12.")] = False,
    json: JsonOption = False,
) -> None:
    """Show one checkpoint or file: its chain, bytes by role, plain values."""
    location = parse_location(place, step)
    report: CheckpointReport | None = None
    if location.is_run:
        directory = location.run_directory
        report = CheckpointReport(read_directory_manifest(directory), folder=str(directory))
        files = directory_files(directory, report)
    elif location.file is not None:
        files = [read_file_report(location.file.storage, location.file.key, str(location.path))]
    else:
        storage, listing = open_store(str(location.path))
        manifest = find_manifest(listing, location)
        abandoned, forgotten = (manifest.step in steps for steps in (listing.abandoned, listing.forgotten))
        report = CheckpointReport(manifest, abandoned=abandoned, forgotten=forgotten)
        files = [read_file_report(storage, manifest.key(payload.name)) for payload in manifest.payloads]
    if json:
        documents = [file.to_json(tensors=tensors) for file in files]
        print_json(documents[0] if report is None else {**report.to_json(), "files": documents})
        return
    with paged():
        _print_header(str(location.path), report, files)
        for file in files:
            print_line("")
            if tensors:
                print_table(_tensor_columns(file.tensors))
                print_line("")
            print_table(_role_columns(file), totals=True)
            if file.values:
                print_line("")
                rows = file.values if values else sorted(file.values, key=lambda pair: pair[0].count("/"))[:_MAX_VALUES]
                names, texts = zip(*rows, strict=True)
                print_table([Column("plain value", names, wrap=True), Column("", texts, wrap=True)])
                if len(rows) < len(file.values):
                    print_line(f"and {len(file.values) - len(rows)} more (--values)", "dim")


def directory_files(directory: Path | ObjectUrl, report: CheckpointReport) -> list[FileReport]:
    """Reports the files of a framework's checkpoint."""
    storage = directory_storage(directory)
    payloads = report.manifest.payloads
    return [read_file_report(storage, file.name, str(directory / file.name)) for file in payloads]


def _print_header(place: str, report: CheckpointReport | None, files: Sequence[FileReport]) -> None:
    if report is None:
        file = files[0]
        print_line(place, "bold")
        ratio = humanize.ratio(file.raw_bytes, file.size)
        sizes = f"{humanize.size(file.raw_bytes)} of state in {humanize.size(file.size)} ({ratio})"
        print_pairs([("kind", _parent_text(file)), ("scheme", file.scheme), ("size", sizes), ("digest", file.digest)])
    elif report.folder is None:
        print_line(f"{place}, step {report.manifest.step}", "bold")
        print_pairs(list(_store_rows(report, files[0])))
    else:
        print_line(report.folder, "bold")
        print_pairs(list(_directory_rows(report)))


def _store_rows(report: CheckpointReport, file: FileReport) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    yield "made", _created_text(manifest.created)
    chain = [str(step) for step in report.chain]
    if len(chain) > 8:
        chain[2:-3] = [f"({len(chain) - 5} more)"]
    yield "kind", f"delta; chain {' > '.join(chain)}" if manifest.depth else "keyframe"
    yield from _manifest_rows(report)
    yield "weights only", "retention has deleted the optimizer's moments" if manifest.weights_only else ""
    yield "forgotten", "deleted by the next `prune` unless a checkpoint depends on it" if report.forgotten else ""
    yield "file", file.where
    yield "digest", file.digest
    yield "id", manifest.id


def _directory_rows(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    yield "step", "" if manifest.step is None else str(manifest.step)
    yield "made", _created_text(manifest.created)
    place = "in other directories" if is_object_url(report.folder) else "linked here"
    below = f"delta; {humanize.count(manifest.depth, 'file')} below, {place}"
    yield "kind", below if manifest.depth else "keyframe"
    yield "ranks", str(len(manifest.payloads)) if len(manifest.payloads) > 1 else ""
    yield from _manifest_rows(report)


def _manifest_rows(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    yield "scheme", manifest.scheme
    raw, stored = manifest.raw_bytes, manifest.stored_bytes
    yield "size", f"{humanize.size(raw)} of state in {humanize.size(stored)} ({humanize.ratio(raw, stored)})"
    if manifest.depth:
        yield "with its bases", humanize.size(report.disk_bytes)
    yield "metrics", ", ".join(f"{name} {humanize.number(value)}" for name, value in manifest.metrics.items())
    yield "lost", _loss_settings(manifest.loss)
    increase = LossIncrease.from_loss(manifest.loss)
    budget = manifest.loss.get("budget") if increase.is_lossy and isinstance(manifest.loss, dict) else None
    texts = [str(increase), f"budget {budget}" if isinstance(budget, str) else ""]
    yield "loss", ", ".join(filter(None, texts))
    yield "stayed exact", _unquantized_text(manifest.loss)
    restores = [str(manifest.lossy_restores)] if manifest.lossy_restores else []
    yield "lossy restores", ", ".join([*restores, *filter(None, [increase.restored_text])])
    yield "left behind", "the run has gone back to an older step since" if report.abandoned else ""
    yield "note", manifest.note


def _loss_settings(loss: JSON) -> str:
    """Short text of the settings that a scheme recorded; --json shows all of them."""
    if not loss or not isinstance(loss, dict):
        return "nothing" if loss else ""
    chosen, exact, optimizer = loss.get("chosen"), loss.get("exact"), loss.get("optimizer")
    if not isinstance(chosen, dict):
        return f"nothing: {exact}" if isinstance(exact, str) else "nothing"
    names = (str(name).replace("in_deviations", "in_standard_deviations").replace("_", " ") for name in chosen)
    settings = ", ".join(f"{name} {value}" for name, value in zip(names, chosen.values(), strict=True))
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


def _parent_text(file: FileReport) -> str:
    if not isinstance(file.parent, dict):
        return "keyframe" if file.parent is None else "delta"
    return f"delta on {file.parent.get('name', 'another file')} ({file.parent.get('digest', 'no digest')})"


def _created_text(created: str) -> str:
    age = humanize.age(created)
    return f"{created[:19].replace('T', ' ')} UTC, {'just now' if age == 'now' else f'{age} ago'}"


def _role_columns(file: FileReport) -> list[Column]:
    rows = [(row.role, str(row.tensors), row.raw_bytes, row.stored_bytes) for row in file.roles]
    cells = [
        (role, tensors, humanize.size(raw), humanize.size(stored), humanize.ratio(raw, stored))
        for role, tensors, raw, stored in (*rows, ("all", str(len(file.tensors)), file.raw_bytes, file.size))
    ]
    cells.insert(-1, ("header", "", "", humanize.size(file.overhead_bytes), ""))
    titles = ("role", "tensors", "state", "stored", "ratio")
    columns = zip(titles, zip(*cells, strict=True), strict=True)
    return [Column(title, column, align_right=title != "role") for title, column in columns]


def _tensor_columns(rows: Sequence[TensorRow]) -> list[Column]:
    stored = [("~" if row.shared else "") + humanize.size(row.stored_bytes) for row in rows]
    ratios = [humanize.ratio(row.raw_bytes, row.stored_bytes) for row in rows]
    encodings = [
        "as in base" if row.how == "same" else f"{row.how} on base" if row.needs_base else row.how for row in rows
    ]
    return [
        Column("tensor", [row.name for row in rows], wrap=True),
        Column("dtype", [row.dtype for row in rows], drop_order=2),
        Column("shape", ["x".join(map(str, row.shape)) or "scalar" for row in rows], drop_order=3),
        Column("role", [row.role for row in rows], drop_order=5),
        Column("state", [humanize.size(row.raw_bytes) for row in rows], align_right=True, drop_order=4),
        Column("stored", stored, align_right=True),
        Column("ratio", ratios, align_right=True, drop_order=1),
        Column("how", encodings, drop_order=3),
    ]
