"""Which runs the study of the wire consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

Pair = tuple[str, str]
"""Specs forward and backward; "" is uncompressed."""

TASKS = ("image", "text")
PLAIN: Pair = ("", "")
TOPS = (50, 30, 20, 10, 5, 2, 1, 0.5, 0.2)
SHARED = (50, 30, 20, 10, 5, 2, 1, 0.5, 0.2)
"""Shares of TopK whose gradients are sent at the indices of the activations."""
FEEDBACKS = ("ef", "efmixed", "ef21")
KEYS: dict[str, tuple[Pair, ...]] = {
    "image": (
        PLAIN,
        ("q4", "q8"),
        ("q8", "q4"),
        ("q4:64", "q4:64"),
        ("n3:64", "q4:64"),
        ("top10", "top10"),
        ("ef21(top10)", "ef21(top10)"),
        ("aq(top10)", "top10"),
        ("aq(top30)", "top30"),
    ),
    "text": (
        PLAIN,
        ("q4", "q8"),
        ("q8", "q4"),
        ("q4:64", "q4:64"),
        ("n3:64", "q4:64"),
        ("top10", "top10"),
        ("top10", "same"),
    ),
}
"""What is run with three seeds, first of all."""
_SHARED_SENTENCES: tuple[Pair, ...] = (
    ("q2", "q8"),
    ("q8", "q2"),
    ("q4:64", "q8:64"),
    ("q8:64", "q4:64"),
    ("q2:64", "q8:64"),
    ("q8:64", "q2:64"),
    ("n4:64", "n4:64"),
    ("q4:64:dither", "q4:64:dither"),
    ("block4:32", "block4:32"),
    ("h64(q4:64)", "h64(q4:64)"),
    ("ef(top10)", "ef(top10)"),
    ("efmixed(top10)", "efmixed(top10)"),
)
"""What sentences about both tasks rest on."""
SENTENCES: dict[str, tuple[Pair, ...]] = {
    "image": (
        ("top30", "top30"),
        ("top5", "top5"),
        ("top2", "top2"),
        ("top1", "top1"),
        ("top0.5", "top0.5"),
        ("top10", ""),
        ("", "top10"),
        ("top10", "same"),
        *_SHARED_SENTENCES,
    ),
    "text": (
        ("top30", "same"),
        ("top5", "same"),
        ("top2", "same"),
        ("top10", ""),
        ("", "top10"),
        *_SHARED_SENTENCES,
        ("ef21(top10)", "ef21(top10)"),
        ("aq(n3:64, warmup=0)", "q6:64"),
    ),
}
"""What sentences of docs/wire_studies.md rest on besides: three seeds as well."""
ONE_TABLE: dict[str, tuple[Pair, ...]] = {
    "still": (PLAIN, ("top10", "top10"), ("aq(top30)", "top30"), ("aq(top10)", "top10")),
    "wide": (
        PLAIN,
        ("q4:64", "q4:64"),
        ("top10", "top10"),
        ("q2", "q8"),
        ("q8", "q2"),
        ("top2", "top2"),
        ("ef21(top10)", "ef21(top10)"),
        ("top10", "same"),
        ("q4", "q8"),
        ("q8", "q4"),
    ),
}
"""Tasks with a few runs, beside those of "image". A run of "wide" takes 20 times as long, so these are the last."""
WARMUPS: dict[str, tuple[tuple[Pair, float], ...]] = {
    "image": tuple((pair, 0.2) for pair in (("top10",) * 2, ("ef(top10)",) * 2, ("ef21(top10)",) * 2)),
    "text": tuple((pair, 0.25) for pair in (("top10", "same"), ("top10",) * 2, ("ef21(top10)",) * 2)),
}
"""Compression that begins after this share of the steps; three seeds."""


@dataclass(frozen=True)
class Job:
    """One run: a task, a seed, and what its links do.

    Attributes:
        warmup: share of the steps, at the start, that are not compressed.
    """

    task: str
    seed: int = 0
    forward: str = ""
    backward: str = ""
    quick: bool = False
    warmup: float = 0.0

    @property
    def pair(self) -> Pair:
        return self.forward, self.backward

    @property
    def key(self) -> bool:
        return self.pair in KEYS.get(self.task, ()) and not self.warmup

    @property
    def words(self) -> set[str]:
        """What --only may name it by."""
        named = {f"{name}={value}" for name, value in asdict(self).items()}
        parts = {part for part, pairs in parts_of(self.task).items() if self.pair in pairs}
        parts = {"warmup"} if self.warmup else parts
        return named | parts | {self.task, self.forward, self.backward} | ({"key"} if self.key else set())

    def __str__(self) -> str:
        return f"{self.task} seed={self.seed} {shown(self.pair, self.warmup)}"


def shown(pair: Pair, warmup: float = 0.0) -> str:
    specs = " / ".join(spec or "-" for spec in pair)
    return f"{specs} after {warmup:.0%}" if warmup else specs


def topped(share: float) -> Pair:
    return f"top{share:g}", f"top{share:g}"


def aq(operator: str, *, warm: bool = True) -> str:
    """By sample; not warm: a sample's first message is a change from 0."""
    return f"aq({operator})" if warm else f"aq({operator}, warmup=0)"


