"""Which checkpoint depends on which, and how a file of a chain is found and its header verified. No torch: nothing is
decoded here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from shrinkpoint.container import FileReader
from shrinkpoint.errors import ChainError, CorruptError, FormatError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import Source, Storage
from shrinkpoint.store.listing import candidate_keys
from shrinkpoint.store.manifest import ChainLink, Manifest


def chain_link(manifest: Manifest, name: str = "") -> ChainLink:
    """How a child's manifest speaks of this checkpoint; `name` is the link in the child's directory."""
    payload = manifest.files[0]
    return ChainLink(manifest.step, manifest.id, payload.digest, payload.size, payload.name, name)


def chain_links(manifest: Manifest) -> tuple[ChainLink, ...]:
    """Every file that decoding needs, keyframe first, the checkpoint's own payload last."""
    return (*manifest.bases, chain_link(manifest, manifest.files[0].name))


def is_current(manifests: Mapping[int, Manifest], base: ChainLink) -> bool:
    """Whether the step a base came from still holds that very file, and was not saved again or deleted since."""
    manifest = manifests.get(base.step)
    return manifest is not None and manifest.digest == base.digest


def ancestors(manifests: Mapping[int, Manifest], step: int) -> tuple[int, ...]:
    """The steps that `step` stands on, keyframe first; those that are gone or were saved again are left out."""
    return tuple(base.step for base in manifests[step].bases if is_current(manifests, base))


def descendants(manifests: Mapping[int, Manifest], step: int) -> tuple[int, ...]:
    """The steps whose chain goes through `step`, in order."""
    return tuple(sorted(other for other in manifests if step in ancestors(manifests, other)))


def chain_manifests(manifests: Mapping[int, Manifest], step: int) -> tuple[Manifest, ...]:
    """The checkpoints from the keyframe to `step`.

    Raises:
        NotFoundError: there is no such step.
        ChainError: a step on the way is gone or was saved again. (It may still load, from links of its own.)
    """
    if step not in manifests:
        raise NotFoundError(
            f"step {step}", found="no such checkpoint", expected=describe_steps(manifests), do="list the store"
        )
    for base in manifests[step].bases:
        if not is_current(manifests, base):
            other = manifests.get(base.step)
            raise ChainError(
                f"step {step}, base step {base.step}",
                found=f"a file with digest {other.digest}" if other else "no such checkpoint",
                expected=f"the file with digest {base.digest}",
                do=f"`compact` step {step} while it loads, or restore another checkpoint",
            )
    return tuple(manifests[base.step] for base in chain_links(manifests[step]))


def describe_steps(manifests: Mapping[int, Manifest]) -> str:
    """The steps there are, for a message."""
    steps = sorted(manifests)
    if not steps:
        return "a step, but there is none yet"
    return "one of " + ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]))


T = TypeVar("T")


def read_chain_file(storage: Storage, manifest: Manifest, base: ChainLink, use: Callable[[FileReader], T]) -> T:
    """Read the right file of a chain from the first place that holds it: one's own link, then the sibling's file.

    A place whose file is damaged is passed over, since the next may hold a copy that is not.

    Raises:
        ChainError, FormatError, StorageError: no place does; the error of the first that has a file, if any has.
    """
    error: ShrinkpointError | None = None
    for key in candidate_keys(manifest, base):
        where = storage.describe(key)
        try:
            with storage.open(key) as source:
                return use(verify_header(source, where, manifest, base))
        except NotFoundError:
            continue
        except (ChainError, FormatError, StorageError) as other:
            error = error or other
    raise error or _missing_file_error(storage, manifest, base)


def verify_header(source: Source, where: str, manifest: Manifest, base: ChainLink) -> FileReader:
    """Check the header of a file of a chain, and that it is the file the manifest speaks of.

    Raises:
        ChainError: a base has another digest.
        CorruptError: so has the checkpoint's own payload.
        FormatError: the header is damaged, or the file too short.
    """
    reader = FileReader(source, where)
    if reader.digest == base.digest:
        return reader
    found, expected = f"header digest {reader.digest}", base.digest
    if base.step == manifest.step:
        raise CorruptError(where, found=found, expected=f"{expected}, which its manifest records", do=_DO)
    expected += f", the base of step {manifest.step} from step {base.step}"
    raise ChainError(where, found=found, expected=expected, do=_DO)


_DO = "restore another checkpoint; `verify` says which are whole"


def _missing_file_error(storage: Storage, manifest: Manifest, base: ChainLink) -> ShrinkpointError:
    where = ", ".join(storage.describe(key) for key in candidate_keys(manifest, base))
    if base.step == manifest.step:
        return CorruptError(where, found="no such file", expected="the payload its manifest names", do=_DO)
    expected = f"the base of step {manifest.step}: the file of step {base.step} with header digest {base.digest}"
    return ChainError(where, found="no such file", expected=expected, do=_DO)
