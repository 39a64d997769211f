"""Golden files of points of lattices: every law, dtype and shape, parents of every kind, and what fisher writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden.content import Golden, optimizer_state, randn
from helpers.fingerprint import fingerprint
from helpers.lattice_records import lattice_of, made, points_of, told_by_contexts
from helpers.round_trip import Loop

import shrinkpoint as sp
from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten, unflatten

SHAPES = {"a": (30, 40), "b": (300,), "c": (), "d": (3, 4, 5, 2), "e": (1, 9), "f": (9, 1)}
FIRST, SECOND = "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def settled(points: dict[str, LatticeTensor], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A state whose tensors are points, and the scheme that makes them."""
    state = {name: torch.zeros(one.codes.shape, dtype=dtype) for name, one in points.items()}
    return {"state": state, "scheme": QuantizationPlan("golden", points)}


def of_law(law: str, random: int, **lattice: int) -> dict[str, LatticeTensor]:
    return {name: points_of(law, shape, random=random, **lattice) for name, shape in SHAPES.items()}


def points() -> Iterator[tuple[str, Golden]]:
    """Every law alone, on a parent of its own lattices, and on others."""
    for law, step in (("linear", 1), ("log", 24)):
        base = of_law(law, 1, at=-40, step=step)
        yield f"points_{law}_base", Golden(**settled(base), shows=(f'"law": "{law}"',))
        shows = ('"base": true, "inherited": true',)
        yield f"points_{law}", Golden(**settled(_coded_anew(base, 0)), shows=shows, base=f"points_{law}_base")
        if law == "linear":
            yield "points_linear_seeds", Golden(**settled(_coded_anew(base, 9)), shows=shows, base="points_linear_base")
        others, shows = (
            of_law(law, 2, at=-37, step=step, seed=5),
            ('"base": true}',) if step == 1 else ('"base": true',),
        )
        yield f"points_{law}_others", Golden(**settled(others), shows=shows, base=f"points_{law}_base")
    kept = {**of_law("linear", 2, at=-37, seed=5), "b": points_of("linear", (300,), random=2, at=-36, seed=6)}
    yield "points_same", Golden(**settled(kept), shows=("same", "gridded"), base="points_linear_others")
    empty = {"a": points_of("linear", (0,)), "b": points_of("linear", (3, 0, 2))}
    yield "points_empty", Golden(**settled(empty), shows=("gridded",))
    yield from _far()
    yield from _by_contexts()
    yield from _on_any_values()
    optimizer = optimizer_state(torch.zeros(30, 40), torch.zeros(30, 40))
    moments = {SECOND: points_of("log", (30, 40), at=-200, step=24), FIRST: points_of("relative", (30, 40), seed=7)}
    moments[FIRST] = replace(moments[FIRST], relative_to=SECOND)
    yield (
        "points_relative",
        Golden({"optimizer": optimizer}, ('"others": [[',), scheme=QuantizationPlan("golden", moments)),
    )


def _coded_anew(base: dict[str, LatticeTensor], seed: int) -> dict[str, LatticeTensor]:
    near = {name: torch.randint(-1, 2, one.codes.shape, generator=_random(3)) for name, one in base.items()}
    return {
        name: LatticeTensor((one.codes + near[name]).clamp(min=-127).short(), replace(one.lattice, seed=seed))
        for name, one in base.items()
    }


def _far() -> Iterator[tuple[str, Golden]]:
    """Differences and exponents that no byte has, and the ends of what both may be."""
    codes = torch.tensor([0, 127, -127, 128, -128, 32766, -32766, 1, 255, -300]).repeat(4).reshape(5, 8).short()
    rows, columns = torch.tensor([960, 500, -960, 0, 127]).short(), torch.zeros(8).short()
    linear = Lattice("linear", rows, columns, seed=2**32 - 1)
    for name, lattice in (("points_far", linear), ("points_far_log", Lattice("log", rows, columns, 3))):
        yield name, Golden(**settled({"w.weight": LatticeTensor(codes, lattice)}), shows=("gridded",))
    large = Lattice("linear", torch.zeros(1).short() - 80, torch.zeros(1).short(), seed=3)
    many = LatticeTensor(torch.randint(-2, 3, (40_000,), generator=_random(4)).short(), large)
    yield "points_many", Golden(**settled({"w.weight": many}), shows=("gridded",))  # 32 lanes


