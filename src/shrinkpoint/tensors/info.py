"""Descriptions of tensors and encoded records; does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

JSON: TypeAlias = Any
"""Anything that `json.dumps` writes: None, bool, int, float, str, and lists and string-keyed dicts of these."""


@dataclass(frozen=True)
class Dtype:
    """A dtype that a checkpoint may hold."""

    name: str  # in our files; safetensors' own name where safetensors has the dtype
    torch_name: str  # attribute of torch, which an older torch may lack
    itemsize: int  # bytes of an element
    # "bool", "int", "float", "complex", or "packed": two 4-bit floats in a byte.
    kind: Literal["bool", "int", "float", "complex", "packed"]
    mantissa: int = 0  # explicit mantissa bits of a number whose exponent is coded separately; 0 for all other numbers
    in_safetensors: bool = True  # True if safetensors has the dtype; an entry of a file has no other

    @property
    def number_width(self) -> int:
        """Bits of one coded number; a complex value is two numbers."""
        return self.itemsize * 8 // (2 if self.kind == "complex" else 1)


# A new dtype is a row here, a row of the tables in docs/format.md, and a golden file.
DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", "bool", 1, "bool"),
        Dtype("U8", "uint8", 1, "int"),
        Dtype("I8", "int8", 1, "int"),
        Dtype("U16", "uint16", 2, "int"),
        Dtype("I16", "int16", 2, "int"),
        Dtype("U32", "uint32", 4, "int"),
        Dtype("I32", "int32", 4, "int"),
        Dtype("U64", "uint64", 8, "int"),
        Dtype("I64", "int64", 8, "int"),
        Dtype("F16", "float16", 2, "float", mantissa=10),
        Dtype("BF16", "bfloat16", 2, "float", mantissa=7),
        Dtype("F32", "float32", 4, "float", mantissa=23),
        Dtype("F64", "float64", 8, "float", mantissa=52),
        Dtype("F8_E4M3", "float8_e4m3fn", 1, "float"),
        Dtype("F8_E5M2", "float8_e5m2", 1, "float"),
        Dtype("F8_E4M3FNUZ", "float8_e4m3fnuz", 1, "float", in_safetensors=False),
        Dtype("F8_E5M2FNUZ", "float8_e5m2fnuz", 1, "float", in_safetensors=False),
        Dtype("F8_E8M0", "float8_e8m0fnu", 1, "float", in_safetensors=False),
        Dtype("F4_X2", "float4_e2m1fn_x2", 1, "packed", in_safetensors=False),
        Dtype("C32", "complex32", 4, "complex", mantissa=10, in_safetensors=False),
        Dtype("C64", "complex64", 8, "complex", mantissa=23),
        Dtype("C128", "complex128", 16, "complex", mantissa=52, in_safetensors=False),
    )
}
"""Every dtype that a checkpoint may hold, by its name in our files."""
ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}

_NEST_FORMS = frozenset({"namespace", "deque", "buffer", "defaultdict", "attributes", "parsed"})


def is_nest_form(body: JSON) -> bool:
    """True if a form in a tree, `[name, value]` (`plain_forms`), may hold anything that a state may hold."""
    is_form = type(body) is list and len(body) == 2 and type(body[0]) is str
    return is_form and body[0].partition(":")[0] in _NEST_FORMS


class Role(str, Enum):
    """The purpose of a tensor; it affects how the tensor is coded, never what it decodes to."""

    PARAMETER = "parameter"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    MASTER = "master"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    OTHER = "other"

    __hash__ = str.__hash__  # that of `Enum` is a function in Python


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of a tensor.

    Attributes:
        name: unique in its file; the path inside the state, joined with "/".
        shape: of this tensor, or of this shard.
        dtype: a key of `DTYPES`.
        role: its purpose.
        offsets: offsets of a shard in its global tensor; None for a tensor that is not a shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = Role.OTHER
    offsets: tuple[int, ...] | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


shared_info = lru_cache(1 << 14)(TensorInfo)
"""Returns one and the same `TensorInfo` for the same arguments, as the files of a chain have them."""


@dataclass(frozen=True)
class OptimizerInfo:
    """Optimizer settings and moments of one parameter; a hint for coders, never needed to decode."""

    moment1: str | None  # name of the first moment (Adam's exp_avg, SGD's momentum_buffer) in the same `FlatState`
    moment2: str | None  # name of the second moment (exp_avg_sq)
    step: int | None  # number of updates so far
    lr: float | None  # learning rate at the moment of the save
    beta1: float | None  # decay of the first moment per step
    beta2: float | None  # decay of the second moment per step
    eps: float | None  # the optimizer's epsilon
    weight_decay: float | None  # the coefficient; per step and lr if decoupled
    decoupled: bool  # True if weight decay acts on the weights (AdamW) or through the gradient (Adam)
    # Names of the row and column means of squared gradients, over the last two axes (Adafactor).
    factors: tuple[str, str] | None = None
    # Names of the 8-bit second moment: codes, codebook, and the maximum of each block (bitsandbytes).
    blocks: tuple[str, str, str] | None = None
    # Name of a decaying mean of squared gradients, of decay `beta2`: Adam's second moment or RMSprop's, but not SOAP's,
    # which is of rotated gradients.
    squares: str | None = None
    peak_lr: float | None = None  # the largest learning rate that the settings name, such as a schedule's first


@dataclass(frozen=True)
class EncodedRecord:
    """One record of a file: one large tensor, or several small ones that share their statistics."""

    name: str  # unique in its file; names the entries
    infos: tuple[TensorInfo, ...]  # the tensors, in the order in which their values stand in the codes
    recipe: JSON  # what was done (`codec.Recipe` as JSON); all a reader needs besides the parts
    parts: Mapping[str, bytes | bytearray | memoryview] = field(repr=False)  # named byte strings
    digest: str  # xxh3-128 of the decoded codes, in hex
    base: str | None = None  # xxh3-128 of the reference the recipe needs, in hex; None when it stands alone
