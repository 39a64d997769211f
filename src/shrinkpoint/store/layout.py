"""The names of all files in a store.

::

    step-000001000/rank-00000.safetensors      the payload (rank-00000.2.safetensors after the step was saved again)
    step-000001000/rank-00000.482910375.safetensors  the payload in a bucket: the number is the writer's own
    step-000001000/bases/<digest>.safetensors  a hard link to each file that it depends on
    step-000001000/manifest.json               written last: the checkpoint exists when this does
    step-000001000/forgotten                   hides the checkpoint whose manifest has the id in this file
    rollback                                   the run went back to an older step: manifests tell the order of saving
"""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import SupportsIndex, TypeVar

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage.base import Storage

T = TypeVar("T")
MAX_STEP = 10**15
MANIFEST = "manifest.json"
DIRECTORY_MANIFEST = "shrinkpoint.json"
"""The name in a framework's checkpoint, whose directory a run may have named as a store names those of steps."""
FORGOTTEN = "forgotten"
ROLLBACK = "rollback"
BASES = "bases"
PAYLOAD = re.compile(r"rank-[0-9]{5}(\.[1-9][0-9]{0,8})?\.safetensors")
_STEP_DIR = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,14})")
_DRY_NUMBER = 482910375  # Of the first payload in a dry run; digits that compress no better than random ones
BASE = re.compile(r"bases/[0-9a-f]{32}\.safetensors")


def step_dir(step: int) -> str:
    """The directory of a checkpoint; the names sort as the steps do up to step 999 999 999."""
    return f"step-{step:09d}"


def manifest_key(step: int) -> str:
    return f"{step_dir(step)}/{MANIFEST}"


def forgotten_key(step: int) -> str:
    return f"{step_dir(step)}/{FORGOTTEN}"


def base_name(digest: str) -> str:
    """The name, inside a step's directory, of the link to the file with this header digest."""
    return f"bases/{digest}.safetensors"


def payload_name(storage: Storage, used_names: Collection[str]) -> str:
    """A name for a payload that is not among `used_names`: a committed file is never written into."""
    return next(name for name in payload_names(storage, 0) if name not in used_names)


def payload_names(storage: Storage, rank: int) -> Iterator[str]:
    """The names that a payload of a rank may have, without end: the first one that is free is taken.

    In a storage whose lock expires they have random numbers. A writer that stood still wakes when another one has
    committed, and what it goes on to upload must not have the name of what is committed. Where nothing is written, as
    in a dry run, the numbers are always the same.
    """
    if getattr(storage, "lock_expires", False):
        is_dry = not getattr(storage, "keeps_payloads", True)
        numbers = count(_DRY_NUMBER) if is_dry else iter(lambda: 10**8 + secrets.randbelow(9 * 10**8), 0)
        yield from (f"rank-{rank:05d}.{number}.safetensors" for number in numbers)
    yield f"rank-{rank:05d}.safetensors"
    yield from (f"rank-{rank:05d}.{number}.safetensors" for number in count(2))


def step_of(key: str) -> int | None:
    """The step whose directory holds `key`; None for a key that no store writes."""
    head, _, name = key.partition("/")
    return step_of_dir(head) if is_own_name(name) else None


def is_own_name(name: str) -> bool:
    """True if a store writes files of this name into a step's directory."""
    return name in (MANIFEST, FORGOTTEN) or bool(BASE.fullmatch(name) or PAYLOAD.fullmatch(name))


def rank_of(payload_name: str) -> int:
    """The rank that wrote a payload."""
    return int(payload_name[5:10])


def files_by_step(files: Mapping[str, T]) -> dict[int, dict[str, T]]:
    """The files among `files` that are a store's, by the step and the name in its directory.

    A directory of a step is none of a store where it has the manifest of a framework's checkpoint, and not ours.
    """
    found: dict[int, dict[str, T]] = {}
    for key, value in files.items():
        head, _, name = key.partition("/")
        if (step := step_of_dir(head)) is not None:
            found.setdefault(step, {})[name] = value
    own = {
        step: {name: value for name, value in names.items() if is_own_name(name)}
        for step, names in found.items()
        if DIRECTORY_MANIFEST not in names or MANIFEST in names
    }
    return {step: names for step, names in own.items() if names}


def is_step_dir(name: str) -> bool:
    """True if a store makes directories of this name, so that an empty one may be removed."""
    head, _, rest = name.partition("/")
    return rest in ("", BASES) and step_of_dir(head) is not None


def step_of_dir(name: str) -> int | None:
    """The step whose directory has this name; None for one that no store writes."""
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match else None


def check_step(step: SupportsIndex) -> int:
    """`step` as an int, for a checkpoint to be made.

    Raises:
        PolicyError: it is not a whole number from 0 to `MAX_STEP` - 1.
    """
    value = as_step(step)
    if not 0 <= value < MAX_STEP:
        raise _step_error(step)
    return value


def as_step(step: SupportsIndex) -> int:
    """`step` as an int, for a checkpoint to be looked up; raises PolicyError if it is not a whole number."""
    if isinstance(step, bool):
        raise _step_error(step)
    try:
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:  # what arrays and tensors raise among them
        raise _step_error(step) from error


def _step_error(step: object) -> PolicyError:
    expected, do = f"a whole number from 0 to {MAX_STEP - 1}", "number saves by training step"
    return PolicyError("step", found=f"{step!r:.200}", expected=expected, do=do)
