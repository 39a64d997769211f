"""The native core. Buffers are contiguous; everything here releases the interpreter's lock while it works."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Shapes: TypeAlias = Sequence[tuple[int, int]]

class Corrupt(Exception): ...
class Truncated(Exception): ...
class DropsBits(ValueError): ...

class Tokens(Enum):
    LEVEL = 0
    DELTA = 1
    PLANES = 2
    CODES = 3

class Predictor(Enum):
    NONE = 0
    BASE = 1
    ADAM = 2
    SQUARE = 3

class Companion(Enum):
    NONE = 0
    BASE = 1
    MOMENT1 = 2

class Model:
    tokens: Tokens
    predictor: Predictor
    companion: Companion
    width: int
    mantissa: int
    fine: int
    shift: int
    has_sign: bool
    bias: int
    top: int
    parameters: list[float]
    def __init__(self) -> None: ...

class Factors: ...

class Lattice:
    def __init__(
        self,
        rows: Buffer,
        columns: Buffer,
        height: int,
        width: int,
        *,
        powers: bool = False,
        step: int = 1,
        seed: int = 0,
    ) -> None: ...
    def with_gain(self, origin: Buffer, gain: float) -> Lattice: ...
    @property
    def has_normal_steps(self) -> bool: ...

LatticeValues: TypeAlias = Buffer | tuple[Lattice, Buffer]
"""Float32 values: their bytes, or a lattice and codes on it."""
LatticePart: TypeAlias = tuple[Lattice, int, Bytes, LatticeValues | None, LatticeValues | None]
"""A part of a tensor to be decoded: its lattice, the first of its positions, where codes of a byte go, what they are
predicted from, and second moments."""

class Hasher:
    def __init__(self) -> None: ...
    def update(self, data: Buffer) -> None: ...
    def hexdigest(self) -> str: ...

def xxh3_128(data: Buffer) -> str: ...
def empty(size: int) -> Bytes: ...
def stream_copy(sources: Sequence[Buffer], targets: Sequence[Buffer], threads: int = 1) -> None: ...
def fit_factors(model: Model, values: Buffer, shapes: Shapes) -> Factors: ...
def difference_classes(model: Model, values: Buffer, others: Buffer) -> Bytes: ...
def estimate_bits(
    model: Model,
    values: Buffer,
    *,
    base: Buffer | None = None,
    moment1: Buffer | None = None,
    moment2: Buffer | None = None,
    moment1_base: Buffer | None = None,
    hint: Buffer | None = None,
    factors: Factors | None = None,
    stride: int = 1,
    threads: int = 1,
) -> float: ...
def encode(
    model: Model,
    values: Buffer,
    *,
    base: Buffer | None = None,
    moment1: Buffer | None = None,
    moment2: Buffer | None = None,
    moment1_base: Buffer | None = None,
    hint: Buffer | None = None,
    factors: Factors | None = None,
    chunk: int = 262144,
    threads: int = 1,
) -> tuple[Bytes, Bytes]: ...
def decode(
    model: Model,
    side: Buffer,
    codes: Buffer,
    out: Bytes,
    *,
    base: Buffer | None = None,
    moment1: Buffer | None = None,
    moment2: Buffer | None = None,
    moment1_base: Buffer | None = None,
    hint: Buffer | None = None,
    shapes: Shapes | None = None,
    chunk: int = 262144,
    threads: int = 1,
) -> None: ...
def decode_chunks(
    model: Model,
    side: Buffer,
    codes: Buffer,
    out: Bytes,
    count: int,
    first: int,
    *,
    base: Buffer | None = None,
    moment1: Buffer | None = None,
    moment2: Buffer | None = None,
    moment1_base: Buffer | None = None,
    hint: Buffer | None = None,
    shapes: Shapes | None = None,
    chunk: int = 262144,
    threads: int = 1,
) -> None: ...
def pack_bits(codes: NDArray[np.uint32], bits: int) -> Bytes: ...
def unpack_bits(data: Buffer, count: int, bits: int) -> NDArray[np.uint32]: ...
def split_planes(values: Buffer, width: int) -> Bytes: ...
def join_planes(planes: Buffer, width: int) -> Bytes: ...
def cyclic_encode(codes: Buffer, previous: Buffer | None, *, modulus: int, rearranged: bool, runs: bool) -> Bytes: ...
def cyclic_decode(
    data: Buffer, previous: Buffer | None, *, modulus: int, rearranged: bool, runs: bool, out: Bytes
) -> None: ...
def kmeans(values: Doubles, weights: Doubles, centers: Doubles, *, iterations: int, tolerance: float) -> Doubles: ...
def kmeans_plus_plus(values: Doubles, weights: Doubles, k: int, *, seed: int, squared: bool) -> Doubles: ...
def lattice_predict(
    lattice: Lattice,
    guesses: Bytes,
    contexts: Bytes,
    *,
    parent: LatticeValues | None = None,
    squares: LatticeValues | None = None,
    base: Hasher | None = None,
    first: int | None = None,
    threads: int = 1,
) -> None: ...
def lattice_encode(
    lattice: Lattice,
    codes: Buffer,
    contexts: Bytes,
    tokens: Bytes,
    *,
    parent: LatticeValues | None = None,
    squares: LatticeValues | None = None,
    expected: Buffer | None = None,
    digest: Hasher | None = None,
    base: Hasher | None = None,
    threads: int = 1,
) -> tuple[Bytes, int, bool, bool]: ...
def lattice_decode(
    lattice: Lattice,
    tokens: Buffer,
    contexts: Buffer,
    escapes: Buffer,
    guesses: Bytes,
    values: Bytes | None,
    *,
    codes: Bytes | None = None,
    squares: LatticeValues | None = None,
    digest: Hasher | None = None,
    first: int | None = None,
    threads: int = 1,
) -> tuple[int, bool]: ...
def lattice_values(
    lattice: Lattice,
    codes: Buffer,
    values: Bytes,
    *,
    squares: LatticeValues | None = None,
    digest: Hasher | None = None,
    first: int | None = None,
    threads: int = 1,
) -> None: ...
def lattice_decode_codes(
    model: Model,
    side: Buffer,
    coded: Buffer,
    count: int,
    first: int,
    parts: list[LatticePart],
    *,
    chunk: int = 262144,
    threads: int = 1,
) -> list[Bytes | None]: ...
def lattice_run_values(
    lattice: Lattice,
    codes: Buffer,
    values: Bytes,
    *,
    squares: Buffer | None = None,
    first: int,
    length: int,
    stride: int,
    count: int,
) -> None: ...
def hysteresis_sums(
    lattice: Lattice,
    weight: Buffer,
    decoded: Buffer,
    original: Buffer,
    *,
    max_hysteresis: float,
    levels: int,
    first: int,
    length: int,
    stride: int,
    count: int,
) -> tuple[float, NDArray[np.float64]]: ...
def lattice_quantize(
    lattice: Lattice,
    values: Buffer,
    codes: Bytes,
    *,
    seconds: Lattice | None = None,
    second_codes: Buffer | None = None,
    previous: Buffer | None = None,
    hysteresis: float = 0.5,
    threads: int = 1,
) -> int: ...
def lattice_quantize_with_errors(
    lattice: Lattice,
    values: Buffer,
    codes: Bytes,
    *,
    slopes: Buffer | None = None,
    squares: Buffer | None = None,
    previous: Buffer | None = None,
    hysteresis: float = 0.5,
    threads: int = 1,
) -> tuple[int, tuple[float, float, float]]: ...
def quantize_with_feedback(
    lattice: Lattice, values: Buffer, factor: Buffer, codes: Bytes, *, threads: int = 1
) -> bool: ...
def quantization_error_sums(
    lattice: Lattice,
    codes: Buffer,
    values: Buffer,
    *,
    slopes: Buffer | None = None,
    squares: Buffer | None = None,
    threads: int = 1,
) -> tuple[float, float, float]: ...
def second_moment_sums(
    seconds: Buffer,
    rows: int,
    columns: int,
    *,
    firsts: Buffer | None = None,
    by_column: bool = True,
    threads: int = 1,
) -> tuple[bool, bool, Doubles]: ...
def quantize_second_moments(
    seconds: Buffer,
    rows: int,
    columns: int,
    row_exponents: Buffer,
    column_exponents: Buffer,
    codes: Bytes,
    *,
    firsts: Buffer | None = None,
    step: int,
    dead_zone: float,
    threads: int = 1,
) -> Doubles: ...
def value_sums(values: Buffer, count: int, *, threads: int = 1) -> tuple[float, float, float]: ...

# Uniform grids and planes of bits (native/wire_uniform.hpp).
def uniform_encode(
    values: Buffer,
    size: int,
    bits: int,
    wire: Bytes,
    *,
    seed: int | None = None,
    brief: bool = True,
    bfloat16: bool = False,
    threads: int = 1,
) -> None: ...
def uniform_decode(
    wire: Buffer,
    size: int,
    bits: int,
    values: Bytes,
    *,
    seed: int | None = None,
    brief: bool = True,
    bfloat16: bool = False,
    threads: int = 1,
) -> None: ...
def pack_planes(codes: Buffer, bits: int, planes: Bytes) -> None: ...
def unpack_planes(planes: Buffer, bits: int, codes: Bytes) -> None: ...
def count_masked(values: Buffer, width: int, mask: int) -> int: ...

# Some values of many, and their indices (native/wire_sparse.hpp).
def indices_encode(form: str, n: int, width: int, indices: Buffer, out: Bytes) -> bool: ...
def indices_decode(form: str, n: int, width: int, data: Buffer, indices: Bytes) -> bool: ...
def sparse_encode(
    form: str, width: int, values: Buffer, columns: int, kept: int, out: Bytes, chosen: Bytes, *, threads: int = 1
) -> bool: ...
def sparse_decode(form: str, width: int, data: Buffer, chosen: Buffer, out: Bytes, item: int) -> bool: ...
def sparse_gather(values: Buffer, indices: Buffer, chosen: Bytes) -> bool: ...
def sparse_random(n: int, seed: int, indices: Bytes) -> None: ...

# Groups of values on levels of their own, blocks of small floats, and rotations (native/wire_blocks.hpp).
def normal_encode(
    values: Buffer, centers: Buffer, wire: Bytes, *, group: int, bits: int, bfloat16: bool = False, threads: int = 1
) -> None: ...
def normal_decode(
    wire: Buffer, centers: Buffer, values: Bytes, *, group: int, bits: int, bfloat16: bool = False, threads: int = 1
) -> None: ...
def blockfloat_encode(
    values: Buffer, wire: Bytes, *, block: int, bits: int, bfloat16: bool = False, threads: int = 1
) -> None: ...
def blockfloat_decode(
    wire: Buffer, values: Bytes, *, block: int, bits: int, bfloat16: bool = False, threads: int = 1
) -> None: ...
def rotate(
    values: Buffer,
    signs: Buffer,
    turned: Bytes,
    *,
    flags: Bytes | None = None,
    limit: float = 0.0,
    bfloat16: bool = False,
    threads: int = 1,
) -> None: ...
def rotate_back(
    turned: Buffer,
    signs: Buffer,
    values: Bytes,
    *,
    flags: Buffer | None = None,
    bfloat16: bool = False,
    threads: int = 1,
) -> None: ...
def progress_sums(
    weight: Buffer, parent_weight: Buffer, stored: Buffer, parent_stored: Buffer, count: int, *, threads: int = 1
) -> tuple[float, float, float, float]: ...
def _use_simd(most: int) -> int: ...
