"""Which checkpoint stands on which. Pure: it sees manifests and no files."""

from __future__ import annotations

from collections.abc import Mapping

from shrinkpoint.errors import ChainError, NotFoundError
from shrinkpoint.store.manifest import Base, Manifest


def as_base(manifest: Manifest, name: str = "") -> Base:
    """How a child's manifest speaks of this checkpoint; `name` is the link in the child's directory."""
    payload = manifest.files[0]
    return Base(manifest.step, manifest.id, payload.digest, payload.size, payload.name, name)


def files(manifest: Manifest) -> tuple[Base, ...]:
    """Every file that decoding needs, keyframe first, the checkpoint's own payload last."""
    return (*manifest.bases, as_base(manifest, manifest.files[0].name))


def is_live(manifests: Mapping[int, Manifest], base: Base) -> bool:
    """Whether the step a base came from still holds that very file, and was not saved again or deleted since."""
    manifest = manifests.get(base.step)
    return manifest is not None and manifest.digest == base.digest


def below(manifests: Mapping[int, Manifest], step: int) -> tuple[int, ...]:
    """The steps that `step` stands on, keyframe first; those that are gone or were saved again are left out."""
    return tuple(base.step for base in manifests[step].bases if is_live(manifests, base))


def dependents(manifests: Mapping[int, Manifest], step: int) -> tuple[int, ...]:
    """The steps whose chain goes through `step`, in order."""
    return tuple(sorted(other for other in manifests if step in below(manifests, other)))


def path(manifests: Mapping[int, Manifest], step: int) -> tuple[Manifest, ...]:
    """The checkpoints from the keyframe to `step`.

    Raises:
        NotFoundError: there is no such step.
        ChainError: a step on the way is gone or was saved again. (It may still load, from links of its own.)
    """
    if step not in manifests:
        raise NotFoundError(f"step {step}", found="no such checkpoint", expected=known(manifests), do="list the store")
    for base in manifests[step].bases:
        if not is_live(manifests, base):
            other = manifests.get(base.step)
            raise ChainError(
                f"step {step}, base step {base.step}",
                found=f"a file with digest {other.digest}" if other else "no such checkpoint",
                expected=f"the file with digest {base.digest}",
                do=f"`compact` step {step} while it loads, or restore another checkpoint",
            )
    return tuple(manifests[base.step] for base in files(manifests[step]))


def known(manifests: Mapping[int, Manifest]) -> str:
    """The steps there are, for a message."""
    steps = sorted(manifests)
    if not steps:
        return "a step, but there is none yet"
    return "one of " + ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]]))
