"""Golden files of what loses: codes in every form, differences to the parent's values, codes under other codes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden.content import Golden, optimizer_state, randn
from helpers.codebooks import Rounding, moved, symbols_of
from helpers.fingerprint import fingerprint
from helpers.round_trip import Loop

import shrinkpoint as sp
from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.tensors.flatten import flatten, unflatten

WEIGHT, FIRST, SECOND = "model/w.weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"


def settled(
    symbols: dict[str, CodebookTensor], dtype: torch.dtype = torch.float32, coders: Any = CODERS
) -> dict[str, Any]:
    """A state whose tensors are made from symbols, and the scheme that makes them."""
    state = {name: torch.zeros(one.codes.shape, dtype=dtype) for name, one in symbols.items()}
    return {"state": state, "scheme": QuantizationPlan("golden", symbols, coders=coders)}


def pushed_state(step: int) -> dict[str, Any]:
    """Weights, and moments that say which of them have moved: below -1 up, above 1 down."""
    moment, weight = randn(90, 100, seed=3), randn(90, 100, seed=4) * 0.1
    down = (moment > 1).float() - (moment < -1).float()
    push = torch.where(down == 0, 2.0**-17, down * 2.0**-13)
    optimizer = optimizer_state(push, torch.full((90, 100), 2.0**-26))
    return {"model": {"w.weight": weight - 0.1 * step * down}, "optimizer": optimizer}


def quantized() -> Iterator[tuple[str, Golden]]:
    """Every form of codes, centers and exact values; deltas stand on `quantized_base` or on a delta of it."""
    shapes = {"a.weight": (40, 50), "b.weight": (300,), "c.weight": ()}
    before = {name: symbols_of(shape, 12, seed=1) for name, shape in shapes.items()}
    after = {name: moved(one, share=0.2) for name, one in before.items()}
    how = {
        "context": ('"predictor": "base"',), "alone": ('"run": {"tokens": "codes"}',), "packed": ('"packed": 4',),
        "rearranged": ('[14, true, true]',), "runs": ('[14, false, true]',), "huffman": ('[14, false, false]',),
    }  # fmt: skip
    yield "quantized_base", Golden(**settled(before), shows=('"quantized", "bins": 12, "first": 2',))
    for coder, shows in how.items():
        base = None if coder in ("alone", "packed") else "quantized_base"
        yield f"quantized_{coder}", Golden(**settled(after, coders=(coder,)), shows=shows, base=base)
    less = {name: moved(one, bins=5) for name, one in after.items()}
    yield "quantized_fewer_bins", Golden(**settled(less), shows=('"bins": 5', '"base": true'), base="quantized_context")
    kept = {**less, "b.weight": moved(less["b.weight"], seed=3, share=0.5)}
    yield "quantized_same", Golden(**settled(kept), shows=("same", "quantized"), base="quantized_fewer_bins")
    last = {name: moved(one, seed=4, share=0.3) for name, one in kept.items()}
    yield "quantized_on_same", Golden(**settled(last), shows=('"base": true',), base="quantized_same")

    fine = {"w.weight": symbols_of((30, 40), 254, exact=torch.float32, special=0.5)}
    yield "quantized_inner_base", Golden(**settled(fine), shows=('"exact": "F32", "exacts": {"tokens": "level"',))
    near = {name: moved(one) for name, one in fine.items()}
    shows = ('"centers": {"tokens": "delta"', '"exacts": {"tokens": "delta"')
    yield "quantized_inner", Golden(**settled(near), shows=shows, base="quantized_inner_base")
    for first, dtype in ((0, torch.float16), (1, torch.bfloat16), (2, torch.float64)):
        symbols = {"w.weight": symbols_of((20, 30), 256 - first, first), "e.weight": symbols_of((0, 3), 4, first)}
        shows = (f'"first": {first}', f'"bins": {256 - first}')
        yield f"quantized_first_{first}", Golden(**settled(symbols, dtype), shows=shows)

    scheme = Rounding(bins=8)
    yield "quantized_moments_base", Golden(pushed_state(0), ("quantized",), scheme=scheme)
    shows = ('"moments": true, "top": 9', '"moments": [[[')
    yield "quantized_moments", Golden(pushed_state(1), shows, "quantized_moments_base", scheme=scheme)
    state = {"model": {"w.weight": randn(30, 40) * 0.1}, "half": {"w.weight": torch.zeros(30, 40).bfloat16()}}
    yield "quantized_master", Golden(state, ("quantized", "copy"), scheme=scheme)


def residual() -> Iterator[tuple[str, Golden]]:
    """Differences to the parent's values, whether it has codes or not."""
    shapes = {"a.weight": (40, 50), "b.weight": (300,), "c.weight": ()}
    values = {name: randn(*shape, seed=7) * 0.1 for name, shape in shapes.items()}
    now = {name: replace(symbols_of(shape, 12, seed=2), residual=True) for name, shape in shapes.items()}
    how = {
        "alone": '"codes": {"run": {"tokens": "codes"}}', "packed": '"packed": 4', "lzma": '"lzma": 4',
        "huffman": '"cyclic": [14, false, false]',
    }  # fmt: skip
    yield "residual_base", Golden(values)
    for coder, shows in how.items():
        golden = Golden(**settled(now, coders=(coder,)), shows=(shows, '"residual": true'), base="residual_base")
        yield f"residual_{coder}", golden
    more = {name: moved(one, share=0.5) for name, one in now.items()}
    yield "residual_on_residual", Golden(**settled(more), shows=('"residual": true',), base="residual_alone")
    yield "residual_on_codes", Golden(**settled(now), shows=('"residual": true',), base="quantized_context")
    still = replace(more["a.weight"], codes=torch.zeros(40, 50, dtype=torch.uint8), exact=torch.empty(0).bfloat16())
    shows = ('"same"', '"residual": true')
    yield "residual_same", Golden(**settled({**more, "a.weight": still}), shows=shows, base="residual_on_residual")
    written = {name: _written(x) for name, x in values.items()}
    shows = ('"bins": 1, "first": 1', '"exact": "F32", "exacts": {"tokens": "delta"')
    yield "residual_exacts", Golden(**settled(written), shows=shows, base="residual_base")
    yield from _residual_dtypes()
    moment = pushed_state(0)["optimizer"]["state"][0]["exp_avg"]
    pushed = torch.where(moment.abs() > 2.0**-14, 2 + (moment < 0).byte(), 0).byte()
    one = CodebookTensor(pushed, torch.tensor([-0.1, 0.1]), torch.empty(0), residual=True)
    shows, scheme = ('"moments": true}', '"residual": true'), QuantizationPlan("golden", {WEIGHT: one})
    yield "residual_moments", Golden(pushed_state(0), shows, "quantized_moments_base", scheme)


