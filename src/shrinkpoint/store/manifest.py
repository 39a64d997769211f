"""Manifests: a checkpoint exists when its manifest does.

One class, two encodings: that of a step of a store (`manifest.json`), and that of a directory which a framework names
(`shrinkpoint.json`). A new field goes into `Manifest`, `_shared_to_json` and `_shared_from_json`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from shrinkpoint import humanize, validate
from shrinkpoint._native import xxh3_128
from shrinkpoint.container.strict_json import MAX_JSON_DEPTH, check_nests, count_nests, json_depth, shorten
from shrinkpoint.errors import VERIFY_ADVICE, VERSION_ADVICE, CorruptError, PolicyError, TruncatedError, VersionError
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.tensors.info import JSON

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    StepT = TypeVar("StepT", bound=int | None, default=int, covariant=True)
else:
    from typing import TypeVar

    StepT = TypeVar("StepT")

T = TypeVar("T")
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of numbers: the first and the last one of each, rising and apart."""
FORMAT = 1
WEIGHTS_ONLY_FORMAT = 2
"""Format of a store's manifest with `weights_only`: a reader that ignores it would resume with moments of zero."""
REVERSE_FORMAT = 3  # Of a store's manifest whose chain goes back in steps: earlier releases take that for damage
DIRECTORY_FORMATS = (1, 2)  # Of a directory's manifest without and with `weights_only`
MAX_MANIFEST_BYTES = 16 << 20
"""A reader refuses a larger manifest of a store before it allocates; each file of the chain takes below 300 bytes."""
MAX_DIRECTORY_MANIFEST_BYTES = 256 << 20
"""A reader refuses a larger manifest before it allocates; `extra` of a run on thousands of ranks takes megabytes."""
DCP_KEY = "torch.distributed.checkpoint"  # In `extra`: the metadata of what `dcp.save` wrote
_DIGEST = re.compile("[0-9a-f]{32}")
_OWN_DIGEST = re.compile(rb'\{"created":"[^"\\]*",("digest":"([0-9a-f]{32})",)')
"""The beginning of a directory's manifest: keys are sorted."""
MAX_LOSSY_RESTORES = (1 << 31) - 1  # In a directory's manifest: schemes derive seeds from this number
MAX_NOTE = 1 << 20  # Characters of a note; each takes 12 bytes at most, so that a store's manifest can hold it


@dataclass(frozen=True)
class ChainLink:
    """One file that a delta of a store depends on.

    Attributes:
        step, id: the checkpoint it belonged to when the delta was made.
        digest: its header digest, which decides whether a file found later is the right one.
        size: in bytes.
        file: its name in the directory of `step`.
        name: the name of a hard link to it in the delta's own directory; "" where links are impossible.
    """

    step: int
    id: str
    digest: str
    size: int
    file: str
    name: str = ""

    @property
    def sibling_key(self) -> str:
        """Its key in the directory of the step it belonged to."""
        return f"{layout.step_dir(self.step)}/{self.file}"


