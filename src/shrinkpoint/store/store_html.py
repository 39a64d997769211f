"""HTML of a store for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from shrinkpoint import html, humanize
from shrinkpoint.store.loss_increase import LossIncrease
from shrinkpoint.store.manifest import Manifest

_MAX_ROWS = 20
_HEADS = ("step", "age", "kind", "scheme", "state", "stored", "ratio", "loss rise")


def store_html(where: str, manifests: Sequence[Manifest], stored: int) -> str:
    """The totals of a store and its newest checkpoints.

    Args:
        where: path or URL of the store.
        manifests: by rising step.
        stored: bytes of all payloads on the disk, bases included.
    """
    raw = sum(manifest.raw_bytes for manifest in manifests)
    numbers = [
        ("checkpoints", f"{len(manifests):,}"),
        ("state", humanize.size(raw)),
        ("stored", humanize.size(stored)),
        ("ratio", humanize.ratio(raw, stored)),
    ]
    newest = manifests[: -_MAX_ROWS - 1 : -1]
    earlier = len(manifests) - len(newest)
    note = f"and {humanize.count(earlier, 'earlier checkpoint')}" if earlier else ""
    note = note if newest else "no checkpoint yet"
    aligned = ("step", "age", "state", "stored", "ratio", "loss rise")
    return html.fragment(where, numbers, _HEADS, [*map(_row, newest)], aligned=aligned, note=note)


def _row(manifest: Manifest) -> tuple[str, ...]:
    raw, stored = manifest.raw_bytes, manifest.stored_bytes
    sizes = humanize.size(raw), humanize.size(stored), humanize.ratio(raw, stored)
    increase = str(LossIncrease.from_loss(manifest.loss))
    return str(manifest.step), humanize.age(manifest.created), manifest.kind, manifest.scheme, *sizes, increase
