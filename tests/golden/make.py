"""Writes the golden files of this release: one for every feature that a reader must support for ever.

Run by `make golden` when a release has added a feature; never by a test. It adds what is missing and refuses to change
what is there. `v3` is for format 3; its folders hold files by kind of record, stores, and checkpoint directories.

Into an empty folder it writes the same bytes again where training gives the same bits, but for two kinds of files.
Manifests, `forgotten` and `.metadata` hold times and identifiers. `fisher_restored` was written when logarithms of
second moments were float64. They are integers since (`quantize/statistics.py`): the mean of a column of that file,
-4.5004 eighths of an octave, becomes -4.4999, which rounds to another exponent. The file stays as it is.
"""

from __future__ import annotations

import copy
import json
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden.stores import PUBLISHED, RUNS, STORES, randn  # noqa: E402
from helpers.codebooks import Rounding, moved, symbols_of  # noqa: E402
from helpers.fingerprint import file_digests, fingerprint  # noqa: E402
from helpers.lattice_records import lattice_of, made, points_of, told_by_contexts  # noqa: E402
from helpers.round_trip import Loop  # noqa: E402
from helpers.strategies import TORCH_DTYPES  # noqa: E402

import shrinkpoint as sp  # noqa: E402
from shrinkpoint.codec.codebook_tensor import CodebookTensor  # noqa: E402
from shrinkpoint.codec.lattice import Lattice, LatticeTensor  # noqa: E402
from shrinkpoint.codec.reference import Reference  # noqa: E402
from shrinkpoint.container import FileReader, FileWriter  # noqa: E402
from shrinkpoint.container.metadata import FORMAT_VERSION  # noqa: E402
from shrinkpoint.schemes.plan import QuantizationPlan  # noqa: E402
from shrinkpoint.storage import LocalStorage  # noqa: E402
from shrinkpoint.tensors.flat_state import flatten, unflatten  # noqa: E402

ROOT = HERE / f"v{FORMAT_VERSION}"
EXPECTED = ROOT / "expected.json"
MAX_BYTES = 20_000
"""Largest golden file."""
NEWEST = ("F8_E8M0", "F4_X2")
"""Dtypes that not every torch we support has."""
WEIGHT, FIRST, SECOND = "model/w.weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"


@dataclass(frozen=True)
class Golden:
    """A file to be written.

    Attributes:
        state: what it holds.
        shows: text that its recipes must contain, so that it is what its name says.
        base: the golden file it is a delta against.
        scheme: None for a lossless one.
        spool: bytes of payload after which the writer reserves room for the header.
    """

    state: Any
    shows: tuple[str, ...] = ()
    base: str | None = None
    scheme: Any = None
    spool: int = FileWriter.spool


def optimizer_state(moment1: torch.Tensor, moment2: torch.Tensor) -> dict[str, Any]:
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
    return {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": moment1, "exp_avg_sq": moment2}},
        "param_groups": [group],
    }


def planned(quantized: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """A state of these quantized tensors, and the scheme that writes exactly them."""
    state = {name: torch.zeros(tensor.codes.shape, dtype=dtype) for name, tensor in quantized.items()}
    return {"state": state, "scheme": QuantizationPlan("golden", quantized, **options)}


def values_of(name: str, count: int) -> torch.Tensor:
    byte = torch.arange(count * TORCH_DTYPES[name].itemsize).mul(37).remainder(256).to(torch.uint8)
    return (byte & 1 if name == "BOOL" else byte).view(TORCH_DTYPES[name])


def plain_values() -> dict[Any, Any]:
    ordered = OrderedDict([("z", 1), ("a", 2)])
    versioned = OrderedDict(w=torch.arange(2.0))
    versioned._metadata = {"bn": {"version": 2}}  # type: ignore[attr-defined]
    storage = torch.arange(10.0)
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(3**99)],
        "floats": [0.0, -0.0, 1e-323, 0.1, float("inf"), -float("inf"), float("nan")],
        "texts": ["", "\u00e4\u2603\U0001f600", "\ud800", "\0", "$t"],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 2],
        "tuples": ((), (1, (2, [3]))),
        "size": torch.Size([2, 3]),
        "ordered": ordered,
        "counter": Counter("abracadabra"),
        "versioned": versioned,
        1: "int",
        -(2**70): "long",
        False: "bool",
        2.5: "float",
        None: "none",
        (1, "a"): "tuple",
        "keys": {"$t": 1, "a/b": 2, "100%": 3, "": 4},
        "numpy": np.arange(6, dtype=">i4").reshape(2, 3),
        "numpy scalars": [np.float32(0.1), np.bool_(True), np.int64(-5), np.complex128(1 + 2j)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "tied": [storage, storage, storage[2:5], storage.view(2, 5).t(), storage[::3]],
        "expanded": torch.ones(1).expand(3, 2),
        "0-d": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "same names": {1: torch.zeros(1), "1": torch.ones(1)},
    }


