"""Decodes the parts of tensors that lie in one record of lattices: where codes and values go, what predicts them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint.codec.coder import Bytes
from shrinkpoint.codec.decoder import ByteRange, DecodedPart, DecodeInputs, TensorRange, as_aligned, cast
from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, matrix_shape, narrow_codes
from shrinkpoint.tensors.dtypes import tensor_bytes


def native_values(tensor: LatticeTensor) -> tuple[_native.Lattice, Bytes]:
    """Float32 values as the native core takes them: a lattice, and codes on it."""
    return tensor.to_native(), tensor_bytes(tensor.codes)


class MemberDecoder:
    """Decodes a range of one tensor part by part: its codes are predicted, and then corrected by the tokens.

    Args:
        continued: the parent's tensor on the same lattice, whose points predict the codes and whose origin is that of
            the tensor; None: the values of `parent` predict the codes.
        gain: None for a tensor without an origin; else the range is the whole tensor.

    Attributes:
        count: values in the range.
    """

    def __init__(
        self,
        lattice: Lattice,
        span: TensorRange,
        parent: ByteRange | None,
        squares: ByteRange | None,
        inputs: DecodeInputs,
        continued: LatticeTensor | None = None,
        gain: float | None = None,
    ) -> None:
        self._info, self._first, self.count, self._params = span.info, span.begin, span.end - span.begin, lattice
        self._lattice = lattice.to_native(matrix_shape(span.info.shape))
        self._codes, self._code_bytes = np.empty(0, np.uint8), 1
        self._origin, self._gain = None if continued is None else continued.first_codes, gain
        self._parent = None if parent is None else _FetchedValues(parent, span.info.dtype, inputs, continued)
        self._squares = None if squares is None else _FetchedValues(squares, "F32", inputs)
        self._allocate_codes = inputs.allocate_codes
        self._overwrites = inputs.overwrite_base and (continued is None or continued.origin is not None)
        self._values = None
        if inputs.with_values:
            is_native = span.info.dtype == "F32"
            self._values = inputs.allocate(4 * self.count) if is_native else _native.empty(4 * self.count)

    def codes_part(self) -> _native.LatticePart:
        """The range for the native core: where codes go, at best into those of the parent, and what predicts them."""
        parent = None if self._parent is None else self._parent.part(0, self.count)
        squares = None if self._squares is None else self._squares.part(0, self.count)
        before = self._parent.narrow_codes if self._parent is not None and self._overwrites else None
        self._codes = self._allocate_codes(self.count) if before is None else before
        return self._lattice, self._first, self._codes, parent, squares

    def decode_values(
        self,
        wide: Bytes | None,
        differences: NDArray[np.int32] | None,
        digest: _native.Hasher | None,
        threads: int,
    ) -> None:
        """Decode the values of all codes, if they are wanted.

        Args:
            wide: the codes where some do not fit into a byte.
            differences: of a stored origin to the codes.

        Raises:
            ValueError: an origin is out of range.
        """
        if wide is not None:
            self._codes, self._code_bytes = wide, 2
        if differences is not None:
            codes = self._codes.view(np.int8 if self._code_bytes == 1 else np.int16)
            origin = differences.astype(np.int64) + codes.astype(np.int64)
            if origin.size and int(np.abs(origin).max()) > MAX_LATTICE_CODE:
                raise ValueError("an origin that is too far out")
            self._origin = narrow_codes(torch.from_numpy(origin.astype(np.int16))).reshape(self._info.shape)
        if self._values is not None:
            squares = None if self._squares is None else self._squares.part(0, self.count)
            _native.lattice_values(
                self._lattice if self._gain is None else self._tensor().to_native(),
                self._codes,
                self._values,
                squares=squares,
                digest=digest,
                first=self._first,
                threads=threads,
            )

    def predict(self, start: int, guesses: Bytes, contexts: Bytes, base: _native.Hasher | None, threads: int) -> None:
        """Predict codes from `start` of the range on, and fill in their contexts."""
        if self._parent is not None and self._parent.values is not None and base is not None and start == 0:
            base.update(self._parent.stored)
            base = None
        is_hashed = self._parent is not None and self._parent.values is None
        _native.lattice_predict(
            self._lattice,
            guesses,
            contexts,
            parent=None if self._parent is None else self._parent.part(start, contexts.size),
            squares=None if self._squares is None else self._squares.part(start, contexts.size),
            base=base if is_hashed else None,
            first=self._first + start,
            threads=threads,
        )

    def decode(
        self,
        start: int,
        guesses: Bytes,
        tokens: Bytes,
        contexts: Bytes,
        escapes: Bytes,
        digest: _native.Hasher | None,
        threads: int,
    ) -> int:
        """Decode codes and values from `start` of the range on; returns how many escapes they used."""
        stop = start + tokens.size
        if start == 0:
            self._codes = self._allocate_codes(self.count)
        used, is_narrow = _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            escapes,
            guesses,
            None if self._values is None or self._gain is not None else self._values[4 * start : 4 * stop],
            codes=self._codes[self._code_bytes * start : self._code_bytes * stop],
            squares=None if self._squares is None else self._squares.part(start, tokens.size),
            digest=None if self._gain is not None else digest,
            first=self._first + start,
            threads=threads,
        )
        if not is_narrow and self._code_bytes == 1:
            wide = _native.empty(2 * self.count)
            wide.view(np.int16)[:start] = self._codes.view(np.int8)[:start]
            wide[2 * start : 2 * stop] = guesses
            self._codes, self._code_bytes = wide, 2
        return used

    def part(self) -> DecodedPart:
        """The decoded range."""
        values = None if self._values is None else cast(self._values, "F32", self._info.dtype)
        return DecodedPart(values, self._tensor())

    def _tensor(self) -> LatticeTensor:
        """What is decoded; its codes are of the tensor's shape if they are all of its codes."""
        codes = torch.from_numpy(self._codes.view(np.int8 if self._code_bytes == 1 else np.int16))
        codes = codes.reshape(self._info.shape) if self.count == self._info.numel else codes
        relative_to = "" if self._squares is None else self._squares.name
        if self._gain is None:
            return LatticeTensor(codes, self._params, relative_to)
        return LatticeTensor(codes, self._params, relative_to, self._origin, self._gain)


