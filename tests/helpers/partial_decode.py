"""Records decoded in part, beside what they decode to as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from helpers.strategies import bits
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes
from shrinkpoint.codec.decoder import ByteRange, DecodeInputs, QuantizerParams, RecordDecoder, RecordView
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.record import record_decoder
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo


def infos_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, tuple(x.shape), dtype_name(x.dtype)) for name, x in tensors.items()}


@dataclass
class Part:
    """A record, and whole tensors of which it gets what it says it needs and nothing else.

    Attributes:
        decoded: tensors of earlier records of its file.
        symbols: of those that are quantized.
        asked: spans it was given.
    """

    encoded: EncodedRecord
    decoded: Mapping[str, Tensor]
    parent: Reference | None
    symbols: Mapping[str, object] = field(default_factory=dict)
    asked: list[ByteRange] = field(default_factory=list)

    def opened(self) -> RecordView:
        parts = {name: memoryview(part) for name, part in self.encoded.parts.items()}
        earlier = list(infos_of(self.decoded).values())
        before = {} if self.parent is None else infos_of(self.parent.tensors)
        sizes = {name: part.nbytes for name, part in parts.items()}

        def read(part: str, begin: int, end: int) -> memoryview:
            assert 0 <= begin <= end <= sizes[part]
            return memoryview(bytes(parts[part][begin:end]))

        return RecordView(self.encoded.infos, self.encoded.recipe, sizes, read, earlier.__getitem__, before.get)

    def pieces(self) -> RecordDecoder | None:
        decoder = record_decoder(self.opened())
        return decoder if decoder.splittable else None

    def range(self, pieces: RecordDecoder, lo: int, hi: int) -> bytes:
        """The bytes of the units [lo, hi) of the stream."""
        needs = set(pieces.required_ranges(lo, hi))

        def supply(spans: Sequence[ByteRange]) -> Bytes:
            assert needs.issuperset(spans)
            self.asked.extend(spans)
            return np.frombuffer(b"".join(map(self._bytes_of, spans)), np.uint8)

        made = pieces.quantizer_params(self._origin)
        block = pieces.decode_range(lo, hi, DecodeInputs(supply, self._origin))
        assert made.keys() <= {info.name for info in self.encoded.infos}
        assert block.codes is None or block.codes.nbytes == hi - lo
        return block.values.tobytes()

    def _bytes_of(self, span: ByteRange) -> bytes:
        held, symbols = (self.decoded, self.symbols) if span.same_file else (self.parent.tensors, self.parent.quantized)
        data = bits(symbols[span.name].codes if span.codes else held[span.name])
        assert 0 <= span.start <= span.stop <= len(data)
        return data[span.start : span.stop]

    def _origin(self, name: str) -> QuantizerParams:
        one = self.parent.quantized[name]
        assert isinstance(one, CodebookTensor | LatticeTensor)
        return one.lattice if isinstance(one, LatticeTensor) else one


def stream(encoded: EncodedRecord, whole: Reference) -> bytes:
    """The bytes of a record's tensors, one behind the other."""
    return b"".join(bits(whole.tensors[info.name]) for info in encoded.infos)


def aligned(pieces: RecordDecoder, start: int, stop: int) -> tuple[int, int]:
    """The range of whole chunks that covers two places, given in parts of a thousand of the stream."""
    lo, hi = sorted((start * pieces.count // 1000, stop * pieces.count // 1000))
    lo = min(lo // pieces.chunk * pieces.chunk, (pieces.count - 1) // pieces.chunk * pieces.chunk)
    return lo, min((max(hi, lo + 1) + pieces.chunk - 1) // pieces.chunk * pieces.chunk, pieces.count)
