"""`shrinkpoint report`: a page about a store, a run or a file, or about two of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, Location, find_manifest, open_store, parse_location
from shrinkpoint.cli.console import print_json, print_line, show_progress
from shrinkpoint.cli.prune import (
    BestOption,
    EveryOption,
    LastOption,
    MetricMode,
    MetricOption,
    ModeOption,
    WithinOption,
    join_reasons,
)
from shrinkpoint.cli.show import directory_files
from shrinkpoint.errors import PolicyError
from shrinkpoint.report.checkpoints import CheckpointReport, run_report, store_report
from shrinkpoint.report.files import read_file_report
from shrinkpoint.report.page import render_page
from shrinkpoint.report.run import RunReport
from shrinkpoint.storage.local import atomic_replace
from shrinkpoint.store.chain import payload_bytes
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.retention import Keep, plan_prune

_MAX_PLACES = 2
_PLACE_HELP = (
    "A store, one of its checkpoints (STORE@STEP), a framework's run or checkpoint, or a file; or two of them."
)


def command(
    places: Annotated[list[str], typer.Argument(metavar="STORE|RUN|FILE...", help=_PLACE_HELP)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the page.")] = Path("shrinkpoint-report.html"),
    last: LastOption = None,
    every: EveryOption = None,
    best: BestOption = None,
    metric: MetricOption = "val_loss",
    mode: ModeOption = MetricMode.MIN,
    within: WithinOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not an earlier page.")] = False,
    json: JsonOption = False,
) -> None:
    """Write an HTML page about a store, run or file, or two: bytes, rise of the loss, save times, chains, tensors.

    The page is one file that needs no network. With rules of `prune` (--keep-last ...) it marks what a prune of the
    store would delete next; without rules, only forgotten checkpoints.
    """
    if len(places) > _MAX_PLACES:
        raise PolicyError("report", found=f"{len(places)} places", expected="one or two", do="write several pages")
    keep = Keep(last=last, every=every, best=best, metric=metric, mode=mode.value, within=within)
    if out.exists() and not force:
        head = b""
        if out.is_file():
            with out.open("rb") as file:
                head = file.read(4096)
        if b": shrinkpoint</title>" not in head:
            do = "add --force to replace it"
            raise PolicyError(str(out), found="a file that exists", expected="a new name", do=do)
    with show_progress(f"writing {out}"):
        names = _short_names(places)
        page = render_page(
            [_read(parse_location(place), name, keep) for place, name in zip(places, names, strict=True)]
        )
        with atomic_replace(out.absolute()) as temporary:
            temporary.write_text(page, "utf-8")
    size = out.stat().st_size
    if json:
        print_json({"out": str(out), "bytes": size})
    else:
        print_line(f"{out}: {humanize.size(size)}; open it in a browser")


def _short_names(places: Sequence[str]) -> list[str]:
    """Name of each place on the page: the last part of its path, or all of it where that says nothing.

    >>> _short_names(["runs/a/store", "runs/b"]), _short_names(["runs/a/store", "runs/b/store"]), _short_names(["."])
    (['store', 'b'], ['runs/a/store', 'runs/b/store'], ['.'])
    """
    names = [Path(place).name for place in places]
    return names if all(names) and len({*names}) == len(names) else [*places]


def _read(location: Location, name: str, keep: Keep) -> RunReport:
    if location.file is not None:
        file = read_file_report(location.file.storage, location.file.key, str(location.path))
        return RunReport(name, None, None, (file,))
    if location.is_run:
        directory = location.run_directory
        shown = CheckpointReport(read_directory_manifest(directory), folder=directory.name)
        return RunReport(name, run_report(location.path), shown, tuple(directory_files(directory, shown)))
    storage, listing = open_store(str(location.path))
    store = store_report(
        storage.describe(),
        listing.manifests.values(),
        forgotten=listing.forgotten,
        broken=[(error.where, error.found) for error in listing.broken.values()],
        stored_bytes=payload_bytes(storage, listing),
    )
    if not listing.manifests:
        return RunReport(name, store, None, ())
    manifest = find_manifest(listing, location)
    files = [read_file_report(storage, manifest.key(payload.name)) for payload in manifest.payloads]
    plan = plan_prune(storage, listing, keep, datetime.now(timezone.utc))
    doomed = {step: join_reasons(plan.reasons[step]) for step in plan.delete}
    return RunReport(name, store, CheckpointReport(manifest), tuple(files), doomed)