class _FetchedValues:
    """Values of a range of another tensor, float32 or bfloat16: codes on a lattice if they are all of its values.

    Attributes:
        name: of the tensor.
        stored: its bytes as they are; empty for codes.
        values: the same as the native core reads them; None for codes.
    """

    def __init__(
        self, span: ByteRange, dtype: str, inputs: DecodeInputs, continued: LatticeTensor | None = None
    ) -> None:
        source = None if continued is None else continued.points()
        if source is None and dtype == "F32":
            source = inputs.fetch_codes(span)
        self.name, self.values = span.name, None
        self.stored: Bytes = np.empty(0, np.uint8)
        if source is not None:
            self._lattice, self._codes = native_values(source)
            self._code_bytes = source.codes.element_size()
            return
        self.stored = inputs.fetch(span)
        # The native core reads no float16.
        self.values = as_aligned(cast(self.stored, "F16", "F32") if dtype == "F16" else self.stored, 4)
        self._itemsize = 2 if dtype == "BF16" else 4

    @property
    def narrow_codes(self) -> Bytes | None:
        """The codes, if they have one byte each and may be written."""
        is_narrow = self.values is None and self._code_bytes == 1 and self._codes.flags.writeable
        return self._codes if is_narrow else None

    def part(self, start: int, count: int) -> _native.LatticeValues:
        """Values of the range from `start` on."""
        if self.values is not None:
            return self.values[self._itemsize * start : self._itemsize * (start + count)]
        return self._lattice, self._codes[self._code_bytes * start : self._code_bytes * (start + count)]
