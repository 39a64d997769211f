"""`shrinkpoint forget`: hide checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say
from shrinkpoint.cli.target import JsonOption, StoreArgument, known_step, open_store, some
from shrinkpoint.store.forget import forget
from shrinkpoint.store.listing import scan


def command(
    store: StoreArgument,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", min=0, help="Which to hide.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Hide checkpoints from every reader; the next `prune --apply` deletes those that nothing stands on.

    All of them or, where one does not exist, none.
    """
    storage, _ = open_store(store)
    with storage.lock():
        listing = scan(storage)
        fresh = [step for step in dict.fromkeys(steps) if known_step(listing, step, store) not in listing.forgotten]
        for step in fresh:
            forget(storage, listing, step)
        left = len(listing.shown.keys() - set(fresh))
    if json:
        emit({"forgotten": fresh, "left": left})
    elif fresh:
        say(f"{store}: forgot {some(fresh)}; {words.count(left, 'checkpoint')} left. `prune --apply` frees the space")
    else:
        say(f"{store}: nothing to do, {some(steps)} already forgotten")
