"""How fast points of lattices are coded, on one core: GB/s of float32.

    python benchmarks/lattice_speed.py [--rows 2048] [--columns 2048] [--repeats 7] [--out results/lattice.json]

One tensor of every law, alone and after a parent on the same lattice (the law "linear" with a dither, too). Codes are
half-normal integers with a deviation of three steps; one in ten has moved by one since the parent. Four subjects run in
turns, after a round of warm-up, and medians count:

* record: all of `encode_lattice_record` (digests of values and parent, points, check of the values, entropy coding)
  and of `decode`, digests included;
* entropy coding: that part of it alone;
* core: the native core's part without it;
* torch: the core's part in whole tensors of torch, as tests/reference/lattice_speed.py has it.

By CPU time of the process, which others on the machine disturb less; wall time is in the JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lossless_speed
import numpy as np
import torch
from lossless_report import table
from torch import Tensor
from workloads import REPO

from shrinkpoint import _native
from shrinkpoint.codec.coder import CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.lattice import ZERO_CODE, Lattice, LatticeTensor, scale_counts
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.info import TensorInfo

ENCODE, DECODE = 0.5, 1.0  # GB/s of float32 that a record must reach, a core
NAME, OTHER = "x", "v"


@dataclass(frozen=True)
class Case:
    """One tensor, and what is known of it."""

    points: LatticeTensor
    values: Tensor
    parent: Tensor | None
    other: Tensor | None

    @classmethod
    def of(cls, law: str, shape: tuple[int, int], seed: int, alone: bool) -> Case:
        random = np.random.default_rng(7)
        counts = scale_counts(law, shape)  # type: ignore[arg-type]
        rows, columns = (torch.from_numpy(random.integers(-12, 13, n).astype(np.int16)) for n in counts)
        lattice = Lattice(law, rows - 60, columns, 24 if law == "log" else 1, seed)  # type: ignore[arg-type]
        drawn = random.standard_normal(shape, np.float32) * 3
        codes = torch.from_numpy(np.abs(drawn).astype(np.int16) * np.sign(drawn).astype(np.int16))
        codes = codes.masked_fill(torch.from_numpy(random.random(shape) < 0.01), ZERO_CODE) if law == "log" else codes
        other = torch.from_numpy(random.standard_normal(shape, np.float32) ** 2) if law == "relative" else None
        before = codes - torch.from_numpy(random.random(shape) < 0.1).to(torch.int16)
        points = LatticeTensor(codes, lattice, OTHER if other is not None else "")
        parent = None if alone else replace(points, codes=before).dequantize(torch.float32, other)
        return cls(points, points.dequantize(torch.float32, other), parent, other)

    def record(self) -> LatticeInput:
        info = TensorInfo(NAME, tuple(self.values.shape), "F32")
        before = None if self.parent is None else Reference({NAME: self.parent}, {NAME: self.points})
        others = () if self.other is None else (self.other,)
        return LatticeInput(NAME, (info,), (self.values,), (self.points,), before, others, tuple(range(len(others))))


class Subjects:
    """The four, for one case."""

    def __init__(self, case: Case, reference: Any) -> None:
        self.case, self.reference, self.material = case, reference, case.record()
        self.shape = case.values.shape[0], case.values.shape[1]
        self.lattice = case.points.lattice.to_native(self.shape)
        self.contexts, self.tokens, self.escapes = self.encode()
        self.run = CoderConfig("codes", predictor="base", top=int(self.contexts.max()))

    def __iter__(self) -> Iterator[lossless_speed.Subject]:
        yield self._subject("record", self.record, self.read)
        yield self._subject("entropy coding", self.squeeze, self.unsqueeze)
        yield self._subject("core", self.encode, self.decode)
        yield self._subject("torch", self.encode_slowly, self.decode_slowly)

    def _subject(self, name: str, encode: Callable[[], Any], decode: Callable[[Any], Any]) -> lossless_speed.Subject:
        return lossless_speed.Subject(name, self.case.values.nbytes, lambda: None, lambda _: encode(), decode)

    def record(self) -> Any:
        return encode_lattice_record(self.material, threads=1)

    def read(self, encoded: Any) -> Any:
        others = {} if self.case.other is None else {OTHER: self.case.other}
        return decode(encoded, others, self.material.reference, threads=1)

    def squeeze(self) -> Any:
        return self.run.encode(NumberFormat(8), self.tokens, CodingContext(base=self.contexts), 1)

    def unsqueeze(self, coded: Any) -> Any:
        out = _native.empty(self.tokens.size)
        self.run.decode(NumberFormat(8), *coded, out, CodingContext(base=self.contexts), 1)
        return out

    def _known(self) -> dict[str, Any]:
        return {"squares": None if self.case.other is None else tensor_bytes(self.case.other)}

    def _parent(self) -> dict[str, Any]:
        return {"parent": None if self.case.parent is None else tensor_bytes(self.case.parent)} | self._known()

    def encode(self) -> Any:
        contexts, tokens = (_native.empty(self.case.values.numel()) for _ in range(2))
        codes, values = tensor_bytes(self.case.points.codes), tensor_bytes(self.case.values)
        known = self._parent() | {"expected": values}
        escapes, *_ = _native.lattice_encode(self.lattice, codes, contexts, tokens, **known)
        return contexts, tokens, escapes

    def decode(self, coded: Any) -> Any:
        count = self.case.values.numel()
        contexts, codes, values = (_native.empty(n * count) for n in (1, 2, 4))
        _native.lattice_predict(self.lattice, codes, contexts, **self._parent())
        _native.lattice_decode(self.lattice, self.tokens, contexts, self.escapes, codes, values, **self._known())
        return codes, values

    def _guess(self) -> tuple[Tensor, Tensor]:
        return self.reference.guess(self.case.points.lattice, self.shape, self.case.parent, self.case.other)

    def encode_slowly(self) -> Any:
        guesses, contexts = self._guess()
        found = self.reference.tokens(self.case.points.codes, guesses, contexts)
        made = self.reference.values(self.case.points.lattice, self.case.points.codes, self.case.other)
        assert torch.equal(made, self.case.values)
        return found

    def decode_slowly(self, coded: Any) -> Any:
        guesses, contexts = self._guess()
        codes = self.reference.points(coded[0], contexts, guesses, coded[1])
        return codes, self.reference.values(self.case.points.lattice, codes, self.case.other)


CASES = {
    "linear, alone": ("linear", 0, True),
    "linear": ("linear", 0, False),
    "linear, dithered": ("linear", 5, False),
    "relative": ("relative", 0, False),
    "log": ("log", 0, False),
}


def report(found: dict[str, Any]) -> str:
    rows = [
        [f"{case}: {subject}", *(f"{ways[way]['cpu']:.2f}" for way in ("encode", "decode"))]
        for case, subjects in found.items()
        for subject, ways in subjects.items()
    ]
    worst = {way: min(one["record"][way]["cpu"] for one in found.values()) for way in ("encode", "decode")}
    verdicts = [
        f"{'PASS' if worst[way] >= bound else 'miss'}  {way} of a record: {worst[way]:.2f} GB/s, wanted {bound}"
        for way, bound in (("encode", ENCODE), ("decode", DECODE))
    ]
    return "\n".join([table(["GB/s of fp32", "encode", "decode"], rows), *verdicts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/lattice.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.append(str(REPO / "tests"))
    reference = importlib.import_module("reference.lattice")
    found = {}
    for name, (law, seed, alone) in CASES.items():
        case = Case.of(law, (options.rows, options.columns), seed, alone)
        measured = lossless_speed.measure([*Subjects(case, reference)], options.repeats)
        found[name] = {who: {way: asdict(one) for way, one in ways.items()} for who, ways in measured.items()}
    print(report(found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"rows": options.rows, "columns": options.columns, "repeats": options.repeats}
    options.out.write_text(json.dumps({"machine": lossless_speed.machine(), **settings, "cases": found}, indent=1))
    print("written:", options.out)


if __name__ == "__main__":
    main()