@dataclass(frozen=True)
class Payload:
    """The file of one rank.

    Attributes:
        name: in the checkpoint's directory.
        size: in bytes.
        digest: header digest, which authenticates every other byte.
        raw_bytes: bytes of the tensors in it.
        bases: in a framework's directory, the header digest and the size of each file it depends on, keyframe first;
            empty for a keyframe. (A store's manifest has `Manifest.bases` instead.)
    """

    name: str
    size: int
    digest: str
    raw_bytes: int = 0
    bases: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Manifest(Generic[StepT]):
    """A checkpoint. `Manifest` alone is that of a store, which always has a step.

    Attributes:
        id: random hex, and with it the state: a step saved again gets a new one, a file written again keeps its own.
        created: UTC, ISO 8601 with milliseconds.
        scheme: the id of the scheme that was asked for.
        payloads: one for each rank, in the order of the ranks.
        step: counts training steps; names the directory in a store. None if unknown, which only a framework's
            directory allows.
        metrics: what the loop measured, by name.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
        loss: what this checkpoint lost, and what was tried and measured to decide it; None: nothing.
        note: free text.
        bases: the files that a store's delta depends on, keyframe first; empty for a keyframe.
        stats: what the save measured of itself, as far as it did: `seconds` of writing, `stall`, the seconds for which
            the training loop waited, and `retention` (see `SaveReport`).
        weights_only: retention has deleted what the optimizers kept for each parameter.
        replaced: in a mirror, the ids of the checkpoints of this step that were there before, the latest last.
        extra: what a framework's own reader needs; None in a store.
        stored_bytes: bytes of the payloads, without the files they depend on; computed unless given, as a store's
            manifest records it.
        sequence: number in the order of saving, higher than those of all earlier checkpoints of the run; the step
            unless given, and 0 without a step.
        abandoned: numbers of the checkpoints that this one's line of history left behind (see `store.history`).
    """

    id: str
    created: str
    scheme: str
    payloads: tuple[Payload, ...]
    step: StepT
    metrics: Mapping[str, float] = field(default_factory=dict)
    lossy_restores: int = 0
    loss: JSON = None
    note: str = ""
    bases: tuple[ChainLink, ...] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    weights_only: bool = False
    replaced: tuple[str, ...] = ()
    extra: JSON = None
    stored_bytes: int = -1
    sequence: int = -1
    abandoned: Ranges = ()

    def __post_init__(self) -> None:
        if self.sequence < 0:
            object.__setattr__(self, "sequence", self.step or 0)
        if self.stored_bytes < 0:
            object.__setattr__(self, "stored_bytes", sum(payload.size for payload in self.payloads))

    def __repr__(self) -> str:
        """Short line with step, scheme, kind and size."""
        step = "no step" if self.step is None else f"step {self.step}"
        return f"<Manifest {step}, {self.scheme}, {self.kind}, {humanize.sizes(self.raw_bytes, self.stored_bytes)}>"

    @property
    def raw_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(payload.raw_bytes for payload in self.payloads)

    @property
    def depth(self) -> int:
        """Deltas to apply on top of the keyframe, of the rank that has most; 0 for a keyframe."""
        return max(len(self.bases), *(len(payload.bases) for payload in self.payloads))

    @property
    def kind(self) -> str:
        """Kind in words: a keyframe, or a delta with its depth; "weights only" if it has no moments."""
        kind = f"delta {self.depth}" if self.depth else "keyframe"
        return f"{kind}, weights only" if self.weights_only else kind

    @property
    def is_lossy(self) -> bool:
        """True if a restore gives other values than were saved."""
        return isinstance(self.loss, dict) and self.loss.get("chosen") is not None

    @property
    def is_dcp(self) -> bool:
        """True if it was saved through torch.distributed.checkpoint."""
        return isinstance(self.extra, dict) and DCP_KEY in self.extra

    @property
    def digest(self) -> str:
        """The header digest of the first payload, by which deltas of a store know this checkpoint."""
        return self.payloads[0].digest

    def of_rank(self, rank: int) -> Manifest[StepT] | None:
        """A copy with the payload of one rank alone; None if that has none."""
        own = next((payload for payload in self.payloads if layout.rank_of(payload.name) == rank), None)
        return None if own is None else replace(self, payloads=(own,), stored_bytes=-1)

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.created)

    def key(self: Manifest, name: str) -> str:
        """The key of a file in this checkpoint's directory of a store."""
        return f"{layout.step_dir(self.step)}/{name}"


def new_manifest(
    *,
    id: str | None = None,
    metrics: Mapping[str, float] | None = None,
    stats: Mapping[str, float] | None = None,
    **fields: Any,
) -> Manifest[Any]:
    """The manifest of a checkpoint that is made now, with a new id unless one is given; `fields` are of `Manifest`."""
    return Manifest(
        id=id or secrets.token_hex(8),
        created=utc_timestamp(),
        metrics=dict(metrics or {}),
        stats=dict(stats or {}),
        **fields,
    )