def formed_values() -> dict[Any, Any]:
    position = BytesIO(b"abc")
    position.seek(2)
    return {
        "paths": [Path("runs/\u00e9")],
        "torch": [torch.device("cuda", 1), torch.bfloat16],
        "times": [
            datetime(2026, 11, 28, 1, 2, 3, 4, timezone(timedelta(hours=-3))),
            date(2026, 1, 2),
            time(3, 4),
            timedelta(-1, 5),
        ],
        "python": [1 - 2j, complex(float("inf"), -0.0), range(2, 9, 3), slice(1, None), {1}, frozenset(["a"])],
        "enum": HTTPStatus.OK,
        "texts": [np.array([["a", ""], ["\u00e9", "ab"]], "U3"), np.array([b"a"], "S2"), np.array([], "U1")],
        "namespace": Namespace(rate=0.1, weight=torch.arange(3.0)),
        "deques": [deque([1, torch.ones(2)]), deque([2], maxlen=3)],
        "defaultdicts": [defaultdict(list, {1: [2]}), defaultdict(None, {})],
        "buffers": [position, BytesIO(bytes(range(256)) * 2)],
        Path("key"): 1,
        (HTTPStatus.OK, date(2026, 1, 2)): 2,
    }


def half_state(step: int) -> dict[str, Any]:
    """16-bit weights under 32-bit moments."""
    moment = randn(30, 40, seed=step) * 1e-3
    weight = (randn(30, 40, seed=9) * 0.1).bfloat16()
    factor = 1 if step == 0 else 1 + 0.01 * randn(30, 40, seed=5)
    return {"model": {"w.weight": (weight * factor).bfloat16()}, "optimizer": optimizer_state(moment, moment.square())}


def weights() -> torch.Tensor:
    return randn(25, 60) * torch.logspace(-3, 0, 25)[:, None]


def levels() -> Iterator[tuple[str, Golden]]:
    """Floats that stand alone, and moments."""
    yield "plain", Golden({"a.weight": randn(3, 4), "b": torch.arange(5), "c": torch.tensor(True)}, ("plain",))
    yield "empty", Golden({})
    yield "level_fp32", Golden({"w.weight": weights()}, ("level",))
    yield "level_bf16", Golden({"w.weight": randn(40, 60).bfloat16()}, ("level",))
    yield "level_fp16", Golden({"w.weight": randn(40, 60).half()}, ("level",))
    yield "level_fp64", Golden({"w.weight": randn(30, 40).double() * 0.1}, ("level",))
    yield "level_shift", Golden({"w.weight": randn(40, 60).bfloat16().float()}, ("shift",))
    moment = weights() * randn(1, 60, seed=3)
    state = {"model": {"w.weight": randn(25, 60, seed=1)}, "optimizer": optimizer_state(moment, moment.square() + 1e-9)}
    yield "moments", Golden(state, ("factors", "moment1"))
    alive = (torch.arange(25) % 3 == 0)[:, None]
    yield "dead_rows", Golden({"optimizer": optimizer_state(moment, moment.square() * alive)}, ("factors",))
    for name, drift in (("squares_base", 0.0), ("squares_delta", 0.03)):
        squares = moment.square() * (1 + drift * randn(25, 60, seed=8).square())
        state = {"optimizer": {"state": {0: {"exp_avg_sq": squares}}, "param_groups": [{"params": [0]}]}}
        yield name, Golden(state, ('"companion": "base"',) if drift else (), "squares_base" if drift else None)
    yield "chunks", Golden({"w.weight": weights()}, ('"chunk": 512',), scheme=sp.Lossless(chunk=512))
    yield "bundle", Golden({f"{i}.weight": randn(i, 7, seed=i) * 0.02 for i in range(1, 20)}, ("level",))


