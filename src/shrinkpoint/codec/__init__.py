"""Encodes the tensors of one record to bytes, and decodes them.

`recipe` describes how a record was encoded, and `coder` lays its tensors out as one array of numbers and entropy-codes
that with the native core. `codebook_tensor` and `lattice` describe quantized tensors; `record`, `codebook_record`,
`lattice_record` and `lattice_decoder` hold the encoders and decoders of the kinds of record, with the interface in
`decoder`.
"""

from shrinkpoint.codec.codebook_record import CODERS, DELTA_CODERS, CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import NUMBER_FORMATS, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.parallel import decode_all
from shrinkpoint.codec.record import (
    RecordInput,
    coding_context,
    decode,
    encode,
    encode_copies,
    encode_plain,
    encode_same,
)
from shrinkpoint.codec.reference import QuantizedTensor, Reference

__all__ = [
    "CODERS",
    "DELTA_CODERS",
    "NUMBER_FORMATS",
    "CodebookInput",
    "CodebookTensor",
    "CoderConfig",
    "CodingContext",
    "Lattice",
    "LatticeInput",
    "LatticeTensor",
    "NumberFormat",
    "QuantizedTensor",
    "RecordInput",
    "Reference",
    "coding_context",
    "decode",
    "decode_all",
    "encode",
    "encode_codebook_record",
    "encode_copies",
    "encode_lattice_record",
    "encode_plain",
    "encode_same",
]
