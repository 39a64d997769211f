"""`shrinkpoint show`: one checkpoint, or one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say
from shrinkpoint.cli.table import Column, facts, show
from shrinkpoint.cli.target import JsonOption, PlaceArgument, StepOption, checkpoint, open_file, open_store, target
from shrinkpoint.container import Reader
from shrinkpoint.record import JSON
from shrinkpoint.report import (
    CheckpointSummary,
    FileSummary,
    FolderSummary,
    TensorRow,
    checkpoint_summary,
    file_summary,
    folder_summary,
)
from shrinkpoint.store.folder import read_manifest
from shrinkpoint.store.rise import Rise

_VALUES = 12


def command(
    place: PlaceArgument,
    step: StepOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="One row a tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Every plain value of the state.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a checkpoint (of a store, or a framework's) or a file: its chain, what each role costs, its plain values."""
    where = target(place, step)
    if where.is_run:
        _show_folder(where.folder, tensors, values, json)
        return
    if where.is_file:
        with closing(open_file(where.path)) as source:
            summary: CheckpointSummary | None = None
            files = [file_summary(Reader(source, str(where.path)), str(where.path))]
    else:
        storage, listing = open_store(str(where.path))
        manifest = checkpoint(listing, where)
        summary = checkpoint_summary(manifest, forgotten=manifest.step in listing.forgotten)
        files = []
        for key in (manifest.key(one.name) for one in manifest.files):
            with closing(storage.open(key)) as source:
                files.append(file_summary(Reader(source, storage.describe(key)), storage.describe(key)))
    if json:
        emit(_document(summary, files, tensors))
        return
    _head(str(where.path), summary, files[0])
    for file in files:
        _print(file, tensors, values)


def _document(summary: CheckpointSummary | None, files: Sequence[FileSummary], tensors: bool) -> object:
    if summary is None:
        return files[0].to_json(tensors=tensors)
    return {**summary.to_json(), "files": [file.to_json(tensors=tensors) for file in files]}


def _head(place: str, summary: CheckpointSummary | None, file: FileSummary) -> None:
    if summary is None:
        say(place, "bold")
        ratio = words.ratio(file.raw_bytes, file.size)
        sizes = f"{words.size(file.raw_bytes)} of state in {words.size(file.size)} ({ratio})"
        facts([("kind", _parent(file)), ("scheme", file.scheme), ("size", sizes), ("digest", file.digest)])
    else:
        say(f"{place}, step {summary.step}", "bold")
        facts(list(_facts(summary, file)))


def _show_folder(folder: Path, tensors: bool, values: bool, json: bool) -> None:
    """A framework's checkpoint: of a run, its newest."""
    one = folder_summary(read_manifest(folder), str(folder))
    files = [_summary_of(folder / name) for name, _, _ in one.files]
    if json:
        emit({**one.to_json(), "files": [file.to_json(tensors=tensors) for file in files]})
        return
    say(str(folder), "bold")
    facts(list(_folder_facts(one)))
    for file in files:
        _print(file, tensors, values)


def _summary_of(path: Path) -> FileSummary:
    with closing(open_file(path)) as source:
        return file_summary(Reader(source, str(path)), str(path))


def _folder_facts(one: FolderSummary) -> Iterator[tuple[str, str]]:
    yield "step", "" if one.step is None else str(one.step)
    yield "made", f"{one.created[:19].replace('T', ' ')} UTC, {_ago(words.age(one.created))}"
    yield "kind", "keyframe" if not one.depth else f"delta; {words.count(one.depth, 'file')} below, linked here"
    yield "ranks", str(one.ranks) if one.ranks > 1 else ""
    yield from _told(one)


def _facts(summary: CheckpointSummary, file: FileSummary) -> Iterator[tuple[str, str]]:
    yield "made", f"{summary.created[:19].replace('T', ' ')} UTC, {_ago(words.age(summary.created))}"
    yield "kind", _kind(summary)
    yield from _told(summary)
    yield "forgotten", "deleted by the next `prune` unless something stands on it" if summary.forgotten else ""
    yield "file", file.where
    yield "digest", file.digest
    yield "id", summary.id


def _told(one: CheckpointSummary | FolderSummary) -> Iterator[tuple[str, str]]:
    """What every manifest tells, a store's or a folder's."""
    yield "scheme", one.scheme
    ratio = words.ratio(one.raw_bytes, one.stored_bytes)
    yield "size", f"{words.size(one.raw_bytes)} of state in {words.size(one.stored_bytes)} ({ratio})"
    yield "metrics", ", ".join(f"{name} {words.number(value)}" for name, value in one.metrics.items())
    yield "lost", _lost(one.loss)
    yield "loss", str(Rise.of(one.loss))
    yield "stayed exact", _stayed(one.loss)
    yield "lossy restores", str(one.lossy_restores or "")
    yield "note", one.note


