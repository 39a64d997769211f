"""Runs with numbers and companions to go with them, and their way through the native core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.run import Known, Run

from shrinkpoint import _native

Shapes = list[tuple[int, int]]
FLOATS = {16: (7, 10), 32: (23,), 64: (52,)}
KINDS = ("normal", "tiny", "wild", "zeros", "constant")
SQUARE = (0.9, 0.95, 0.1, 0.05)
RUNS = {
    "planes 8": Run("planes", 8),
    "planes 64": Run("planes", 64),
    "level 16": Run("level", 16, 7, fine=1, bias=240),
    "level 32 base": Run("level", 32, 23, companion="base", bias=121, fine=0),
    "level 32 moment1": Run("level", 32, 23, companion="moment1", fine=2, bias=480, shift=5),
    "level 64": Run("level", 64, 52, bias=1017, sign=False),
    "delta 8": Run("delta", 8, predictor="base"),
    "delta 16": Run("delta", 16, 10, predictor="base", top=15),
    "delta 32": Run("delta", 32, predictor="none", shift=3),
    "delta 64": Run("delta", 64, 52, predictor="base", top=1023),
    "codes": Run("codes", 8),
    "codes base": Run("codes", 8, predictor="base"),
    "codes few": Run("codes", 8, predictor="base", top=9),
    "adam": Run("delta", 32, 23, predictor="adam", top=125, parameters=(0.99, -1e-3, 0.5, 1e-8)),
    "square": Run("delta", 32, 23, predictor="square", parameters=SQUARE),
}


@dataclass(frozen=True)
class Case:
    """`values` are bit patterns, unsigned and as wide as the run says."""

    run: Run
    values: NDArray[Any]
    known: Known
    shapes: Shapes | None = None

    def model(self) -> _native.Model:
        run, model = self.run, _native.Model()
        model.tokens = _native.Tokens[run.tokens.upper()]
        model.predictor = _native.Predictor[run.predictor.upper()]
        model.companion = _native.Companion[run.companion.upper()]
        model.width, model.mantissa, model.fine, model.shift = run.width, run.mantissa, run.fine, run.shift
        model.has_sign, model.bias, model.top = run.sign, run.bias, run.top
        model.parameters = list(run.parameters or (0.0,) * 4)
        return model

    def arrays(self) -> dict[str, Any]:
        known = self.known
        return {
            "base": None if known.base is None else np.array(known.base, self.values.dtype),
            "moment1": known.moment1,
            "moment2": known.moment2,
            "moment1_base": known.moment1_base,
            "hint": None if known.hint is None else np.array(known.hint, np.uint8),
        }

    def encode(self, threads: int = 1) -> tuple[bytes, bytes]:
        model = self.model()
        factors = None if self.shapes is None else _native.fit_factors(model, self.values, self.shapes)
        side, codes = _native.encode(
            model, self.values, **self.arrays(), factors=factors, chunk=self.run.chunk, threads=threads
        )
        return side.tobytes(), codes.tobytes()

    def decode(self, side: bytes, codes: bytes, threads: int = 1) -> NDArray[Any]:
        out = np.zeros_like(self.values)
        _native.decode(
            self.model(),
            side,
            codes,
            out,
            **self.arrays(),
            shapes=self.shapes,
            chunk=self.run.chunk,
            threads=threads,
        )
        return out


def numbers(random: np.random.Generator, kind: str, count: int, width: int, mantissa: int) -> NDArray[Any]:
    """Bit patterns; `wild` ones are all there are: not a number, infinities, denormals, -0."""
    unsigned = np.dtype(f"u{width // 8}")
    if kind == "wild":
        return random.integers(0, 1 << width, count, unsigned, endpoint=False) if width < 64 else _words(random, count)
    if kind == "zeros":
        return np.where(random.random(count) < 0.9, unsigned.type(0), unsigned.type(1 << (width - 1)))
    if mantissa == 0:
        values = random.normal(0, 20, count).astype(np.int64).astype(np.uint64)
        return (np.full_like(values, 3) if kind == "constant" else values).astype(unsigned)
    scale = {16: 1e-6, 32: 1e-39, 64: 1e-309}[width] if kind == "tiny" else 0.02
    values = np.full(count, 0.1) if kind == "constant" else random.normal(0, scale, count)
    if (width, mantissa) == (16, 7):
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(unsigned)
    return values.astype(f"f{width // 8}").view(unsigned)


def near(random: np.random.Generator, values: NDArray[Any]) -> NDArray[Any]:
    """Others of the same width that differ by little, and sometimes by everything."""
    moved = values + random.integers(0, 50, values.size).astype(values.dtype)
    return np.where(random.random(values.size) < 0.1, random.permutation(values), moved)


def _words(random: np.random.Generator, count: int) -> NDArray[Any]:
    return np.frombuffer(random.bytes(8 * count), np.uint64)


def _floats(random: np.random.Generator, kind: str, count: int) -> NDArray[np.float32]:
    return numbers(random, kind, count, 32, 23).view(np.float32)


def make(seed: int, run: Run, count: int, kind: str = "normal", *, hint: bool = False, moments: bool = False) -> Case:
    """A case with all the companions that the run needs, and hints or moments for contexts."""
    random = np.random.default_rng(seed)
    values = numbers(random, kind, count, run.width, run.mantissa)
    if run.tokens != "planes":
        values = values >> run.shift << run.shift
    if not run.sign:
        values = values & ((1 << (run.width - 1)) - 1)
    predicted = run.predictor in ("adam", "square")
    first, second = (_floats(random, kind, count) for _ in range(2))
    moments = moments or predicted
    known = Known(
        base=near(random, values).tolist() if run.predictor != "none" or run.companion == "base" else None,
        moment1=first if moments or run.companion == "moment1" else None,
        moment2=second * second if moments and kind != "wild" else second if moments else None,
        moment1_base=first + np.float32(1e-4) * second
        if run.predictor == "square" and kind != "wild"
        else second
        if run.predictor == "square"
        else None,
        hint=random.integers(0, 32, count).tolist() if hint else None,
    )
    return Case(run, values, known)


@st.composite
def planes(draw: st.DrawFn, most: int = 300) -> Case:
    width = draw(st.sampled_from((8, 16, 32, 64)))
    run = Run("planes", width, chunk=draw(chunks))
    mantissa = FLOATS.get(width, (0,))[0]
    case = make(draw(seeds), replace(run, mantissa=mantissa), draw(st.integers(1, most)), draw(st.sampled_from(KINDS)))
    return replace(case, run=run)


@st.composite
def levels(draw: st.DrawFn, most: int = 300) -> Case:
    width = draw(st.sampled_from((16, 32, 64)))
    mantissa = draw(st.sampled_from(FLOATS[width]))
    fine = draw(st.integers(0, 4) | st.sampled_from((mantissa // 2, mantissa - 1, mantissa)))
    companions = ["none", "base"] + ["moment1"] * (width - mantissa == 9)
    run = Run(
        "level",
        width,
        mantissa,
        companion=draw(st.sampled_from(companions)),
        fine=fine,
        shift=draw(st.sampled_from((0, 1, mantissa - fine))),
        sign=draw(st.booleans()),
        bias=draw(st.sampled_from((0, min(120 << fine, (1 << 20) - 1), -1000, 1 << 19))),
        chunk=draw(chunks),
    )
    run = replace(run, shift=min(run.shift, mantissa - fine))
    case = make(draw(seeds), run, draw(st.integers(1, most)), draw(st.sampled_from(KINDS)))
    with_factors = width <= 32 and mantissa > fine and draw(st.booleans())
    return replace(case, shapes=draw(shapes_of(case.values.size))) if with_factors else case


@st.composite
def shapes_of(draw: st.DrawFn, count: int) -> Shapes:
    """Matrices that hold `count` numbers together."""
    shapes = []
    while count:
        rows = draw(st.integers(1, min(count, 9)))
        columns = draw(st.integers(1, min(count // rows, 40)))
        shapes.append((rows, columns))
        count -= rows * columns
    return shapes


@st.composite
def deltas(draw: st.DrawFn, most: int = 300) -> Case:
    width = draw(st.sampled_from((8, 16, 32, 64)))
    mantissa = draw(st.sampled_from((0, *FLOATS.get(width, ()))))
    predictors = ["none", "base"] + ["adam", "square"] * (mantissa == 23)
    predictor = draw(st.sampled_from(predictors))
    run = Run(
        "delta",
        width,
        mantissa,
        predictor=predictor,
        shift=draw(st.sampled_from((0, 0, 1, width // 2, width - 1))),
        top=draw(st.sampled_from((0, 125, 1020))),
        parameters={"adam": (0.99, -1e-3, 0.5, 1e-8), "square": (0.9, 0.95, 0.1, 0.05)}.get(predictor, ()),
        chunk=draw(chunks),
    )
    context = draw(st.sampled_from(("plain", "hint", "moments")))
    return make(
        draw(seeds),
        run,
        draw(st.integers(1, most)),
        draw(st.sampled_from(KINDS)),
        hint=context == "hint" and predictor in ("none", "base"),
        moments=context == "moments",
    )


@st.composite
def codes(draw: st.DrawFn, most: int = 300) -> Case:
    run = Run(
        "codes",
        8,
        predictor=draw(st.sampled_from(("none", "base"))),
        top=draw(st.sampled_from((0, 1, 15, 16, 31, 32, 63, 64, 255))),
        chunk=draw(chunks),
    )
    count, kind = draw(st.integers(1, most)), draw(st.sampled_from(KINDS))
    return make(draw(seeds), run, count, kind, hint=draw(st.booleans()), moments=draw(st.booleans()))


seeds = st.integers(0, 2**32 - 1)
chunks = st.sampled_from((32, 64, 100, 262144))
cases = st.one_of(planes(), levels(), deltas(), codes())
