"""`shrinkpoint forget`: hide checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, StoreArgument, complete_step, open_store, preview, require_step
from shrinkpoint.cli.console import print_json, print_line
from shrinkpoint.store.listing import forget, scan

StepsArgument = Annotated[
    list[int], typer.Argument(metavar="STEP...", min=0, help="Which to hide.", autocompletion=complete_step)
]


def command(store: StoreArgument, steps: StepsArgument, json: JsonOption = False) -> None:
    """Hide checkpoints from every reader; the next `prune --apply` deletes those that no other checkpoint depends on.

    All of them or, where one does not exist, none.
    """
    storage, _ = open_store(store)
    with storage.lock():
        listing = scan(storage)
        forgotten = [
            step for step in dict.fromkeys(steps) if require_step(listing, step, store) not in listing.forgotten
        ]
        for step in forgotten:
            forget(storage, listing, step)
        remaining = len(listing.visible.keys() - set(forgotten))
    if json:
        print_json({"forgotten": forgotten, "left": remaining})
    elif forgotten:
        print_line(
            f"{store}: forgot {preview(forgotten)}; {humanize.count(remaining, 'checkpoint')} left. "
            f"`prune --apply` frees the space"
        )
    else:
        print_line(f"{store}: nothing to do, {preview(steps)} already forgotten")
