"""One number <-> (symbol, extra bits), and the context of a symbol."""

from __future__ import annotations

from reference.predict import bits_of, toward_zero
from reference.run import Known, Run

Field = tuple[int, int]
"""Value and width of some bits."""


def held(n: int, high: int) -> int:
    return min(max(n, 0), high)


def magnitude(run: Run, bits: int) -> int:
    return bits & ((1 << (run.width - 1)) - 1)


# ---- levels


def level_symbol(run: Run, bits: int, p: int) -> tuple[int, list[Field]]:
    a, sign = magnitude(run, bits), [(bits >> (run.width - 1), 1)] if run.sign else []
    if a == 0:
        return 0, sign
    symbol, stored = (a >> (run.mantissa - run.fine)) - p + 128, run.mantissa - run.fine - run.shift
    if not 1 <= symbol <= 254:
        return 255, [(bits, run.width)]
    return symbol, [((a >> run.shift) & ((1 << stored) - 1), stored), *sign]


def level_number(run: Run, symbol: int, p: int, get) -> int:  # type: ignore[no-untyped-def]
    """`get` takes the next extra bits."""
    if symbol == 255:
        return get(run.width)
    a = 0
    if symbol > 0:
        level = p + symbol - 128
        a = (level << (run.mantissa - run.fine)) + (get(run.mantissa - run.fine - run.shift) << run.shift)
    return a | (get(1) if run.sign else 0) << (run.width - 1)


def level_context(run: Run, known: Known, i: int) -> tuple[int, int]:
    """(context, predicted level)."""
    p = run.bias if known.levels is None else known.levels[i]
    if p is None:
        return 49, run.bias
    if run.companion == "base":
        a = magnitude(run, known.base[i])
        return 48 if a == 0 else held((a >> (run.mantissa - run.fine)) - p + 24, 47), p
    if run.companion == "moment1":
        m = bits_of(abs(known.moment1[i]))
        level = 2 * (m >> (23 - run.fine)) - 127 * 2**run.fine
        return 48 if m == 0 else held(toward_zero(level - p) + 24, 47), p
    return 0, p


# ---- deltas


def ordered(run: Run, bits: int) -> int:
    w = run.width - run.shift
    x, sign = bits >> run.shift, 1 << (w - 1)
    if run.mantissa == 0:
        return x
    return ~x & ((1 << w) - 1) if x & sign else x | sign


def unordered(run: Run, x: int) -> int:
    w = run.width - run.shift
    sign = 1 << (w - 1)
    if run.mantissa:
        x = x ^ sign if x & sign else ~x & ((1 << w) - 1)
    return x << run.shift


def difference(run: Run, bits: int, prediction: int) -> tuple[int, bool]:
    """(n, whether d < 0)."""
    w = run.width - run.shift
    d = (ordered(run, bits) - ordered(run, prediction)) % (1 << w)
    d -= (d >> (w - 1)) << w
    return (d, False) if d >= 0 else (-d - 1, True)


def delta_symbol(run: Run, bits: int, prediction: int) -> tuple[int, list[Field]]:
    n, negative = difference(run, bits, prediction)
    if n < 8:
        return 2 * n + negative, []
    k = n.bit_length() - 1
    token = 8 + 2 * (k - 3) + (n >> (k - 1) & 1)
    return 2 * token + negative, [(n & ((1 << (k - 1)) - 1), k - 1)]


def delta_number(run: Run, symbol: int, prediction: int, get) -> int:  # type: ignore[no-untyped-def]
    """`get` takes the next extra bits."""
    token, n = symbol // 2, symbol // 2
    if token >= 8:
        k = (token - 8) // 2 + 3
        n = (2 + token % 2 << (k - 1)) + get(k - 1)
    d = -n - 1 if symbol % 2 else n
    return unordered(run, (ordered(run, prediction) + d) % (1 << (run.width - run.shift)))


def delta_context(run: Run, known: Known, i: int, prediction: int, squares: list[int]) -> int:
    if run.mantissa == 0:
        return 0
    exponent = magnitude(run, prediction) >> run.mantissa
    if run.predictor == "square":
        return held(exponent - (squares[i] >> 23), 31)
    e = held(run.top - exponent, 15)
    if known.hint is not None:
        return 32 * e + known.hint[i]
    if not known.moments:
        return 32 * e
    r, negative = push(known, i)
    return 32 * e + 2 * r + negative


def push(known: Known, i: int) -> tuple[int, bool]:
    """How far Adam pushes, in 16 steps, and whether the first moment has its sign bit set."""
    m, v = bits_of(known.moment1[i]), bits_of(abs(known.moment2[i]))
    return held(((m & 0x7FFFFFFF) >> 22) - ((v >> 23) + 127) + 10, 15), m >= 1 << 31


# ---- codes


def code_context(run: Run, known: Known, i: int) -> int:
    before = min(known.base[i], run.largest(known)) if run.predictor == "base" else 0
    if not known.moments:
        return before
    r, negative = push(known, i)
    pushes = run.pushes(known)
    return pushes * before + 2 * (r * pushes // 32) + negative


def code_symbol(run: Run, number: int, prediction: int) -> tuple[int, list[Field]]:
    if run.predictor == "none":
        return number, []
    d = (number - prediction + 128) % 256 - 128
    return 2 * d if d >= 0 else -2 * d - 1, []


def code_number(run: Run, symbol: int, prediction: int, get) -> int:  # type: ignore[no-untyped-def]
    """There is nothing to `get`."""
    if run.predictor == "none":
        return symbol
    return (prediction + (-(symbol + 1) // 2 if symbol % 2 else symbol // 2)) % 256


def hint(run: Run, bits: int, other: int) -> int:
    """Five bits about the move from `other` to `bits`."""
    n, negative = difference(run, bits, other)
    return 2 * min(15, n.bit_length() // 2) + negative
