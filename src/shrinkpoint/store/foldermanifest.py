"""What one checkpoint is that lies in a directory of somebody else's: it exists when its manifest does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shrinkpoint.container.strict import shorten
from shrinkpoint.guard import guarded
from shrinkpoint.record import JSON
from shrinkpoint.store.layout import MAX_STEP
from shrinkpoint.store.sealed import (
    check_format,
    check_time,
    corrupt,
    count,
    expect,
    header_digest,
    number,
    payload_name,
    plain,
    sealed,
    unsealed,
)

FORMAT = 1
MAX_BYTES = 256 << 20
"""A reader refuses a larger manifest before it allocates; `extra` of a run on thousands of ranks takes megabytes."""


@dataclass(frozen=True)
class Payload:
    """The file of one rank, and the chain below it.

    Attributes:
        name: in the folder.
        size: in bytes.
        digest: header digest, which vouches for every other byte.
        raw_bytes: of the tensors in it.
        bases: header digest and size of each file below, the keyframe first; empty: it stands alone.
    """

    name: str
    size: int
    digest: str
    raw_bytes: int
    bases: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FolderManifest:
    """A checkpoint.

    Attributes:
        id: random hex.
        created: UTC, ISO 8601 with milliseconds.
        scheme: the id of the scheme that was asked for.
        payloads: one a rank, in the order of the ranks.
        step: counts training steps; None: nobody said.
        metrics: what the loop measured, by name.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
        loss: what this checkpoint lost, and what was tried and measured to decide it; None: nothing.
        note: free text.
        extra: what the framework's own reader needs.
    """

    id: str
    created: str
    scheme: str
    payloads: tuple[Payload, ...]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    extra: JSON = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(one.raw_bytes for one in self.payloads)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payloads, without what they stand on."""
        return sum(one.size for one in self.payloads)

    @property
    def depth(self) -> int:
        """Deltas to apply on top of the keyframe, of the rank that has most."""
        return max(len(one.bases) for one in self.payloads)

    @property
    def is_lossy(self) -> bool:
        """Whether a restore gives other values than were saved."""
        return isinstance(self.loss, dict) and self.loss.get("chosen") is not None

    def to_json(self) -> bytes:
        """Canonical bytes: one manifest has one spelling, and its digest stands inside."""
        payloads = [[p.name, p.size, p.digest, p.raw_bytes, [list(base) for base in p.bases]] for p in self.payloads]
        return sealed({
            "format": FORMAT, "id": self.id, "created": self.created, "scheme": self.scheme, "payloads": payloads,
            "step": self.step, "metrics": {name: number(value) for name, value in self.metrics.items()},
            "lossy_restores": self.lossy_restores, "loss": plain(self.loss), "note": self.note,
            "extra": plain(self.extra),
        })  # fmt: skip

    @classmethod
    def from_json(cls, data: bytes, where: str) -> FolderManifest:
        """Read what `to_json` wrote.

        Raises:
            TruncatedError: the bytes end before the closing brace.
            CorruptError: the bytes contradict their digest or themselves.
            VersionError: a newer release wrote them.
        """
        with guarded(where):
            document = unsealed(data, where)
            check_format(document, where, FORMAT)
            try:
                return _checked(document)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise corrupt(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _checked(document: Mapping[str, JSON]) -> FolderManifest:
    payloads = tuple(_payload(row) for row in expect(document["payloads"], list))
    step, created = document["step"], expect(document["created"], str)
    if not payloads or len({one.name for one in payloads}) < len(payloads):
        raise ValueError("no payload, or one twice")
    if step is not None and not 0 <= expect(step, int) < MAX_STEP:
        raise ValueError(f"step {step}")
    check_time(created)
    return FolderManifest(
        id=expect(document["id"], str),
        created=created,
        scheme=expect(document["scheme"], str),
        payloads=payloads,
        step=step,
        metrics={name: float(value) for name, value in expect(document["metrics"], dict).items()},
        lossy_restores=_generation(document["lossy_restores"]),
        loss=document["loss"],
        note=expect(document["note"], str),
        extra=document["extra"],
    )


def _generation(value: JSON) -> int:
    """A count of restores, which schemes make seeds of."""
    if count(value) >= 1 << 31:
        raise ValueError(f"{value} restores")
    return count(value)


def _payload(row: JSON) -> Payload:
    name, size, digest, raw_bytes, bases = expect(row, list)
    pairs = tuple(_link(base) for base in expect(bases, list))
    known = {digest, *(one for one, _ in pairs)}
    if len(known) < len(pairs) + 1:
        raise ValueError("a chain that leads back to itself")
    return Payload(payload_name(name), count(size), header_digest(digest), count(raw_bytes), pairs)


def _link(row: JSON) -> tuple[str, int]:
    digest, size = expect(row, list)
    return header_digest(digest), count(size)
