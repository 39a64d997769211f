"""Manifests made by hand, for tests that need no files."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from shrinkpoint._native import xxh3_128
from shrinkpoint.store import chain
from shrinkpoint.store.manifest import ChainLink, Manifest, Payload

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


def manifest(
    step: int,
    parent: Manifest | None = None,
    *,
    metrics: dict[str, float] | None = None,
    hours: float = 0.0,
    again: str = "",
) -> Manifest:
    """A checkpoint made `hours` after `EPOCH`; `again` tells apart what was saved under one step twice."""
    digest = xxh3_128(f"{step} {again}".encode())
    bases = (
        ()
        if parent is None
        else tuple(
            ChainLink(b.step, b.id, b.digest, b.size, b.file, f"bases/{b.digest}.safetensors")
            for b in chain.chain_links(parent)
        )
    )
    return Manifest(
        id=f"id-{step}{again}",
        step=step,
        created=(EPOCH + timedelta(hours=hours)).isoformat(timespec="milliseconds"),
        scheme="lossless",
        payloads=(Payload("rank-00000.safetensors", 1000 + step, digest, 4000),),
        bases=bases,
        metrics=metrics or {},
    )


def run(length: int, keyframe_every: int = 3, **kwargs: float) -> list[Manifest]:
    """Checkpoints of steps 1 to `length`, in chains of `keyframe_every`."""
    made: list[Manifest] = []
    for step in range(1, length + 1):
        parent = made[-1] if (step - 1) % keyframe_every else None
        made.append(manifest(step, parent, hours=step))
    return made