def deltas() -> Iterator[tuple[str, Golden]]:
    """Floats and counters after a parent, and Adam's own step."""
    before = weights()
    yield "delta_base", Golden({"w.weight": before, "i": torch.arange(900), "f": before[0].clone()})
    later = {
        "w.weight": before * (1 + 1e-4 * randn(25, 60, seed=2)),
        "i": torch.arange(1, 901),
        "f": before[0].clone(),
    }
    yield "delta_fp32", Golden(later, ('"predictor": "base"', "same"), "delta_base")
    yield "delta_of_delta", Golden({**later, "i": torch.arange(2, 902)}, ("delta", "same"), "delta_fp32")
    yield "delta_bf16_moments_base", Golden(half_state(0))
    yield "delta_bf16_moments", Golden(half_state(1), ('"moments": true',), "delta_bf16_moments_base")

    loop = Loop(width=9)
    yield "adam_base", Golden(loop.steps(5))
    yield "adam_step", Golden(loop.steps(1), ('"adam"', '"square"'), "adam_base")


def taps() -> Iterator[tuple[str, Golden]]:
    """Kernels of convolutions."""
    kernels = randn(16, 12, 1, 1) * (1 + 1e-3 * randn(16, 12, 3, 3, seed=1))
    yield "taps", Golden({"w.weight": kernels, "v.weight": kernels[:, :, :2, 0].contiguous()}, ('"taps": 9', '"tap"'))
    images = (randn(96, 24, 3, 3, seed=4).sign() * 0.5).bfloat16()
    drift = 1 + 2.0**-7 * (1 + randn(96, 24, 1, 1, seed=6).square()) * (torch.arange(24)[:, None, None] % 3 == 0)
    yield "taps_base", Golden({"w.weight": images})
    yield "taps_delta", Golden({"w.weight": (images * drift).bfloat16()}, ('"taps": 9', '"base"'), "taps_base")


def whole_numbers() -> Iterator[tuple[str, Golden]]:
    """Copies, integers, and every dtype and value that is not like the others."""
    masters = {f"{i}.weight": randn(20, 30, seed=i) for i in range(2)}
    casts = {name: x.bfloat16() for name, x in masters.items()}
    halves = {name: x.half() for name, x in masters.items()}
    state = {"master": masters, "model": casts, "half": halves, "ema": copy.deepcopy(masters)}
    yield "copies_and_cast", Golden(state, ("copy",))
    ints = torch.arange(1500).square()
    state = {
        "u8": (ints % 11).to(torch.uint8),
        "i16": (ints % 301).to(torch.int16),
        "i64": ints,
        "mask": ints % 7 == 0,
        "fp8": (randn(1500) * 0.1).to(torch.float8_e4m3fn),
    }
    yield "planes_ints", Golden(state, ("planes",))
    bits = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 1, 0x807FFFFF, 0x7F7FFFFF], "u4"
    )
    special = torch.from_numpy(np.tile(bits, 90).view("f4"))
    yield "nan_and_denormal", Golden({"w.weight": special, "v.weight": special[:700].double()}, ("coded",))
    yield "all_dtypes", Golden({name: values_of(name, 3) for name in TORCH_DTYPES if name not in NEWEST})
    yield "newest_dtypes", Golden({name: values_of(name, 300) for name in NEWEST})
    yield "tree", Golden(plain_values())
    yield "forms", Golden(formed_values())


def large_header() -> Iterator[tuple[str, Golden]]:
    """A file whose header got its space before the records were known."""
    state = {f"{i}.weight": randn(64, seed=i).bfloat16() for i in range(24)} | {"z": randn(300)}
    yield "large_header", Golden(state, spool=500)


def pushed_state(step: int) -> dict[str, Any]:
    """Weights, and moments that say which of them have moved: below -1 up, above 1 down."""
    moment, weight = randn(90, 100, seed=3), randn(90, 100, seed=4) * 0.1
    down = (moment > 1).float() - (moment < -1).float()
    push = torch.where(down == 0, 2.0**-17, down * 2.0**-13)
    optimizer = optimizer_state(push, torch.full((90, 100), 2.0**-26))
    return {"model": {"w.weight": weight - 0.1 * step * down}, "optimizer": optimizer}


