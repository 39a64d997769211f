"""What `convert` does once it knows what to convert, and what it says of it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, note, say, waiting
from shrinkpoint.cli.table import Column, show
from shrinkpoint.errors import CorruptError, LossWarning, PolicyError, ShrinkpointError
from shrinkpoint.foreign import back, ours
from shrinkpoint.foreign.checkpoint import Checkpoint
from shrinkpoint.foreign.compare import difference, same_bits
from shrinkpoint.foreign.into import Into, Row, taken, verify
from shrinkpoint.foreign.leaves import named, tensor_of, valued
from shrinkpoint.foreign.part import inside
from shrinkpoint.foreign.run import Run
from shrinkpoint.foreign.weigh import Scale
from shrinkpoint.schemes import Scheme
from shrinkpoint.state import flatten
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store.file import write_file
from shrinkpoint.store.single import decode_file


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    source: Path
    out: Path | None
    scheme: str
    evaluate: str | None
    threshold: float
    higher: bool
    keyframe_every: int
    verify: bool
    opaque: bool
    force: bool
    json: bool

    def made(self) -> Scheme:
        """The scheme, by the name that `bench` knows it under.

        Raises:
            PolicyError: nobody knows it, or it searches and there is nothing to evaluate.
        """
        from shrinkpoint.harness import system
        from shrinkpoint.harness.evaluation import named as function

        evaluate = None if self.evaluate is None else function(self.evaluate)
        chain = system(self.scheme, evaluate=evaluate, threshold=self.threshold, higher_is_better=self.higher)
        return chain.make(evaluate=evaluate) if chain.searches else chain.make()


def inward(run: Run, wish: Wish, *, dry_run: bool) -> None:
    """Into a store or a file of ours; or only onto the scale."""
    _say_left_out(run)
    scheme = wish.made()
    out = None if dry_run else wish.out
    if out is not None and out.suffix == ".safetensors" and not out.is_dir():
        _one_file(run, out, wish, scheme)
        return
    storage: Storage = Scale() if out is None else _store(wish.source, out)
    began = time.perf_counter()
    rows, verified = _filled(storage, run.checkpoints, wish, scheme), None
    took = time.perf_counter() - began
    if out is not None and wish.verify:
        verified = _verified(storage, run.checkpoints, wish)
    _report(rows, wish, out, took, verified)
    _say_opaque(rows)


def outward(run: Run, out: Path, wish: Wish, form: str) -> None:
    """As others read it: one checkpoint to `out`, several of a run into it."""
    _say_left_out(run)
    _apart(wish.source, out)
    several = run.whole and len(run.checkpoints) > 1
    taken_: set[str] = set()
    written = [_written(one, out, wish, form, taken_ if several else None) for one in run.checkpoints]
    if wish.json:
        emit({"from": str(wish.source), "to": str(out), "verified": wish.verify, "written": written})
        return
    for row in written:
        said = "there already" if row["done"] else words.size(row["bytes"])
        say(f"{row['out']}: {row['form']}, {said}, from {row['name']}")
        if row["left_out"]:
            values = words.count(row["left_out"], "plain value")
            note(f"{row['out']}: {values} left out: safetensors holds tensors only (--to torch has all)")
    _say_verified(len(written) if wish.verify else None, wish)


def _filled(storage: Storage, checkpoints: Sequence[Checkpoint], wish: Wish, scheme: Scheme) -> list[Row]:
    rows = []
    into = Into(
        storage, scheme=scheme, keyframe_every=wish.keyframe_every, force=wish.force, opaque=wish.opaque
    )  # fmt: skip
    with into, _losses_said():
        for number, one in enumerate(checkpoints, 1):
            with waiting(f"{number}/{len(checkpoints)} {one.name}"):
                rows.append(into.add(one))
    return rows


def _verified(storage: Storage, checkpoints: Sequence[Checkpoint], wish: Wish) -> tuple[int, int]:
    """How many were decoded and compared, and how many of them bit for bit."""
    done = []
    with waiting("comparing what was written with its source"):
        done += [exact for _, exact in verify(storage, checkpoints, opaque=wish.opaque)]
    return len(done), sum(done)


def _one_file(run: Run, out: Path, wish: Wish, scheme: Scheme) -> None:
    if len(run.checkpoints) > 1:
        found, do = f"{len(run.checkpoints)} checkpoints", "name a directory, or choose one with --step"
        raise PolicyError(str(out), found=found, expected="one for a single file", do=do)
    _apart(wish.source, out)
    _free(out, wish)
    one, began = run.checkpoints[0], time.perf_counter()
    flat, opaque = taken(one, wish.opaque)
    with waiting(f"writing {out}"), _losses_said():
        written = write_file(
            LocalStorage(out.absolute().parent), out.name, scheme.quantize(flat, None), scheme=scheme, reference=None,
            parent=None,
        )  # fmt: skip
    verified = None
    if wish.verify:
        decoded, _ = decode_file(out.absolute())
        exact = scheme.id == "lossless"
        what = difference(flat, decoded) if exact else ""
        if what:
            raise CorruptError(str(out), found=what, expected=f"what {one.name} holds", do="report this")
        verified = (1, int(exact))
    seconds = time.perf_counter() - began
    row = Row(one.step, one.name, flat.nbytes, one.bytes, written.report.stored_bytes, True, seconds, opaque=opaque)
    _report([row], wish, out, seconds, verified)
    _say_opaque([row])


def _written(one: Checkpoint, out: Path, wish: Wish, form: str, taken_: set[str] | None) -> dict[str, Any]:
    """Write one to `out`, or into it under a name that is not taken yet."""
    with waiting(f"{one.name}"):
        state = one.read(opaque=wish.opaque)
        said = back.form_of(state, form, str(one.path))
        target = out
        if taken_ is not None:
            target = inside(out, said["name"] or f"step-{one.step}", str(one.path))
            target = target.with_name(back.free_name(target.name, one.step, form, taken_))
            taken_.add(target.name.casefold())
        exact = said["form"] == "torch" or (form == "original" and not isinstance(one, ours.Folder))
        done = target.exists() and not wish.force and _is_like(target, state, said, exact)
        if not done:
            _free(target, wish)
            left_out = back.write(target, state, said)
            what = _unlike(target, state, said, exact) if wish.verify else ""
            if what:
                raise CorruptError(str(target), found=what, expected=f"what {one.name} holds", do="report this")
    size = sum(path.stat().st_size for path in [target, *target.rglob("*")] if path.is_file())
    return {
        "step": one.step, "name": one.name, "out": str(target), "form": said["form"], "bytes": size,
        "left_out": 0 if done else left_out, "done": done,
    }  # fmt: skip


def _is_like(target: Path, state: Any, said: dict[str, Any], exact: bool) -> bool:
    """Whether what is there already is what would be written."""
    try:
        return not _unlike(target, state, said, exact)
    except (ShrinkpointError, OSError):  # it is something else altogether
        return False


def _unlike(target: Path, state: Any, said: dict[str, Any], exact: bool) -> str:
    """In what a file or a directory differs from a state; "" where it holds what its form can hold of it.

    Args:
        exact: also the kinds of the nests have to be the same, and what shares memory.
    """
    content, found = back.content_of(state), back.reread(target, said)
    if exact:
        flat, other = flatten(content), flatten(found)
        if flat.tree != other.tree:
            return "other plain values or another nest"
        given, there = dict[str, Any](flat.tensors), dict[str, Any](other.tensors)
    elif said["form"] == "safetensors":
        given, there = dict[str, Any](back.tensors_of(content)[0]), found
    else:
        given, there = named(content), named(found)
    return next((f"{name} is different" for name, leaf in given.items() if not _alike(leaf, there.get(name))), "")


def _alike(a: Any, b: Any) -> bool:
    if not valued(a):
        return repr(a) == repr(b)
    if not valued(b):
        return False
    one, other = tensor_of(a), tensor_of(b)
    return one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)


def _store(source: Path, out: Path) -> Storage:
    _apart(source, out)
    if out.is_file():
        raise PolicyError(str(out), found="a file", expected="the directory of a store", do="choose another name")
    if out.is_dir() and not ours.is_store(out) and not ours.is_begun(out):
        found = "a directory with other things in it"
        raise PolicyError(str(out), found=found, expected="a store, or a new directory", do="choose another name")
    return LocalStorage(out)


def _apart(source: Path, out: Path) -> None:
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        do = "choose a place outside"
        raise PolicyError(str(out), found=f"a place in, above or at {source}", expected="another one", do=do)


def _free(out: Path, wish: Wish) -> None:
    if out.exists() and not wish.force and (out.is_file() or any(out.iterdir())):
        raise PolicyError(
            str(out), found="something that exists", expected="a new name", do="add --force to replace it"
        )


@contextmanager
def _losses_said() -> Iterator[None]:
    """What a scheme warns of becomes a note, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, LossWarning)):
        note(text)


