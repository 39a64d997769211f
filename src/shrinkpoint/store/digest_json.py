"""JSON documents in a canonical encoding with their own digest inside, so that a reader finds any damage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from shrinkpoint._native import xxh3_128
from shrinkpoint.container.strict_json import MAX_JSON_DEPTH, check_nests, json_depth
from shrinkpoint.errors import CorruptError, TruncatedError, VersionError
from shrinkpoint.store import layout
from shrinkpoint.tensors.info import JSON

MAX_MANIFEST_BYTES = 16 << 20
"""A reader refuses a larger document before it allocates; a manifest has below 300 bytes per file of the chain."""


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
        canonical = dump_with_digest(document)
        expected = json.loads(canonical)["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise manifest_error(where, f"no manifest ({type(error).__name__})", "a JSON object with its digest") from error
    if digest != expected:
        raise manifest_error(where, f"digest {str(digest)[:40]}", expected)
    if canonical != data:
        raise manifest_error(where, "another spelling of this manifest", "canonical JSON")
    if json_depth(document) > MAX_JSON_DEPTH:
        raise manifest_error(where, "a manifest that is nested too deeply", f"at most {MAX_JSON_DEPTH} levels")
    return dict(document)


def check_format(document: Mapping[str, JSON], where: str, supported: int) -> None:
    """Refuse the format of another release.

    Raises:
        VersionError: a newer release wrote it.
    """
    if document.get("format") != supported:
        raise VersionError(
            where,
            found=f"manifest format {document.get('format')!r}",
            expected=f"at most {supported}",
            do="read it with the release that wrote it, or a newer one",
        )


def manifest_error(where: str, found: str, expected: str = "") -> CorruptError:
    """The error for a document that cannot be trusted."""
    do = "this checkpoint cannot be trusted: restore another, then `forget` and `prune` it"
    return CorruptError(where, found=found, expected=expected, do=do)


def json_number(value: float) -> float | str:
    """A float for JSON: nan and infinities, which a diverged run may report, become texts."""
    return float(value) if math.isfinite(value) else str(float(value))


def json_safe(value: JSON) -> JSON:
    """A copy of nested values in which every float is a `json_number`."""
    if isinstance(value, dict):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def expect_json_type(value: JSON, kind: type) -> Any:
    """Return `value` if its type is exactly `kind`; else raise a TypeError."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} should be")
    return value


def expect_count(value: JSON) -> int:
    """Return a whole number from 0 to 2^63 - 1; else raise a TypeError or ValueError."""
    if not 0 <= expect_json_type(value, int) < 1 << 63:
        raise ValueError(f"a count of {value}"[:60])
    return int(value)


def check_time(text: str) -> None:
    """Raise a ValueError or OverflowError unless `text` is a time with a zone that every zone can represent."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time without a zone")
    for hours in (-24, 24):
        moment.astimezone(timezone.utc) + timedelta(hours=hours)


def expect_payload_name(value: JSON) -> str:
    """Return the name of a payload, which cannot leave its directory: the pattern has no `..` and no `/`."""
    if not layout.PAYLOAD.fullmatch(expect_json_type(value, str)):
        raise ValueError(f"a file named {value!r}")
    return str(value)


def expect_digest(value: JSON) -> str:
    """Return a header digest in hex; else raise a TypeError or ValueError."""
    if not layout.BASE.fullmatch(layout.base_name(expect_json_type(value, str))):
        raise ValueError(f"a digest {value!r}")
    return str(value)


def _canonical(document: Mapping[str, JSON]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