def codebooks() -> Iterator[tuple[str, Golden]]:
    """Every form of codes, centers and exact values; deltas stand on `quantized_base` or on a delta of it."""
    shapes = {"a.weight": (40, 50), "b.weight": (300,), "c.weight": ()}
    before = {name: symbols_of(shape, 12, seed=1) for name, shape in shapes.items()}
    after = {name: moved(one, share=0.2) for name, one in before.items()}
    how = {
        "context": ('"predictor": "base"',),
        "alone": ('"run": {"tokens": "codes"}',),
        "packed": ('"packed": 4',),
        "rearranged": ("[14, true, true]",),
        "runs": ("[14, false, true]",),
        "huffman": ("[14, false, false]",),
    }
    yield "quantized_base", Golden(**planned(before), shows=('"quantized", "bins": 12, "first": 2',))
    for coder, shows in how.items():
        base = None if coder in ("alone", "packed") else "quantized_base"
        yield f"quantized_{coder}", Golden(**planned(after, coders=(coder,)), shows=shows, base=base)
    less = {name: moved(one, bins=5) for name, one in after.items()}
    yield "quantized_fewer_bins", Golden(**planned(less), shows=('"bins": 5', '"base": true'), base="quantized_context")
    kept = {**less, "b.weight": moved(less["b.weight"], seed=3, share=0.5)}
    yield "quantized_same", Golden(**planned(kept), shows=("same", "quantized"), base="quantized_fewer_bins")
    last = {name: moved(one, seed=4, share=0.3) for name, one in kept.items()}
    yield "quantized_on_same", Golden(**planned(last), shows=('"base": true',), base="quantized_same")

    fine = {"w.weight": symbols_of((30, 40), 254, exact=torch.float32, special=0.5)}
    yield "quantized_inner_base", Golden(**planned(fine), shows=('"exact": "F32", "exacts": {"tokens": "level"',))
    near = {name: moved(one) for name, one in fine.items()}
    shows = ('"centers": {"tokens": "delta"', '"exacts": {"tokens": "delta"')
    yield "quantized_inner", Golden(**planned(near), shows=shows, base="quantized_inner_base")
    for first, dtype in ((0, torch.float16), (1, torch.bfloat16), (2, torch.float64)):
        symbols = {"w.weight": symbols_of((20, 30), 256 - first, first), "e.weight": symbols_of((0, 3), 4, first)}
        shows = (f'"first": {first}', f'"bins": {256 - first}')
        yield f"quantized_first_{first}", Golden(**planned(symbols, dtype), shows=shows)

    scheme = Rounding(bins=8)
    yield "quantized_moments_base", Golden(pushed_state(0), ("quantized",), scheme=scheme)
    shows = ('"moments": true, "top": 9', '"moments": [[[')
    yield "quantized_moments", Golden(pushed_state(1), shows, "quantized_moments_base", scheme=scheme)
    state = {"model": {"w.weight": randn(30, 40) * 0.1}, "half": {"w.weight": torch.zeros(30, 40).bfloat16()}}
    yield "quantized_master", Golden(state, ("quantized", "copy"), scheme=scheme)


