"""ONE TENSOR <-> BYTES.

`recipe` says what was done, `arrange` lays tensors out as one array of numbers, `run` codes such an array with the
native core, `codec` joins the stages and is the only place where they meet. Of a tensor that is quantized, `symbols`
says what the quantizer left, and `quantized` codes that; of one on a grid, `lattice` and `gridded` do.
"""

from shrinkpoint.codec.codec import Material, copies, decode, encode, known_arrays, plain, same
from shrinkpoint.codec.codes import CODERS, DELTA_CODERS
from shrinkpoint.codec.gridded import Pointed, encode_gridded
from shrinkpoint.codec.lattice import Lattice, Points
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.quantized import Codebooked, encode_quantized
from shrinkpoint.codec.reference import Origin, Reference
from shrinkpoint.codec.run import Known, Run
from shrinkpoint.codec.symbols import Symbols
from shrinkpoint.codec.waves import decode_all

__all__ = [
    "CODERS",
    "DELTA_CODERS",
    "NUMBERS",
    "Codebooked",
    "Known",
    "Lattice",
    "Material",
    "Number",
    "Origin",
    "Pointed",
    "Points",
    "Reference",
    "Run",
    "Symbols",
    "copies",
    "decode",
    "decode_all",
    "encode",
    "encode_gridded",
    "encode_quantized",
    "known_arrays",
    "plain",
    "same",
]
