"""ONE TENSOR <-> BYTES.

`recipe` says what was done, `arrange` lays tensors out as one array of numbers, `run` codes such an array with the
native core, `codec` joins the stages and is the only place where they meet.
"""

from shrinkpoint.codec.codec import Material, copies, decode, encode, known_arrays, plain, same
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.reference import Reference
from shrinkpoint.codec.run import Known, Run
from shrinkpoint.codec.waves import decode_all

__all__ = [
    "NUMBERS",
    "Known",
    "Material",
    "Number",
    "Reference",
    "Run",
    "copies",
    "decode",
    "decode_all",
    "encode",
    "known_arrays",
    "plain",
    "same",
]