def parts_of(task: str) -> dict[str, tuple[Pair, ...]]:
    """The grids of arXiv 2401.07788, then what goes past them, by the question they answer."""
    if task in ONE_TABLE:
        return {task: ONE_TABLE[task]}
    bits = (8, 6, 4, 2) if task == "image" else (8, 4, 2)
    return {
        "bits": tuple((f"q{there}", f"q{back}") for there in bits for back in bits),
        "topk": tuple(topped(share) for share in TOPS),
        "one way": tuple(pair for share in (10, 5) for pair in ((f"top{share}", ""), ("", f"top{share}"))),
        "same": tuple((f"top{share:g}", "same") for share in SHARED),
        "feedback": tuple((f"{name}(top{share})",) * 2 for name in FEEDBACKS for share in (30, 10)),
        "aq": (
            (aq("q4"), "q8"),
            (aq("q2"), "q8"),
            *((aq(f"top{share}"), f"top{share}") for share in (50, 30, 20, 10)),
        ),
        "groups": (("q4:64", "q8:64"), ("q8:64", "q4:64"), ("q2:64", "q8:64"), ("q8:64", "q2:64"), ("q4:64", "q4:64")),
        "equal": _equal(task),
        "reach": _reach(task),
    }


def _equal(task: str) -> tuple[Pair, ...]:
    """Alternatives of about the same bytes, the same operator in both directions."""
    two = ("q2:64", "n2:64", "h64(q2:64)")
    three = ("q3", "q3:64", "n3:64", "block3:32", "h64(n3:64)", "q3:64:dither")
    four = ("q4:64:dither", "q4:row", "n4:64", "block4:32", "h64(q4:64)")
    four += ("q4:channel",) if task == "image" else ()  # on text a channel is a row
    return (*((spec, spec) for spec in (*two, *three, *four)), ("top10:q4:64", "same:q4:64"))


def _reach(task: str) -> tuple[Pair, ...]:
    """At least 8 times fewer bytes forward, and 4 backward."""
    some = (("n3:64", "q4:64"), ("n3:64", "q6:64"), (aq("q2:64"), "q4:64"))
    if task == "image":
        return some
    cold = ("q2:64", "n2:64", "n3:64", "q3:64")
    return (*some, *((aq(spec, warm=False), "q6:64") for spec in cold))


def grid(quick: bool) -> list[Job]:
    """All runs: what decides most first."""
    if quick:
        warm = [Job("image", 0, *topped(10), quick=True, warmup=0.5)]
        tasks = (*TASKS, *ONE_TABLE)
        return [Job(task, 0, *pair, quick=True) for task in tasks for pair in _toys(task)] + warm
    jobs = [Job(task, seed, *pair) for seed in (0, 1, 2) for task in TASKS for pair in KEYS[task]]
    order = ("topk", "bits", "groups", "feedback", "aq", "reach", "equal", "same", "one way")
    jobs += [Job(task, 0, *pair) for part in order for task in TASKS for pair in parts_of(task)[part]]
    warmups = [(task, *warm) for task, some in WARMUPS.items() for warm in some]
    jobs += [Job(task, 0, *pair, warmup=share) for task, pair, share in warmups]
    jobs += [Job(task, seed, *pair) for seed in (1, 2) for task, pairs in SENTENCES.items() for pair in pairs]
    jobs += [Job(task, seed, *pair, warmup=share) for seed in (1, 2) for task, pair, share in warmups]
    jobs += [Job(task, seed, *pair) for task, pairs in ONE_TABLE.items() for seed in (0, 1, 2) for pair in pairs]
    return list(dict.fromkeys(jobs))


def _toys(task: str) -> Iterator[Pair]:
    yield from (PLAIN, topped(10))
    if task in ONE_TABLE:
        yield ONE_TABLE[task][-1]
        return
    yield from (("q4", "q8"), ("q8", "q4"), ("q4:64", "q4:64"), ("top10", "same"), ("ef21(top10)", "ef21(top10)"))
    yield from (("efmixed(top30)",) * 2, (aq("q2"), "q8"), ("h64(n3:64)", "q4:64:dither"))


def chosen(jobs: Iterable[Job], only: Iterable[str], seeds: Iterable[int] | None) -> Iterator[Job]:
    """Those that all of the words fit."""
    wanted, allowed = set(only), None if seeds is None else set(seeds)
    return (job for job in jobs if wanted <= job.words and (allowed is None or job.seed in allowed))
