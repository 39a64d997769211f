"""`shrinkpoint forget`: hide checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, StoreArgument, complete_step, open_store, preview, unknown_step_error
from shrinkpoint.cli.console import print_json, print_line
from shrinkpoint.store.listing import forget, scan

StepsArgument = Annotated[
    list[int], typer.Argument(metavar="STEP...", min=0, help="Steps to hide.", autocompletion=complete_step)
]


def command(store: StoreArgument, steps: StepsArgument, json: JsonOption = False) -> None:
    """Hide checkpoints from every reader; the next `prune --apply` deletes those that no other checkpoint depends on.

    If one of the steps does not exist, none is hidden.
    """
    storage, _ = open_store(store)
    with storage.lock():
        listing = scan(storage)
        unknown = [step for step in steps if step not in listing.manifests and step not in listing.broken]
        if unknown:
            raise unknown_step_error(store, listing, unknown[0])
        forgotten = [step for step in dict.fromkeys(steps) if step not in listing.forgotten]
        for step in forgotten:
            forget(storage, listing, step)
        remaining = len(listing.visible.keys() - set(forgotten))
    if json:
        print_json({"forgotten": forgotten, "left": remaining})
    elif forgotten:
        left = humanize.count(remaining, "checkpoint")
        print_line(f"{store}: forgot {preview(forgotten)}; {left} left. `prune --apply` frees the space")
    else:
        print_line(f"{store}: nothing to do, {preview(steps)} already forgotten")
