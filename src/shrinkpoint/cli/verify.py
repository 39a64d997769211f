"""`shrinkpoint verify`: compare every byte with the digests of what was written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import (
    OWN_CHECKPOINT,
    JsonOption,
    Location,
    decode_location,
    open_store,
    parse_location,
    preview,
)
from shrinkpoint.cli.console import ExitCode, print_json, print_line, print_note, show_progress
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.progress import track
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.store.file_place import FilePlace
from shrinkpoint.store.identify import EMPTY_DIRECTORY, is_checkpoint
from shrinkpoint.store.verify import Finding, verify

_PLACE_HELP = "A store, a framework's checkpoint directory or run, or one file."


def command(
    place: Annotated[str, typer.Argument(metavar="STORE|RUN|FILE", help=_PLACE_HELP)],
    deep: Annotated[bool, typer.Option("--deep", help="Also decode everything (slower, needs torch).")] = False,
    json: JsonOption = False,
) -> None:
    """Read every byte and compare digests; exit code 1 if anything is damaged or missing.

    A finding is a warning if the checkpoint still loads, for example when one copy of a base is damaged. Files that a
    killed save left behind are listed as orphans and do not change the exit code.

    The exit code is 3 if there is no checkpoint of shrinkpoint at all.
    """
    location = parse_location(place)
    if location.step is not None:
        raise PolicyError(place, found="one step", expected="a store or a file", do=f"verify all of {location.path}")
    with show_progress(f"reading {location}"):
        findings, checked = _verify_all(location, deep)
    if json:
        rows = [asdict(finding) for finding in findings]
        print_json({"where": str(location), "deep": deep, "checked": checked, "findings": rows})
    else:
        _print(location, checked, findings, deep)
    if not all(map(_is_orphan, findings)):
        raise typer.Exit(ExitCode.FINDINGS)


def _is_orphan(finding: Finding) -> bool:
    return finding.step is None and finding.loads


def _verify_all(location: Location, deep: bool) -> tuple[list[Finding], int]:
    if location.file is not None:
        return _verify_file(location, location.file, deep), 1
    directories = location.directories
    tracked = track(directories, f"reading {location}") if directories else ()
    findings = [finding for directory in tracked for finding in _verify_directory(directory, deep)]
    if location.is_run:
        return findings, len(directories)
    storage, listing = open_store(str(location.path), allow_run=True)
    findings = [*verify(storage, deep=deep), *findings]
    checked = len(listing.visible) + len(directories)
    if weights_only := [step for step, manifest in listing.visible.items() if manifest.weights_only]:
        count = humanize.count(len(weights_only), "checkpoint")
        print_note(f"{count} with weights only: retention has deleted the moments of {preview(weights_only)}")
    identity = location.identify()
    if not checked and not findings and (identity is not None or location.directory is None):
        found, do = ("no checkpoint", "check the URL") if identity is None else (identity.description, identity.do)
        do = "save one first" if found == EMPTY_DIRECTORY else do
        raise NotFoundError(str(location.path), found=found, expected=OWN_CHECKPOINT, do=do)
    return findings, checked


def _verify_directory(directory: Path | ObjectUrl, deep: bool) -> list[Finding]:
    """Verifies a framework's checkpoint: its manifest, every file it needs and, if deep, what these decode to."""
    try:
        manifest = verify_directory(directory, deep=True)
        if deep:
            from shrinkpoint.store.checkpoint_file import build_state
            from shrinkpoint.store.decode import decode_directory

            for rank in range(len(manifest.payloads)):
                build_state(decode_directory(directory, rank), str(directory))
    except ShrinkpointError as error:
        if is_checkpoint(directory):  # else it was deleted meanwhile
            return [replace(_finding_from_error(error), do="restore another checkpoint, and delete this directory")]
    return []


def _verify_file(location: Location, file: FilePlace, deep: bool) -> list[Finding]:
    """Verifies the header of a single file, the digests of its parts and, if deep, what it decodes to."""
    try:
        with closing(file.open()) as source:
            for head in (reader := FileReader(source, str(location.path))).records:
                reader.read(head)
        if deep:
            from shrinkpoint.store.checkpoint_file import build_state

            build_state(decode_location(location), str(location))
    except ShrinkpointError as error:
        return [_finding_from_error(error)]
    return []


def _finding_from_error(error: ShrinkpointError) -> Finding:
    problem = error.found + (f"; expected {error.expected}" if error.expected else "")
    return Finding(None, error.where, problem, error.do)


def _print(location: Location, count: int, findings: Sequence[Finding], deep: bool) -> None:
    for finding in findings:
        word, style = ("warning", "yellow") if finding.loads else ("BROKEN", "bold red")
        if _is_orphan(finding):
            word, style = "orphan", "dim"
        prefix = f"step {finding.step}: " if finding.step is not None else ""
        print_line(f"{word:8}{prefix}{finding.problem}", style)
        for line in (finding.where, finding.do):
            if line and line not in finding.problem:
                print_line(f"{'':8}{line}", "dim")
    if findings:
        print_line("")
    what = humanize.count(1, "file") if location.file is not None else humanize.count(count, "checkpoint")
    print_line(f"{location}: {what} {'decoded' if deep else 'read'}, {_verdict(findings)}", "" if findings else "green")


def _verdict(findings: Sequence[Finding]) -> str:
    counted = [finding for finding in findings if not _is_orphan(finding)]
    if not counted:
        return "every byte is what was written"
    lost = {finding.where if finding.step is None else finding.step for finding in counted if not finding.loads}
    harm = f"{humanize.count(len(lost), 'checkpoint')} lost" if lost else "everything loads"
    return f"{humanize.count(len(counted), 'finding')}, {harm}"