def _lost(loss: JSON) -> str:
    """What a scheme says that it lost; whatever else stands there is shown by --json."""
    chosen = loss.get("chosen") if isinstance(loss, dict) else None
    if not isinstance(loss, dict) or not isinstance(chosen, dict):
        return f"nothing{_exact(loss)}" if loss else ""
    settings = ", ".join(f"{str(name).replace('_', ' ')} {value}" for name, value in chosen.items())
    optimizer = loss.get("optimizer")
    return settings + (f"; optimizer {optimizer}" if optimizer in ("reset", "lossy") else "")


def _stayed(loss: JSON) -> str:
    """What a lossy scheme left as it was, by reason."""
    found = loss.get("stayed_exact") if isinstance(loss, dict) else None
    parts = []
    for reason, one in found.items() if isinstance(found, dict) else ():
        if isinstance(one, dict) and all(_is_count(one.get(key)) for key in ("tensors", "bytes")):
            parts.append(f"{reason}: {one['tensors']} ({words.size(one['bytes'])})")
    return "; ".join(parts)


def _is_count(value: JSON) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _exact(loss: JSON) -> str:
    """Why nothing was lost, where a scheme says it."""
    exact = loss.get("exact") if isinstance(loss, dict) else None
    return f": {exact}" if isinstance(exact, str) else ""


def _kind(summary: CheckpointSummary) -> str:
    if summary.keyframe:
        return "keyframe"
    return f"delta; chain {' > '.join(_short(summary.chain))}"


def _short(steps: Sequence[int]) -> list[str]:
    texts = [str(step) for step in steps]
    return texts if len(texts) <= 8 else [*texts[:2], f"({len(texts) - 5} more)", *texts[-3:]]


def _parent(file: FileSummary) -> str:
    if not isinstance(file.parent, dict):
        return "keyframe" if file.parent is None else "delta"
    return f"delta on {file.parent.get('name', 'another file')} ({file.parent.get('digest', 'no digest')})"


def _ago(age: str) -> str:
    return "just now" if age == "now" else f"{age} ago"


def _print(file: FileSummary, tensors: bool, values: bool) -> None:
    say("")
    if tensors:
        show(_tensor_columns(file.tensors))
        say("")
    show(_role_columns(file), totals=True)
    if file.values:
        say("")
        shown = file.values if values else sorted(file.values, key=lambda pair: pair[0].count("/"))[:_VALUES]
        show([Column("plain value", [p for p, _ in shown], wrap=True), Column("", [v for _, v in shown], wrap=True)])
        if len(shown) < len(file.values):
            say(f"and {len(file.values) - len(shown)} more (--values)", "dim")


def _role_columns(file: FileSummary) -> list[Column]:
    roles = file.roles
    tensors = [str(row.tensors) for row in roles]
    raw, stored = [row.raw_bytes for row in roles], [row.stored_bytes for row in roles]
    return [
        Column("role", [*(row.role for row in roles), "header", "all"]),
        Column("tensors", [*tensors, "", str(len(file.tensors))], right=True),
        Column("state", [*map(words.size, raw), "", words.size(file.raw_bytes)], right=True),
        Column(
            "stored", [*map(words.size, stored), words.size(file.overhead_bytes), words.size(file.size)], right=True
        ),
        Column("ratio", [*map(words.ratio, raw, stored), "", words.ratio(file.raw_bytes, file.size)], right=True),
    ]


def _tensor_columns(rows: Sequence[TensorRow]) -> list[Column]:
    return [
        Column("tensor", [row.name for row in rows], wrap=True),
        Column("dtype", [row.dtype for row in rows], rank=2),
        Column("shape", ["x".join(map(str, row.shape)) or "scalar" for row in rows], rank=3),
        Column("role", [row.role for row in rows], rank=5),
        Column("state", [words.size(row.raw_bytes) for row in rows], right=True, rank=4),
        Column("stored", [("~" if row.shared else "") + words.size(row.stored_bytes) for row in rows], right=True),
        Column("ratio", [words.ratio(row.raw_bytes, row.stored_bytes) for row in rows], right=True, rank=1),
        Column("how", [_how(row) for row in rows], rank=3),
    ]


def _how(row: TensorRow) -> str:
    if row.how == "same":
        return "as in base"
    return f"{row.how} on base" if row.needs_base else row.how