def _written(x: torch.Tensor) -> CodebookTensor:
    """A third of the values anew, exactly, and of the others no difference."""
    codes = (randn(*x.shape, seed=8) < 0.5).byte()
    exact = (x * (1 + 1e-3 * randn(*x.shape, seed=9)))[codes == 0]
    return CodebookTensor(codes, torch.zeros(1), exact, first_code=1, residual=True)


def _residual_dtypes() -> Iterator[tuple[str, Golden]]:
    """Every code meets every kind of value: what moves, what would be too large, what is no number."""
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 65000.0, 3.3e38, -3.3e38, 6e-8, 1e-40, 1 / 3, -1.0]
    centers = torch.tensor([-3e38, -1e3, -1e-3, -6e-8, -1e-44, -0.0, 0.0, 1e-44, 1e-40, 6e-8, 1e-3, 1e3, 3e38])
    codes = torch.arange(13).byte().repeat_interleave(12).reshape(13, 12)
    one = CodebookTensor(codes, centers, torch.empty(0), 0, residual=True)
    for name, dtype in {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "f64": torch.float64,
    }.items():
        yield f"residual_{name}_base", Golden({"w.weight": torch.tensor(special).to(dtype).expand(13, 12).contiguous()})
        golden = Golden(**settled({"w.weight": one}, dtype), shows=('"residual": true',), base=f"residual_{name}_base")
        yield f"residual_{name}", golden


def under() -> Iterator[tuple[str, Golden]]:
    """Moments under the differences of the weights, second ones under first ones."""
    codes = symbols_of((90, 100), 7, special=0.95)
    symbols = {WEIGHT: replace(codes, residual=True)}
    for name, other, seed in ((FIRST, WEIGHT, 5), (SECOND, FIRST, 6)):
        one = symbols_of((90, 100), 15, seed=seed, special=0)
        kept = torch.where(codes.codes > 1, one.codes, 0)
        symbols[name] = CodebookTensor(kept, one.centers, one.exact[:0], context_name=other)
    shows = ('"under": [[1, 0, 1]]', '"under": [[2, 0, 1]]')
    for coder, form in (("context", '"predictor": "base"'), ("rearranged", "[17, true, true]")):
        scheme = QuantizationPlan("golden", symbols, coders=(coder,))
        yield (
            f"under_{coder}",
            Golden(pushed_state(0), (form, '"residual": true', *shows), "quantized_moments_base", scheme),
        )
    alone = {name: replace(one, residual=False) for name, one in symbols.items()}
    yield "under_alone", Golden(pushed_state(0), shows, scheme=QuantizationPlan("golden", alone))


def write_lossy_store(place: Path) -> dict[str, str]:
    """A store whose checkpoints are lossy, but for one in the middle, with one that was written again."""
    expected = {}
    loop, scheme = Loop(width=4), Rounding(loss={"chosen": {"bins": 8}, "degradation": 0.01, "worst": float("nan")})
    with warnings.catch_warnings(), sp.Store(place, keyframe_every=9) as store:
        warnings.simplefilter("ignore", LossWarning)
        for step in (1, 2, 3, 4, 5):
            state = {"model": loop.steps(1)["model"]}
            lossy = step != 3
            store.save(step, state, scheme=scheme if lossy else None, lossy_restores=step // 4)
            expected[str(step)] = fingerprint(scheme.expected(state) if lossy else state)
        store.forget(4)
        store.compact()
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected


def write_tracked_store(place: Path) -> dict[str, str]:
    """A store whose deltas are differences to what a reader has, with one that was written again."""
    expected: dict[str, Any] = {}
    weight, scheme, held = randn(64, 64).bfloat16().float(), sp.LCCheckpoint(bits=3), None
    with warnings.catch_warnings(), sp.Store(place, keyframe_every=9) as store:
        warnings.simplefilter("ignore", LossWarning)
        for step in (1, 2, 3, 4):
            state = {"model": {"w.weight": weight + (step - 1) * 1e-3 * randn(64, 64, seed=step)}}
            kept = scheme.quantize(flatten(state), held).state
            held = Reference(kept.tensors)
            expected[str(step)] = fingerprint(unflatten(kept.tree, kept.tensors))
            store.save(step, state, scheme=scheme)
        store.forget(3)
        store.compact()
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected
