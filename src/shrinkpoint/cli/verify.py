"""`shrinkpoint verify`: is everything still what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import humanize
from shrinkpoint.cli.console import print_json, print_line, spinner
from shrinkpoint.cli.exit_codes import ExitCode
from shrinkpoint.cli.location import Location, LocationArgument, open_file, open_store, parse_location
from shrinkpoint.cli.options import JsonOption
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.store.directory import find_checkpoints, verify_directory
from shrinkpoint.store.identify import EMPTY_DIRECTORY, identify
from shrinkpoint.store.verify import Finding, verify


def command(
    place: LocationArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Decode everything too (slower, needs torch).")] = False,
    json: JsonOption = False,
) -> None:
    """Read every byte and compare digests; exit code 1 if anything is not as it was written.

    Where there is no checkpoint of shrinkpoint at all, nothing was verified: exit code 3.

    Findings in spite of which the checkpoint loads are warnings: a damaged copy of a base, say. What a killed save left
    behind is told and is no finding.
    """
    where = parse_location(place)
    if where.step is not None:
        raise PolicyError(place, found="one step", expected="a store or a file", do=f"verify all of {where.path}")
    with spinner(f"reading {where}"):
        findings, checked = _verify_all(where, deep)
    if json:
        print_json(
            {"where": str(where), "deep": deep, "checked": checked, "findings": [asdict(one) for one in findings]}
        )
    else:
        _print(where, checked, findings, deep)
    if any(not is_orphan(one) for one in findings):
        raise typer.Exit(ExitCode.FINDINGS)


def is_orphan(finding: Finding) -> bool:
    """Files of a save that is going on, or that was killed and the next save sweeps: no checkpoint is touched."""
    return finding.step is None and finding.loads


def _verify_all(location: Location, deep: bool) -> tuple[list[Finding], int]:
    """What was found, and in how many checkpoints or files."""
    if location.is_file:
        return _verify_file(location, deep), 1
    folders = find_checkpoints(location.path)
    findings = [one for folder in folders for one in _verify_directory(folder, deep)]
    if location.is_run:
        return findings, len(folders)
    storage, listing = open_store(str(location.path), allow_run=True)
    findings = [*verify(storage, deep=deep), *findings]
    checked = len(listing.visible) + len(folders)
    known = identify(location.path)
    if not checked and not findings and known is not None:
        do = "save one first" if known.description == EMPTY_DIRECTORY else known.do
        raise NotFoundError(str(location.path), found=known.description, expected="a checkpoint of shrinkpoint", do=do)
    return findings, checked


def _verify_directory(directory: Path, deep: bool) -> list[Finding]:
    """A framework's checkpoint: its manifest, every file it needs and, deep, what these decode to."""
    try:
        manifest = verify_directory(directory, deep=True)
        if deep:
            from shrinkpoint.store.checkpoint_file import build_state
            from shrinkpoint.store.decode import decode_directory

            for rank in range(len(manifest.payloads)):
                build_state(decode_directory(directory, rank), str(directory))
    except ShrinkpointError as error:
        return [replace(_finding_from_error(error), do="restore another checkpoint, and delete this directory")]
    return []


def _verify_file(location: Location, deep: bool) -> list[Finding]:
    """A single file: its header, the digests of its parts and, deep, what it decodes to."""
    try:
        with closing(open_file(location.path)) as source:
            for head in (reader := FileReader(source, str(location.path))).records:
                reader.read(head)
        if deep:
            from shrinkpoint.cli import load_state
            from shrinkpoint.store.checkpoint_file import build_state

            build_state(load_state.decode_location(location), str(location))
    except ShrinkpointError as error:
        return [_finding_from_error(error)]
    return []


def _finding_from_error(error: ShrinkpointError) -> Finding:
    problem = error.found + (f"; expected {error.expected}" if error.expected else "")
    return Finding(None, error.where, problem, error.do)


def _print(location: Location, count: int, findings: Sequence[Finding], deep: bool) -> None:
    for one in findings:
        word, style = _label(one)
        prefix = f"step {one.step}: " if one.step is not None else ""
        print_line(f"{word:8}{prefix}{one.problem}", style)
        for line in (one.where, one.do):
            if line and line not in one.problem:
                print_line(f"{'':8}{line}", "dim")
    if findings:
        print_line("")
    what = humanize.count(1, "file") if location.is_file else humanize.count(count, "checkpoint")
    print_line(f"{location}: {what} {'decoded' if deep else 'read'}, {_verdict(findings)}", "" if findings else "green")


def _label(finding: Finding) -> tuple[str, str]:
    if is_orphan(finding):
        return "litter", "dim"
    return ("warning", "yellow") if finding.loads else ("BROKEN", "bold red")


def _verdict(findings: Sequence[Finding]) -> str:
    real = [one for one in findings if not is_orphan(one)]
    if not real:
        return "every byte is what was written"
    lost = {one.step if one.step is not None else one.where for one in real if not one.loads}
    harm = f"{humanize.count(len(lost), 'checkpoint')} lost" if lost else "everything loads"
    return f"{humanize.count(len(real), 'finding')}, {harm}"
