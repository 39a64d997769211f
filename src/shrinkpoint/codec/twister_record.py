"""A record of states of Mersenne Twisters: how often each has been refilled since the parent checkpoint.

torch's generator of the CPU, Python's and numpy's legacy one are MT19937. Their 624 words of 32 bits are random, and no
coder makes them smaller. But once all are used they are refilled from the words before, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.coder import Bytes, digest_arrays
from shrinkpoint.codec.decoder import ByteRange, DecodedPart, DecodeInputs, RecordDecoder, RecordView
from shrinkpoint.codec.recipe import MAX_REFILLS, TwisterRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

WORDS = 624
_PLACES = {"U8": (24, 8), "U32": (0, 4)}
"""The offset of the words in a state, and the bytes of each word, by the dtype of its tensor.

torch's is of bytes, and the upper 4 of each word are zeros; those of Python and numpy are of the words themselves.
"""
_TORCH_BYTES = 5056
_BLOCK = 64  # refills that are compared in one call


def is_generator_state(info: TensorInfo) -> bool:
    """True if a tensor has the layout of a state; a delta of it then costs next to nothing, mostly."""
    if info.dtype == "U8":
        return info.nbytes == _TORCH_BYTES
    return info.dtype == "U32" and WORDS <= info.numel <= WORDS + 1


def encode_twisters(
    name: str, infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor], reference: Reference
) -> EncodedRecord | None:
    """Encode states of generators; None if one of the tensors is no state, or none that follows the parent's.

    Args:
        reference: the parent, which has tensors of the same names, shapes and dtypes.
    """
    if not all(map(is_generator_state, infos)):
        return None
    refills, rests = [], []
    before = [tensor_bytes(reference.tensors[info.name]) for info in infos]
    after = [tensor_bytes(tensors[info.name]) for info in infos]
    for info, old, new in zip(infos, before, after, strict=True):
        begin, size = _PLACES[info.dtype]
        rest = np.concatenate([new[:begin], new[begin + WORDS * size :]])
        counts = _possible_refills(_words(info, old), _words(info, new))
        count = next((n for n in counts if np.array_equal(_next_state(info, old, n, rest), new)), None)
        if count is None:
            return None
        refills.append(count)
        rests.append(rest)
    recipe = recipes.to_json(TwisterRecipe(tuple(refills)))
    rest = np.concatenate(rests)
    return EncodedRecord(name, tuple(infos), recipe, {"rest": rest.data}, digest_arrays(after), digest_arrays(before))


def _words(info: TensorInfo, state: Bytes) -> Bytes:
    """The words of a state, of shape (624, 4): a view of its bytes."""
    begin, size = _PLACES[info.dtype]
    return state[begin : begin + WORDS * size].reshape(WORDS, size)[:, :4]


def _generator(words: Bytes, position: int = WORDS) -> np.random.MT19937:
    """The generator of these words, of which so many have been used; it refills them when all have been."""
    generator = np.random.MT19937(0)
    key = np.ascontiguousarray(words).view("<u4").reshape(-1)
    generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
    return generator


def _possible_refills(before: Bytes, after: Bytes) -> Iterator[int]:
    """Yield how many refills lead from words to others, by the first of them; at most `MAX_REFILLS`."""
    yield 0
    first = int(_generator(after, 0).random_raw())  # a word is another number than what is returned for it
    generator = _generator(before)
    for start in range(0, MAX_REFILLS, _BLOCK):
        found = np.flatnonzero(generator.random_raw(WORDS * _BLOCK)[::WORDS] == first)
        yield from (start + 1 + int(place) for place in found)


def _next_state(info: TensorInfo, state: Bytes, refills: int, rest: Bytes) -> Bytes:
    """The state after so many refills, with these bytes before and after its words."""
    generator, out = _generator(_words(info, state)), state.copy()
    generator.random_raw(WORDS * refills, output=False)
    _words(info, out)[:] = np.asarray(generator.state["state"]["key"]).astype("<u4").view(np.uint8).reshape(WORDS, 4)
    begin, size = _PLACES[info.dtype]
    out[:begin], out[begin + WORDS * size :] = rest[:begin], rest[begin:]
    return out


class TwisterDecoder(RecordDecoder):
    """Refills the parent's states; it decodes all of a record."""

    splittable, uses_parent, cacheable = False, True, False

    def __init__(self, view: RecordView, recipe: TwisterRecipe) -> None:
        super().__init__(view, [info.numel for info in view.infos])
        if len(recipe.refills) != len(view.infos) or not all(map(is_generator_state, view.infos)):
            raise ValueError("refills of tensors that are no states of generators")
        self._refills = recipe.refills
        self._rests = [info.nbytes - WORDS * _PLACES[info.dtype][1] for info in view.infos]
        if sum(self._rests) != view.sizes["rest"]:
            raise ValueError(f"{view.sizes['rest']} bytes beside the words, expected {sum(self._rests)}")

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        return self._parent_ranges(self._tensor_ranges(lo, hi))

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        ranges = self._tensor_ranges(lo, hi)
        before = [inputs.fetch([span]) for span in self._parent_ranges(ranges)]
        if inputs.base_digests is not None:
            inputs.base_digests.check_base(digest_arrays(before))
        values, start = inputs.allocate(sum(map(len, before))), 0
        rests = np.split(self._view.read_array("rest"), np.cumsum(self._rests)[:-1])
        for info, old, count, rest in zip(self._view.infos, before, self._refills, rests, strict=True):
            values[start : start + info.nbytes] = _next_state(info, old, count, rest)
            start += info.nbytes
        if inputs.value_digests is not None:
            inputs.value_digests.check_values(digest_arrays([values]))
        return self._split(values, ranges)