def residuals() -> Iterator[tuple[str, Golden]]:
    """Differences to the parent's values, whether it has codes or not."""
    shapes = {"a.weight": (40, 50), "b.weight": (300,), "c.weight": ()}
    values = {name: randn(*shape, seed=7) * 0.1 for name, shape in shapes.items()}
    now = {name: replace(symbols_of(shape, 12, seed=2), residual=True) for name, shape in shapes.items()}
    how = {
        "alone": '"codes": {"run": {"tokens": "codes"}}',
        "packed": '"packed": 4',
        "lzma": '"lzma": 4',
        "huffman": '"cyclic": [14, false, false]',
    }
    yield "residual_base", Golden(values)
    for coder, shows in how.items():
        golden = Golden(**planned(now, coders=(coder,)), shows=(shows, '"residual": true'), base="residual_base")
        yield f"residual_{coder}", golden
    more = {name: moved(one, share=0.5) for name, one in now.items()}
    yield "residual_on_residual", Golden(**planned(more), shows=('"residual": true',), base="residual_alone")
    yield "residual_on_codes", Golden(**planned(now), shows=('"residual": true',), base="quantized_context")
    still = replace(more["a.weight"], codes=torch.zeros(40, 50, dtype=torch.uint8), exact=torch.empty(0).bfloat16())
    shows = ('"same"', '"residual": true')
    yield "residual_same", Golden(**planned({**more, "a.weight": still}), shows=shows, base="residual_on_residual")
    written = {name: _written(x) for name, x in values.items()}
    shows = ('"bins": 1, "first": 1', '"exact": "F32", "exacts": {"tokens": "delta"')
    yield "residual_exacts", Golden(**planned(written), shows=shows, base="residual_base")
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
    for name, dtype in {**TYPES, "f64": torch.float64}.items():
        yield f"residual_{name}_base", Golden({"w.weight": torch.tensor(special).to(dtype).expand(13, 12).contiguous()})
        golden = Golden(**planned({"w.weight": one}, dtype), shows=('"residual": true',), base=f"residual_{name}_base")
        yield f"residual_{name}", golden


def context_codes() -> Iterator[tuple[str, Golden]]:
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
        golden = Golden(pushed_state(0), (form, '"residual": true', *shows), "quantized_moments_base", scheme)
        yield f"under_{coder}", golden
    alone = {name: replace(one, residual=False) for name, one in symbols.items()}
    yield "under_alone", Golden(pushed_state(0), shows, scheme=QuantizationPlan("golden", alone))


SHAPES = {"a": (30, 40), "b": (300,), "c": (), "d": (3, 4, 5, 2), "e": (1, 9), "f": (9, 1)}
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def of_law(law: str, random: int, **lattice: int) -> dict[str, LatticeTensor]:
    return {name: points_of(law, shape, random=random, **lattice) for name, shape in SHAPES.items()}


def lattices() -> Iterator[tuple[str, Golden]]:
    """Every law alone, on a parent of its own lattices, and on others."""
    for law, step in (("linear", 1), ("log", 24)):
        base = of_law(law, 1, at=-40, step=step)
        yield f"points_{law}_base", Golden(**planned(base), shows=(f'"law": "{law}"',))
        shows = ('"base": true, "inherited": true',)
        yield f"points_{law}", Golden(**planned(_moved_points(base, 0)), shows=shows, base=f"points_{law}_base")
        if law == "linear":
            seeds = planned(_moved_points(base, 9))
            yield "points_linear_seeds", Golden(**seeds, shows=shows, base="points_linear_base")
        others = of_law(law, 2, at=-37, step=step, seed=5)
        shows = ('"base": true}',) if step == 1 else ('"base": true',)
        yield f"points_{law}_others", Golden(**planned(others), shows=shows, base=f"points_{law}_base")
    kept = {**of_law("linear", 2, at=-37, seed=5), "b": points_of("linear", (300,), random=2, at=-36, seed=6)}
    yield "points_same", Golden(**planned(kept), shows=("same", "gridded"), base="points_linear_others")
    empty = {"a": points_of("linear", (0,)), "b": points_of("linear", (3, 0, 2))}
    yield "points_empty", Golden(**planned(empty), shows=("gridded",))
    yield from _far()
    yield from _by_contexts()
    yield from _on_any_values()
    optimizer = optimizer_state(torch.zeros(30, 40), torch.zeros(30, 40))
    moments = {SECOND: points_of("log", (30, 40), at=-200, step=24), FIRST: points_of("relative", (30, 40), seed=7)}
    moments[FIRST] = replace(moments[FIRST], relative_to=SECOND)
    scheme = QuantizationPlan("golden", moments)
    yield "points_relative", Golden({"optimizer": optimizer}, ('"others": [[',), scheme=scheme)


