"""Writes the golden files of this release: one for every feature that a reader must know for ever.

Run by `make golden` when a release has added a feature; never by a test. It adds what is missing and refuses to change
what is there: what an old release wrote, new ones must read as it stands. `v1` is the format version.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden.content import Golden, optimizer_state, randn  # noqa: E402
from golden.folder_files import write_folders, write_shards  # noqa: E402
from golden.lossy_files import quantized, residual, under, write_lossy_store, write_tracked_store  # noqa: E402
from golden.point_files import fisher, points, write_fisher_store  # noqa: E402
from helpers.fingerprint import file_digests, fingerprint  # noqa: E402
from helpers.round_trip import Loop  # noqa: E402
from helpers.strategies import TORCH_DTYPES  # noqa: E402

import shrinkpoint as sp  # noqa: E402
from shrinkpoint.codec.reference import Reference  # noqa: E402
from shrinkpoint.container import FileReader, FileWriter  # noqa: E402
from shrinkpoint.storage import LocalStorage  # noqa: E402
from shrinkpoint.tensors.flatten import flatten, unflatten  # noqa: E402

ROOT = HERE / "v1"
EXPECTED = ROOT / "expected.json"
LARGEST = 20_000
"""Bytes of a golden file."""
NEWEST = ("F8_E8M0", "F4_X2")
"""Dtypes that not every torch we support has."""


def values_of(name: str, count: int) -> torch.Tensor:
    byte = torch.arange(count * TORCH_DTYPES[name].itemsize).mul(37).remainder(256).to(torch.uint8)
    return (byte & 1 if name == "BOOL" else byte).view(TORCH_DTYPES[name])


def plain_values() -> dict[Any, Any]:
    ordered = OrderedDict([("z", 1), ("a", 2)])
    versioned = OrderedDict(w=torch.arange(2.0))
    versioned._metadata = {"bn": {"version": 2}}  # type: ignore[attr-defined]
    storage = torch.arange(10.0)
    return {
        "none": None, "bools": [True, False], "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(3**99)],
        "floats": [0.0, -0.0, 1e-323, 0.1, float("inf"), -float("inf"), float("nan")],
        "texts": ["", "\u00e4\u2603\U0001f600", "\ud800", "\0", "$t"],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 2], "tuples": ((), (1, (2, [3]))), "size": torch.Size([2, 3]),
        "ordered": ordered, "counter": Counter("abracadabra"), "versioned": versioned,
        1: "int", -(2**70): "long", False: "bool", 2.5: "float", None: "none", (1, "a"): "tuple",
        "keys": {"$t": 1, "a/b": 2, "100%": 3, "": 4}, "numpy": np.arange(6, dtype=">i4").reshape(2, 3),
        "numpy scalars": [np.float32(0.1), np.bool_(True), np.int64(-5), np.complex128(1 + 2j)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "tied": [storage, storage, storage[2:5], storage.view(2, 5).t(), storage[::3]],
        "expanded": torch.ones(1).expand(3, 2), "0-d": torch.tensor(7), "empty": torch.empty(0, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "same names": {1: torch.zeros(1), "1": torch.ones(1)},
    }  # fmt: skip


def half_state(step: int) -> dict[str, Any]:
    """16-bit weights under 32-bit moments."""
    moment = randn(30, 40, seed=step) * 1e-3
    weight = (randn(30, 40, seed=9) * 0.1).bfloat16()
    factor = 1 if step == 0 else 1 + 0.01 * randn(30, 40, seed=5)
    return {"model": {"w.weight": (weight * factor).bfloat16()}, "optimizer": optimizer_state(moment, moment.square())}


def first_release() -> Iterator[tuple[str, Golden]]:
    """Name and content of every file of 0.1.0, bases before what stands on them."""
    for part in (levels, deltas, taps, whole_numbers, quantized, residual, under, points, fisher):
        yield from part()
    yield (
        "large_header",
        Golden({f"{i}.weight": randn(64, seed=i).bfloat16() for i in range(24)} | {"z": randn(300)}, spool=500),
    )


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
    yield (
        "copies_and_cast",
        Golden({"master": masters, "model": casts, "half": halves, "ema": copy.deepcopy(masters)}, ("copy",)),
    )
    ints = torch.arange(1500).square()
    yield "planes_ints", Golden({
        "u8": (ints % 11).to(torch.uint8), "i16": (ints % 301).to(torch.int16), "i64": ints, "mask": ints % 7 == 0,
        "fp8": (randn(1500) * 0.1).to(torch.float8_e4m3fn),
    }, ("planes",))  # fmt: skip
    bits = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 1, 0x807FFFFF, 0x7F7FFFFF], "u4"
    )
    special = torch.from_numpy(np.tile(bits, 90).view("f4"))
    yield "nan_and_denormal", Golden({"w.weight": special, "v.weight": special[:700].double()}, ("coded",))
    yield "all_dtypes", Golden({name: values_of(name, 3) for name in TORCH_DTYPES if name not in NEWEST})
    yield "newest_dtypes", Golden({name: values_of(name, 300) for name in NEWEST})
    yield "tree", Golden(plain_values())


def as_read(golden: Golden) -> Any:
    """What a reader must get: the state itself, or what a lossy scheme makes of it."""
    if golden.scheme is None or isinstance(golden.scheme, sp.Lossless):
        return golden.state
    flat = flatten(golden.state)
    base = None if golden.base is None else Reference(flatten(sp.load(_path(golden.base))).tensors)
    return unflatten(flat.tree, golden.scheme.quantize(flat, base).flat.tensors)


def _path(name: str) -> Path:
    return ROOT / f"{sp.__version__}_{name}.safetensors"


def write(path: Path, golden: Golden) -> dict[str, str]:
    """Write one file, check that it is what it should be, and return the fingerprint of its state."""
    name = path.name
    usual, FileWriter.spool = FileWriter.spool, golden.spool
    try:
        base = None if golden.base is None else _path(golden.base)
        sp.save(golden.state, path, base=base, scheme=golden.scheme)
    finally:
        FileWriter.spool = usual
    with LocalStorage(ROOT).open(path.name) as source:
        recipes = json.dumps([head.recipe for head in FileReader(source, name).records])
    missing = [text for text in golden.shows if text not in recipes]
    assert not missing, f"{name} does not show {missing}: {recipes}"
    assert fingerprint(as_read(golden)) == fingerprint(sp.load(path)), name
    assert path.stat().st_size <= LARGEST, f"{name} has {path.stat().st_size} bytes"
    return fingerprint(as_read(golden))


def write_store(place: Path) -> dict[str, str]:
    """A store with two chains and a forgotten step; fingerprints by step."""
    expected = {}
    loop = Loop(width=4)
    with sp.Store(place, keyframe_every=3) as store:
        for step in (1, 2, 3, 4):
            state = loop.steps(1)
            store.save(step, state, metrics={"val_loss": 1 / step, "nan": float("nan")})
            expected[str(step)] = fingerprint(state)
        store.forget(2)
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected


def make() -> dict[str, Any]:
    """Write what is missing of this release; the new content of expected.json."""
    states: dict[str, Any] = {}
    stores: dict[str, Any] = {}
    for name, golden in FILES[sp.__version__]():
        path = _path(name)
        if not path.exists():
            states[path.name] = write(path, golden)
    for kind, write_one in STORES.items():
        place = ROOT / f"{sp.__version__}_{kind}"
        if not place.exists():
            stores[place.name] = write_one(place)
    runs: dict[str, Any] = {}
    for kind, write_run in RUNS.items():
        place = ROOT / f"{sp.__version__}_{kind}"
        if not place.exists():
            runs[place.name] = write_run(place)
    return {"files": file_digests(ROOT), "states": states, "stores": stores, "runs": runs}


def main() -> None:
    ROOT.mkdir(exist_ok=True)
    expected: dict[str, Any] = {"files": {}, "states": {}, "stores": {}, "runs": {}}
    if EXPECTED.exists():
        expected |= json.loads(EXPECTED.read_text())
    if {name: digest for name, digest in file_digests(ROOT).items() if name != EXPECTED.name} != expected["files"]:
        sys.exit(f"{ROOT} is not as it was made: golden files are added and never changed. Restore it first.")
    new = make()
    new["files"].pop(EXPECTED.name, None)
    expected = {key: {**expected[key], **new[key]} for key in expected}
    EXPECTED.write_text(json.dumps(expected, indent=0) + "\n")
    sizes = [path.stat().st_size for path in ROOT.rglob("*") if path.is_file()]
    made = sum(len(new[key]) for key in ("states", "stores", "runs"))
    print(f"{made} new, {len(sizes)} files, {sum(sizes)} bytes in {ROOT.name}")


FILES = {"0.1.0": first_release}
STORES = {
    "store": write_store, "lossy_store": write_lossy_store, "tracked_store": write_tracked_store,
    "fisher_store": write_fisher_store,
}  # fmt: skip
RUNS = {"folders": write_folders, "shards": write_shards}

if __name__ == "__main__":
    main()
