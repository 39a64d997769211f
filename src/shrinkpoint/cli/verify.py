"""`shrinkpoint verify`: is everything still what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say, waiting
from shrinkpoint.cli.exits import Code
from shrinkpoint.cli.target import JsonOption, PlaceArgument, Target, open_file, open_store, target
from shrinkpoint.container import Reader
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.store.verify import Finding, verify


def command(
    place: PlaceArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Decode everything too (slower, needs torch).")] = False,
    json: JsonOption = False,
) -> None:
    """Read every byte and compare digests; exit code 1 if anything is not as it was written.

    Findings in spite of which the checkpoint loads are warnings: a damaged copy of a base, say. What a killed save left
    behind is told and is no finding.
    """
    where = target(place)
    if where.step is not None:
        raise PolicyError(place, found="one step", expected="a store or a file", do=f"verify all of {where.path}")
    with waiting(f"reading {where}"):
        findings = _file(where, deep) if where.is_file else _store(where, deep)
        checked = 1 if where.is_file else len(open_store(str(where.path))[1].shown)
    if json:
        emit({"where": str(where), "deep": deep, "checked": checked, "findings": [asdict(one) for one in findings]})
    else:
        _print(where, checked, findings, deep)
    if any(not is_litter(one) for one in findings):
        raise typer.Exit(Code.FINDINGS)


def is_litter(one: Finding) -> bool:
    """Files of a save that is going on, or that was killed and the next save sweeps: no checkpoint is touched."""
    return one.step is None and one.loads


def _store(where: Target, deep: bool) -> list[Finding]:
    storage, _ = open_store(str(where.path))
    return verify(storage, deep=deep)


def _file(where: Target, deep: bool) -> list[Finding]:
    """A single file: its header, the digests of its parts and, deep, what it decodes to."""
    try:
        with closing(open_file(where.path)) as source:
            for head in (reader := Reader(source, str(where.path))).records:
                reader.read(head)
        if deep:
            from shrinkpoint.cli.decoded import decode

            decode(where)
    except ShrinkpointError as error:
        problem = error.found + (f"; expected {error.expected}" if error.expected else "")
        return [Finding(None, error.where, problem, error.do)]
    return []


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
    lost = {one.step for one in real if not one.loads}
    harm = f"{words.count(len(lost), 'checkpoint')} lost" if lost else "everything loads"
    return f"{words.count(len(real), 'finding')}, {harm}"