def _by_contexts() -> Iterator[tuple[str, Golden]]:
    """Points that say nothing but which context they have: a reader that takes another one cannot read them."""
    values = randn(50, 60, seed=5) * torch.exp2(8 * randn(50, 60, seed=6))
    yield "points_contexts_base", Golden({"w.weight": values.where(randn(50, 60, seed=7) < 2, 0.0).abs()})
    parent = Reference({"w.weight": values.where(randn(50, 60, seed=7) < 2, 0.0).abs()})
    for law, step in (("linear", 1), ("log", 24)):
        any_points = points_of(law, (50, 60), spread=60, step=step, seed=11 if law == "linear" else 0)
        told = told_by_contexts(made({"w.weight": any_points}, "F32", parent)).points
        shows = (f'"law": "{law}"', '"base": true')
        yield f"points_contexts_{law}", Golden(**settled(told), shows=shows, base="points_contexts_base")


def _on_any_values() -> Iterator[tuple[str, Golden]]:
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 65000.0, 3.3e38, -3.3e38, 6e-8, 1e-40, 1 / 3, -1.0]
    values = torch.tensor(special).expand(13, 12).contiguous()
    for kind, dtype in TYPES.items():
        yield f"points_{kind}_base", Golden({"w.weight": values.to(dtype), "v.weight": values.to(dtype)})
        both = {
            "w.weight": points_of("linear", (13, 12), seed=4), "v.weight": points_of("log", (13, 12), step=8, random=5),
        }  # fmt: skip
        shows = ('"law": "linear"', '"law": "log"', '"base": true')
        yield f"points_{kind}", Golden(**settled(both, dtype), shows=shows, base=f"points_{kind}_base")
    shapes = {"a.weight": (40, 50), "b.weight": (300,)}
    named = {name: points_of("linear", shape, at=-40, seed=1) for name, shape in shapes.items()}
    named["c.weight"] = LatticeTensor(torch.zeros((), dtype=torch.int16), lattice_of("linear", ()))
    yield "points_on_codes", Golden(**settled(named), shows=("gridded", '"base": true'), base="quantized_context")
    state = {name: torch.zeros(one.codes.shape) for name, one in named.items()}
    yield "lossless_on_points", Golden(state, ("coded",), base="points_on_codes")


def fisher() -> Iterator[tuple[str, Golden]]:
    """A keyframe, a delta, and a delta after a restore: with another dither on the same steps."""
    loop, scheme = Loop(width=24), sp.Fisher(relative_error=0.1)
    held, chosen = None, None
    for name, base, generation in (
        ("fisher_base", None, 0), ("fisher_delta", "fisher_base", 0), ("fisher_restored", "fisher_delta", 1),
    ):  # fmt: skip
        state = _state_of(loop)
        flat = flatten(state)
        if chosen is not None and generation:
            scheme.resume(chosen.loss, generation)
        chosen = scheme.plan(flat, held)
        kept = chosen.quantize(flat, held)
        held = Reference(kept.state.tensors, kept.quantized)
        inherits = () if base is None else ('"base": true, "inherited": true',)
        laws = ('"law": "linear"', '"law": "relative"', '"law": "log"')
        yield name, Golden(state, (*laws, "copy", *inherits), base, chosen)


def _state_of(loop: Loop) -> dict[str, Any]:
    """With narrow copies of the weights."""
    state = loop.steps(4)
    return {"half": {name: x.bfloat16() for name, x in state["model"].items()}, **state}


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_fisher_store(place: Path) -> dict[str, str]:
    """A store of points, with a restore in the middle and one checkpoint that was written again."""
    expected: dict[str, Any] = {}
    loop, scheme = Loop(width=6), sp.Fisher(relative_error=0.1)
    with warnings.catch_warnings(), sp.Store(place, keyframe_every=9) as store:
        warnings.simplefilter("ignore", LossWarning)
        for step in (1, 2, 3, 4):
            state, restores = loop.steps(2), step // 3
            scheme.resume(store.manifest(step - 1).loss if step > 1 else None, restores)
            store.save(step, state, scheme=scheme, lossy_restores=restores)
            assert store.reference is not None
            flat: FlatState = flatten(state)
            expected[str(step)] = fingerprint(unflatten(flat.tree, dict(store.reference.tensors)))
        store.forget(3)
        store.compact()
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected
