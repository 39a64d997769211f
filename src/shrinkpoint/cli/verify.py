"""`shrinkpoint verify`: is everything still what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say, waiting
from shrinkpoint.cli.exits import Code
from shrinkpoint.cli.target import JsonOption, PlaceArgument, Target, open_file, open_store, target
from shrinkpoint.container import Reader
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.store.folder import check, found_in
from shrinkpoint.store.identify import EMPTY, identify
from shrinkpoint.store.verify import Finding, verify


def command(
    place: PlaceArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Decode everything too (slower, needs torch).")] = False,
    json: JsonOption = False,
) -> None:
    """Read every byte and compare digests; exit code 1 if anything is not as it was written.

    Where there is no checkpoint of shrinkpoint at all, nothing was verified: exit code 3.

    Findings in spite of which the checkpoint loads are warnings: a damaged copy of a base, say. What a killed save left
    behind is told and is no finding.
    """
    where = target(place)
    if where.step is not None:
        raise PolicyError(place, found="one step", expected="a store or a file", do=f"verify all of {where.path}")
    with waiting(f"reading {where}"):
        findings, checked = _checked(where, deep)
    if json:
        emit({"where": str(where), "deep": deep, "checked": checked, "findings": [asdict(one) for one in findings]})
    else:
        _print(where, checked, findings, deep)
    if any(not is_litter(one) for one in findings):
        raise typer.Exit(Code.FINDINGS)


def is_litter(one: Finding) -> bool:
    """Files of a save that is going on, or that was killed and the next save sweeps: no checkpoint is touched."""
    return one.step is None and one.loads


def _checked(where: Target, deep: bool) -> tuple[list[Finding], int]:
    """What was found, and in how many checkpoints or files."""
    if where.is_file:
        return _file(where, deep), 1
    folders = found_in(where.path)
    findings = [one for folder in folders for one in _folder(folder, deep)]
    if where.is_run:
        return findings, len(folders)
    storage, listing = open_store(str(where.path), run=True)
    findings = [*verify(storage, deep=deep), *findings]
    checked = len(listing.shown) + len(folders)
    known = identify(where.path)
    if not checked and not findings and known is not None:
        do = "save one first" if known.what == EMPTY else known.do
        raise NotFoundError(str(where.path), found=known.what, expected="a checkpoint of shrinkpoint", do=do)
    return findings, checked


def _folder(folder: Path, deep: bool) -> list[Finding]:
    """A framework's checkpoint: its manifest, every file it needs and, deep, what these decode to."""
    try:
        manifest = check(folder, deep=True)
        if deep:
            from shrinkpoint.store.file import grow
            from shrinkpoint.store.unfold import decode

            for rank in range(len(manifest.payloads)):
                grow(decode(folder, rank), str(folder))
    except ShrinkpointError as error:
        return [replace(_finding(error), do="restore another checkpoint, and delete this directory")]
    return []


def _file(where: Target, deep: bool) -> list[Finding]:
    """A single file: its header, the digests of its parts and, deep, what it decodes to."""
    try:
        with closing(open_file(where.path)) as source:
            for head in (reader := Reader(source, str(where.path))).records:
                reader.read(head)
        if deep:
            from shrinkpoint.cli import decoded
            from shrinkpoint.store.file import grow

            grow(decoded.decode(where), str(where))
    except ShrinkpointError as error:
        return [_finding(error)]
    return []


def _finding(error: ShrinkpointError) -> Finding:
    problem = error.found + (f"; expected {error.expected}" if error.expected else "")
    return Finding(None, error.where, problem, error.do)


def _print(where: Target, checked: int, findings: Sequence[Finding], deep: bool) -> None:
    for one in findings:
        word, style = _label(one)
        prefix = f"step {one.step}: " if one.step is not None else ""
        say(f"{word:8}{prefix}{one.problem}", style)
        for line in (one.where, one.do):
            if line and line not in one.problem:
                say(f"{'':8}{line}", "dim")
    if findings:
        say("")
    what = words.count(1, "file") if where.is_file else words.count(checked, "checkpoint")
    say(f"{where}: {what} {'decoded' if deep else 'read'}, {_verdict(findings)}", "" if findings else "green")


def _label(one: Finding) -> tuple[str, str]:
    if is_litter(one):
        return "litter", "dim"
    return ("warning", "yellow") if one.loads else ("BROKEN", "bold red")


def _verdict(findings: Sequence[Finding]) -> str:
    real = [one for one in findings if not is_litter(one)]
    if not real:
        return "every byte is what was written"
    lost = {one.step if one.step is not None else one.where for one in real if not one.loads}
    harm = f"{words.count(len(lost), 'checkpoint')} lost" if lost else "everything loads"
    return f"{words.count(len(real), 'finding')}, {harm}"