DirectoryManifest: TypeAlias = "Manifest[int | None]"
"""For annotations: the manifest of a framework's directory, whose step may be unknown."""


def encode_store_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes of a step's manifest: one manifest has one encoding, with its digest inside.

    Raises:
        PolicyError: a reader would refuse it: a field of another type or size than it has, or JSON that nests too deep.
    """
    document = _shared_to_json(manifest)
    if manifest.loss is None:
        del document["loss"]
    document["format"] = _store_format(manifest)
    if manifest.step in {base.step for base in manifest.bases}:
        raise PolicyError(f"step {manifest.step}", found="a base of the same step", do="save a keyframe")
    if manifest.replaced:
        document["replaced"] = [*manifest.replaced]
    if manifest.weights_only:
        document["weights_only"] = True
    document["files"] = [[payload.name, payload.size, payload.digest] for payload in manifest.payloads]
    document["bases"] = [[b.step, b.id, b.digest, b.size, b.file, b.name] for b in manifest.bases]
    document["raw_bytes"], document["stored_bytes"] = manifest.raw_bytes, manifest.stored_bytes
    return _dump_within(document, MAX_MANIFEST_BYTES)


def _store_format(manifest: Manifest) -> int:
    """The oldest format that has all that a manifest says."""
    steps = [*(base.step for base in manifest.bases), manifest.step]
    if any(low >= high for low, high in pairwise(steps)):
        return REVERSE_FORMAT
    return WEIGHTS_ONLY_FORMAT if manifest.weights_only else FORMAT


def decode_store_manifest(data: bytes, where: str) -> Manifest:
    """Read what `encode_store_manifest` wrote.

    Raises:
        TruncatedError: the bytes end before the closing brace.
        CorruptError: the bytes contradict their digest or themselves.
        VersionError: a newer release wrote them.
    """
    return _decode(data, where, (FORMAT, WEIGHTS_ONLY_FORMAT, REVERSE_FORMAT), _store_manifest_from_json)


def encode_directory_manifest(manifest: DirectoryManifest) -> bytes:
    """Canonical bytes of a directory's manifest: as for a store, which see; raises as `encode_store_manifest` does."""
    document = _shared_to_json(manifest)
    _check_depth("extra", manifest.extra)
    document["format"] = DIRECTORY_FORMATS[manifest.weights_only]
    if manifest.weights_only:
        document["weights_only"] = True
    document["payloads"] = [
        [payload.name, payload.size, payload.digest, payload.raw_bytes, [list(base) for base in payload.bases]]
        for payload in manifest.payloads
    ]
    document["extra"] = json_safe(manifest.extra)
    return _dump_within(document, MAX_DIRECTORY_MANIFEST_BYTES)


def decode_directory_manifest(data: bytes, where: str) -> DirectoryManifest:
    """Read what `encode_directory_manifest` wrote; raises as `decode_store_manifest` does."""
    return _decode(data, where, DIRECTORY_FORMATS, _directory_manifest_from_json)


def check_note(note: object) -> str:
    """Return a note for people; raises PolicyError if it is no text, or longer than a manifest bears."""
    text = validate.check_str("note", note, do="leave it out, or pass a string")
    if len(text) > MAX_NOTE:
        do = "keep a long text in a file of its own, and its name here"
        raise PolicyError("note", found=f"{len(text):,} characters", expected=f"at most {MAX_NOTE:,}", do=do)
    return text


def check_lossy_restores(count: object) -> int:
    """Return a number of restores; raises PolicyError if it is no whole number from 0 to `MAX_LOSSY_RESTORES`."""
    do = "pass the lossy_restores of what was restored"
    return validate.check_int("lossy_restores", count, minimum=0, maximum=MAX_LOSSY_RESTORES, do=do)