def _report(
    rows: Sequence[Row], wish: Wish, out: Path | None, seconds: float, verified: tuple[int, int] | None
) -> None:
    raw, before, after = (sum(getattr(row, key) for row in rows) for key in ("raw", "before", "after"))
    if wish.json:
        emit({
            "from": str(wish.source), "to": None if out is None else str(out), "dry_run": out is None,
            "scheme": wish.scheme, "raw_bytes": raw, "before_bytes": before, "after_bytes": after, "seconds": seconds,
            "verified": None if verified is None else verified[0], "exact": None if verified is None else verified[1],
            "checkpoints": [row.to_json() for row in rows],
        })  # fmt: skip
        return
    show(_columns(rows, raw, before, after, seconds), totals=True)
    kept = f"{before / after:.2f} times smaller" if after else "nothing"
    place = "would take" if out is None else f"take, in {out},"
    say(
        f"{words.count(len(rows), 'checkpoint')} of {words.size(before)} {place} {words.size(after)}: "
        f"{kept}, {words.size(max(0, before - after))} saved"
    )
    _say_verified(verified and verified[0], wish)
    if verified and verified[1] < verified[0]:
        note("what a lossy scheme wrote was compared but for its values")


def _columns(rows: Sequence[Row], raw: int, before: int, after: int, seconds: float) -> list[Column]:
    times = [f"{row.seconds:.2f}" for row in rows]
    return [
        Column("step", [*(str(row.step) for row in rows), "all"], right=True),
        Column("from", [*(row.name for row in rows), ""], rank=3, wrap=True),
        Column(
            "kind", [*("there" if row.done else "keyframe" if row.keyframe else "delta" for row in rows), ""], rank=4
        ),
        Column("tensors", [*(words.size(row.raw) for row in rows), words.size(raw)], right=True, rank=2),
        Column("now", [*(words.size(row.before) for row in rows), words.size(before)], right=True),
        Column("after", [*(words.size(row.after) for row in rows), words.size(after)], right=True),
        Column(
            "ratio", [*(words.ratio(row.before, row.after) for row in rows), words.ratio(before, after)], right=True
        ),
        Column("seconds", [*times, f"{seconds:.2f}"], right=True, rank=1),
    ]


def _say_left_out(run: Run) -> None:
    for path in run.left_out:
        note(f"{path}: left out, its name says no step or it is no checkpoint of this run")


def _say_opaque(rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(name for row in rows for name in row.opaque):
        note(f"{name}: taken along as it is, for it cannot be read without running code that it names")


def _say_verified(count: int | None, wish: Wish) -> None:
    if count is not None and not wish.json:
        say(f"verified: {words.count(count, 'checkpoint')} decoded and compared with {wish.source}")