def gains() -> Iterator[tuple[str, Golden]]:
    """On the parent's lattice with its points or its origin, and with an origin that is stored."""
    base = of_law("linear", 1, at=-40, step=1)
    first = {name: replace(one, origin=base[name].codes, gain=1.375) for name, one in _moved_points(base, 0).items()}
    second = {name: replace(one, codes=(one.codes + 1).short(), gain=0.0625) for name, one in first.items()}
    shows, stored = ('"inherited": true, "gains": true',), ('"gains": true, "origin": true',)
    yield "points_gains", Golden(**planned(first), shows=shows, base="points_linear_base")
    yield "points_gains_next", Golden(**planned(second), shows=shows, base="points_gains")
    yield "points_gains_alone", Golden(**planned(second), shows=stored)
    far = {
        name: replace(one, origin=points_of("linear", tuple(one.codes.shape), "far").codes, gain=16.0)
        for name, one in of_law("linear", 3, at=-40, seed=8).items()
    }
    yield "points_gains_others", Golden(**planned(far), shows=stored, base="points_gains")
    after = {name: replace(one, origin=None, gain=1.0) for name, one in second.items()}
    yield "points_after_gains", Golden(**planned(after), shows=('"inherited": true}',), base="points_gains_next")


def _moved_points(base: dict[str, LatticeTensor], seed: int) -> dict[str, LatticeTensor]:
    near = {name: torch.randint(-1, 2, one.codes.shape, generator=_generator(3)) for name, one in base.items()}
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
        yield name, Golden(**planned({"w.weight": LatticeTensor(codes, lattice)}), shows=("gridded",))
    large = Lattice("linear", torch.zeros(1).short() - 80, torch.zeros(1).short(), seed=3)
    many = LatticeTensor(torch.randint(-2, 3, (40_000,), generator=_generator(4)).short(), large)
    yield "points_many", Golden(**planned({"w.weight": many}), shows=("gridded",))  # 32 lanes


def _by_contexts() -> Iterator[tuple[str, Golden]]:
    """Points that say nothing but which context they have: a reader that takes another one cannot read them."""
    values = randn(50, 60, seed=5) * torch.exp2(8 * randn(50, 60, seed=6))
    yield "points_contexts_base", Golden({"w.weight": values.where(randn(50, 60, seed=7) < 2, 0.0).abs()})
    parent = Reference({"w.weight": values.where(randn(50, 60, seed=7) < 2, 0.0).abs()})
    for law, step in (("linear", 1), ("log", 24)):
        any_points = points_of(law, (50, 60), spread=60, step=step, seed=11 if law == "linear" else 0)
        told = told_by_contexts(made({"w.weight": any_points}, "F32", parent)).points
        shows = (f'"law": "{law}"', '"base": true')
        yield f"points_contexts_{law}", Golden(**planned(told), shows=shows, base="points_contexts_base")


def _on_any_values() -> Iterator[tuple[str, Golden]]:
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 65000.0, 3.3e38, -3.3e38, 6e-8, 1e-40, 1 / 3, -1.0]
    values = torch.tensor(special).expand(13, 12).contiguous()
    for kind, dtype in TYPES.items():
        yield f"points_{kind}_base", Golden({"w.weight": values.to(dtype), "v.weight": values.to(dtype)})
        both = {
            "w.weight": points_of("linear", (13, 12), seed=4),
            "v.weight": points_of("log", (13, 12), step=8, random=5),
        }
        shows = ('"law": "linear"', '"law": "log"', '"base": true')
        yield f"points_{kind}", Golden(**planned(both, dtype), shows=shows, base=f"points_{kind}_base")
    shapes = {"a.weight": (40, 50), "b.weight": (300,)}
    named = {name: points_of("linear", shape, at=-40, seed=1) for name, shape in shapes.items()}
    named["c.weight"] = LatticeTensor(torch.zeros((), dtype=torch.int16), lattice_of("linear", ()))
    yield "points_on_codes", Golden(**planned(named), shows=("gridded", '"base": true'), base="quantized_context")
    state = {name: torch.zeros(one.codes.shape) for name, one in named.items()}
    yield "lossless_on_points", Golden(state, ("coded",), base="points_on_codes")


def fisher() -> Iterator[tuple[str, Golden]]:
    """A keyframe, a delta, and a delta after a restore: with another dither on the same steps."""
    loop, scheme = Loop(width=24), sp.Fisher(relative_error=0.1)
    held, chosen = None, None
    for name, base, generation in (
        ("fisher_base", None, 0),
        ("fisher_delta", "fisher_base", 0),
        ("fisher_restored", "fisher_delta", 1),
    ):
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


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_read(golden: Golden) -> Any:
    """What a reader must get: the state itself, or the values that a lossy scheme makes of it."""
    if golden.scheme is None or isinstance(golden.scheme, sp.Lossless):
        return golden.state
    flat = flatten(golden.state)
    base = None if golden.base is None else Reference(flatten(sp.load(find(golden.base))).tensors)
    return unflatten(flat.tree, golden.scheme.quantize(flat, base).state.tensors)


def find(name: str) -> Path:
    """The golden file of this release and name, in whichever folder it is."""
    (path,) = ROOT.glob(f"*/{sp.__version__}_{name}.safetensors")
    return path


def write(path: Path, golden: Golden) -> dict[str, str]:
    """Write one file, check that it is what it should be, and return the fingerprint of its state."""
    path.parent.mkdir(exist_ok=True)
    default_spool, FileWriter.spool = FileWriter.spool, golden.spool
    try:
        base = None if golden.base is None else find(golden.base)
        sp.save(golden.state, path, base=base, scheme=golden.scheme or "lossless")
    finally:
        FileWriter.spool = default_spool
    with LocalStorage(path.parent).open(path.name) as source:
        recipes = json.dumps([head.recipe for head in FileReader(source, path.name).records])
    missing = [text for text in golden.shows if text not in recipes]
    assert not missing, f"{path.name} does not show {missing}: {recipes}"
    assert fingerprint(as_read(golden)) == fingerprint(sp.load(path)), path.name
    assert path.stat().st_size <= MAX_BYTES, f"{path.name} has {path.stat().st_size} bytes"
    return fingerprint(as_read(golden))


def make() -> dict[str, Any]:
    """Write what is missing of this release; returns the new content of expected.json."""
    states: dict[str, Any] = {}
    for kind, generators in KINDS.items():
        for name, golden in (item for generate in generators for item in generate()):
            folder = kind if golden.base is None else find(golden.base).parent.name
            path = ROOT / folder / f"{sp.__version__}_{name}.safetensors"
            if not path.exists():
                states[f"{folder}/{path.name}"] = write(path, golden)
    stores = _write_missing("stores", STORES)
    runs = _write_missing("directories", RUNS)
    published = _write_missing("published", PUBLISHED)
    files = file_digests(ROOT)
    return {"files": files, "states": states, "stores": stores, "runs": runs, "published": published}


def _write_missing(folder: str, writers: Mapping[str, Callable[[Path], Any]]) -> dict[str, Any]:
    written = {}
    for kind, write_one in writers.items():
        name = f"{folder}/{sp.__version__}_{kind}"
        if not (ROOT / name).exists():
            (ROOT / folder).mkdir(exist_ok=True)
            written[name] = write_one(ROOT / name)
    return written


def main() -> None:
    ROOT.mkdir(exist_ok=True)
    expected: dict[str, Any] = {"files": {}, "states": {}, "stores": {}, "runs": {}, "published": {}}
    if EXPECTED.exists():
        expected |= json.loads(EXPECTED.read_text())
    if {name: digest for name, digest in file_digests(ROOT).items() if name != EXPECTED.name} != expected["files"]:
        sys.exit(f"{ROOT} is not as it was made: golden files are added and never changed. Restore it first.")
    new = make()
    new["files"].pop(EXPECTED.name, None)
    expected = {key: {**expected[key], **new[key]} for key in expected}
    EXPECTED.write_text(json.dumps(expected, indent=0) + "\n")
    sizes = [path.stat().st_size for path in ROOT.rglob("*") if path.is_file()]
    count = sum(len(new[key]) for key in ("states", "stores", "runs", "published"))
    print(f"{count} new, {len(sizes)} files, {sum(sizes)} bytes in {ROOT.name}")


KINDS = {
    "lossless": (levels, deltas, taps, whole_numbers, large_header),
    "codebook": (codebooks,),
    "residual": (residuals, context_codes),
    "lattice": (lattices, gains, fisher),
}
"""Folder of the files that stand alone, and what generates them; a delta lies in the folder of its base, by whose file
name it refers to it."""

if __name__ == "__main__":
    main()