def _check_depth(name: str, value: JSON) -> None:
    depth, limit = json_depth(value), MAX_JSON_DEPTH - 1  # the manifest is a level of its own
    if depth > limit:
        do = "store it flatter, or as a string"
        raise PolicyError(name, found=f"{depth} levels of lists and dicts", expected=f"at most {limit}", do=do)


def _dump_within(document: Mapping[str, JSON], max_bytes: int) -> bytes:
    """`dump_with_digest`, or a PolicyError where a reader would refuse the result for its size."""
    data = dump_with_digest(document)
    nests, max_nests = count_nests(data)
    if len(data) > max_bytes or nests > max_nests:
        found = f"{len(data):,} bytes with {nests:,} lists and objects"
        expected = f"at most {max_bytes:,} bytes and {max_nests:,} lists and objects"
        raise PolicyError("manifest", found=found, expected=expected, do="shorten metrics, note or extra")
    return data


def names_payload(data: bytes, payload: Payload) -> bool:
    """True if the bytes of a directory's manifest are intact and name a payload; they are not parsed.

    Every rank asks this at every save, of a manifest that grows with the number of ranks. Its encoding is canonical,
    so that the digest is of all bytes but its own entry, and a payload's row has one spelling.
    """
    head = _OWN_DIGEST.match(data)
    if head is None or xxh3_128(data[: head.start(1)] + data[head.end(1) :]) != head[2].decode():
        return False
    return _canonical([payload.name, payload.size, payload.digest])[:-1] + b"," in data


def read_limited(storage: Storage, key: str, max_bytes: int) -> bytes:
    """Read a manifest, unless it is larger than `max_bytes`; then raise a CorruptError, and allocate nothing."""
    with storage.open(key) as source:
        if source.size > max_bytes:
            found, expected, do = f"{source.size:,} bytes", f"at most {max_bytes:,}", VERIFY_ADVICE
            raise CorruptError(storage.describe(key), found=found, expected=expected, do=do)
        return bytes(source.read(0, source.size))


def _decode(data: bytes, where: str, supported: Collection[int], from_json: Callable[[Mapping[str, JSON]], T]) -> T:
    with read_guard(where):
        document = load_with_digest(data, where)
        if document.get("format") not in supported:
            found, expected = f"manifest format {document.get('format')!r}", f"at most {max(supported)}"
            raise VersionError(where, found=found, expected=expected, do=VERSION_ADVICE)
        try:
            return from_json(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _manifest_error(where, f"a manifest that contradicts itself ({shorten(str(error))})") from error


def _shared_to_json(manifest: DirectoryManifest) -> dict[str, JSON]:
    """The fields that both encodings have, under the same keys."""
    check_note(manifest.note)
    check_lossy_restores(manifest.lossy_restores)
    _check_depth("loss", manifest.loss)
    document = {
        "id": manifest.id,
        "created": manifest.created,
        "scheme": manifest.scheme,
        "step": manifest.step,
        "metrics": {name: _json_number(value) for name, value in manifest.metrics.items()},
        "lossy_restores": manifest.lossy_restores,
        "loss": json_safe(manifest.loss),
        "note": manifest.note,
    }
    if manifest.stats:  # those of earlier releases have none
        document["stats"] = {name: _json_number(value) for name, value in manifest.stats.items()}
    if manifest.sequence != (manifest.step or 0):
        document["sequence"] = manifest.sequence
    if manifest.abandoned:
        document["abandoned"] = [list(numbers) for numbers in manifest.abandoned]
    return document


def _shared_from_json(document: Mapping[str, JSON]) -> dict[str, Any]:
    """The arguments of `Manifest` that both encodings have; `step` and `loss` are checked by the caller."""
    created = _expect(document["created"], str)
    time = datetime.fromisoformat(created)
    if time.tzinfo is None:
        raise ValueError("a time without a zone")
    for hours in (-24, 24):  # every time zone can represent it
        time.astimezone(timezone.utc) + timedelta(hours=hours)
    if document.get("weights_only", True) is not True:
        raise ValueError(f"weights_only {document['weights_only']!r}")
    return {
        "id": _expect(document["id"], str),
        "created": created,
        "scheme": _expect(document["scheme"], str),
        "step": document["step"],
        "metrics": {name: float(value) for name, value in _expect(document["metrics"], dict).items()},
        "lossy_restores": _count(document["lossy_restores"]),
        "loss": document.get("loss"),
        "note": _expect(document["note"], str),
        "stats": {name: float(value) for name, value in _expect(document.get("stats", {}), dict).items()},
        "sequence": _count(document["sequence"]) if "sequence" in document else -1,
        "abandoned": _ranges_from_json(document.get("abandoned", [])),
    }


def _store_manifest_from_json(document: Mapping[str, JSON]) -> Manifest:
    if "loss" in document and document["loss"] is None:
        raise ValueError("a loss of nothing, which has another spelling")
    format, weights_only = document["format"], "weights_only" in document
    raw_bytes = _count(document["raw_bytes"])  # of all payloads; counted for the first
    rows = [_expect(row, list) for row in _expect(document["files"], list)]
    payloads = tuple(
        Payload(_payload_name(name), _count(size), _digest(digest), 0 if index else raw_bytes)
        for index, (name, size, digest) in enumerate(rows)
    )
    manifest: Manifest = Manifest(
        **_shared_from_json(document),
        payloads=payloads,
        bases=tuple(_chain_link(*_expect(row, list)) for row in _expect(document["bases"], list)),
        weights_only=weights_only,
        replaced=tuple(_expect(id, str) for id in _expect(document.get("replaced", []), list)),
        stored_bytes=_count(document["stored_bytes"]),
    )
    _check_payload_names(payloads)
    steps = [*(base.step for base in manifest.bases), layout.check_step(_expect(manifest.step, int))]
    if len({*steps}) < len(steps):  # so no chain can be a circle
        raise ValueError("a chain that has a step twice")
    if format != _store_format(manifest):
        raise ValueError(f"format {format}, steps {steps} and weights_only {weights_only}")
    return manifest


def _directory_manifest_from_json(document: Mapping[str, JSON]) -> DirectoryManifest:
    payloads = tuple(_payload_from_json(row) for row in _expect(document["payloads"], list))
    weights_only = "weights_only" in document
    manifest: DirectoryManifest = Manifest(
        **_shared_from_json(document), payloads=payloads, weights_only=weights_only, extra=document["extra"]
    )
    if document["format"] != DIRECTORY_FORMATS[weights_only]:
        raise ValueError(f"format {document['format']} and weights_only {weights_only}")
    _check_payload_names(payloads)
    if "loss" not in document:
        raise KeyError("loss")
    if manifest.step is not None and not 0 <= _expect(manifest.step, int) < layout.MAX_STEP:
        raise ValueError(f"step {manifest.step}")
    if manifest.lossy_restores > MAX_LOSSY_RESTORES:
        raise ValueError(f"{manifest.lossy_restores} restores")
    return manifest


def _ranges_from_json(rows: JSON) -> Ranges:
    pairs = [_expect(row, list) for row in _expect(rows, list)]
    ranges = tuple((_count(low), _count(high)) for low, high in pairs)
    numbers = [number for low, high in ranges for number in (low, high + 1)]
    if any(low >= high for low, high in pairwise(numbers)):
        raise ValueError("ranges of numbers that do not rise")
    return ranges


def _check_payload_names(payloads: tuple[Payload, ...]) -> None:
    if not payloads or len({payload.name for payload in payloads}) < len(payloads):
        raise ValueError("no payload, or the same one twice")


@lru_cache(maxsize=1024, typed=True)
def _chain_link(step: JSON, id: JSON, digest: JSON, size: JSON, file: JSON, name: JSON) -> ChainLink:
    """A checked link; the manifests of a chain have the same ones, and share them."""
    if name and name != layout.base_name(digest):
        raise ValueError(f"a base named {name!r}")
    step, file = layout.check_step(_expect(step, int)), _payload_name(file)
    return ChainLink(step, _expect(id, str), _digest(digest), _count(size), file, _expect(name, str))


def _payload_from_json(row: JSON) -> Payload:
    name, size, digest, raw_bytes, bases = _expect(row, list)
    pairs = tuple(
        (_digest(base), _count(size)) for base, size in (_expect(pair, list) for pair in _expect(bases, list))
    )
    if len({digest, *(base for base, _ in pairs)}) < len(pairs) + 1:
        raise ValueError("a chain that leads back to itself")
    return Payload(_payload_name(name), _count(size), _digest(digest), _count(raw_bytes), pairs)


def utc_timestamp() -> str:
    """The current time in UTC, ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def dump_with_digest(document: Mapping[str, JSON]) -> bytes:
    """Encode a document canonically, with the digest of its other fields in it."""
    return _canonical({**document, "digest": xxh3_128(_canonical(document))})


def load_with_digest(data: bytes, where: str) -> dict[str, JSON]:
    """Decode a document and verify its digest and its canonical encoding.

    Raises:
        TruncatedError: the bytes end before the closing brace.
        CorruptError: they contradict their digest or themselves.
    """
    if not data.endswith(b"}"):
        do = "restore another checkpoint, then `forget` and `prune` this one"
        raise TruncatedError(where, found=f"{len(data)} bytes without an end", expected="a whole manifest", do=do)
    check_nests(data, where, "a manifest")
    try:
        document = json.loads(data)
        digest = document.pop("digest")
        expected = xxh3_128(_canonical(document))
        canonical = data if digest != expected else _canonical({**document, "digest": digest})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"no manifest ({type(error).__name__})"
        raise _manifest_error(where, found, "a JSON object with its digest") from error
    if digest != expected:
        raise _manifest_error(where, f"digest {str(digest)[:40]}", expected)
    if canonical != data:
        raise _manifest_error(where, "another spelling of this manifest", "canonical JSON")
    if json_depth(document) > MAX_JSON_DEPTH:
        raise _manifest_error(where, "a manifest that is nested too deeply", f"at most {MAX_JSON_DEPTH} levels")
    return dict(document)


def _manifest_error(where: str, found: str, expected: str = "") -> CorruptError:
    do = "this checkpoint cannot be trusted: restore another, then `forget` and `prune` it"
    return CorruptError(where, found=found, expected=expected, do=do)


def _json_number(value: float) -> float | str:
    """A float for JSON: nan and infinities, which a diverged run may report, become texts."""
    return float(value) if math.isfinite(value) else str(float(value))


def json_safe(value: JSON) -> JSON:
    """A copy of nested values in which every float is a `_json_number`."""
    if isinstance(value, dict):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return _json_number(value) if isinstance(value, float) else value


def _expect(value: JSON, kind: type) -> Any:
    """Return `value` if its type is exactly `kind`: true is not 1."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} should be")
    return value


def _count(value: JSON) -> int:
    if not 0 <= _expect(value, int) < 1 << 63:
        raise ValueError(f"a count of {value}"[:60])
    return int(value)


def _payload_name(value: JSON) -> str:
    """Return the name of a payload, which cannot leave its directory: the pattern has no `..` and no `/`."""
    if not layout.PAYLOAD.fullmatch(_expect(value, str)):
        raise ValueError(f"a file named {value!r}")
    return str(value)


def _digest(value: JSON) -> str:
    if not _DIGEST.fullmatch(_expect(value, str)):
        raise ValueError(f"a digest {value!r}")
    return str(value)


def _canonical(document: JSON) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
