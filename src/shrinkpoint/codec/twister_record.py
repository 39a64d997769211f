"""A record of states of Mersenne Twisters: how often each has been refilled since the parent checkpoint.

torch's generator of the CPU, Python's and numpy's legacy one are MT19937. Their 624 words of 32 bits are random, and no
coder makes them smaller. But once all are used they are refilled from the words before, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
_BLOCK = 64  # refills that are compared in one call
_TORCH_STATE = ("U8", 5056, 24, 8)
"""torch's state: its dtype, its bytes, where its words begin, and the bytes of each, of which 4 are zeros."""


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
        words, rest = _split(info, new)
        count = _count_refills(_split(info, old)[0], words)
        if count is None or not np.array_equal(_join(info, words, rest), new):
            return None
        refills.append(count)
        rests.append(rest)
    recipe = recipes.to_json(TwisterRecipe(tuple(refills)))
    rest = np.concatenate(rests)
    return EncodedRecord(name, tuple(infos), recipe, {"rest": rest.data}, digest_arrays(after), digest_arrays(before))


def _generator(words: Bytes, position: int = WORDS) -> np.random.MT19937:
    """The generator of these words, of which so many have been used; it refills them when all have been."""
    generator = np.random.MT19937(0)
    generator.state = {"bit_generator": "MT19937", "state": {"key": words.view("<u4"), "pos": position}}
    return generator


def _refill(words: Bytes, count: int) -> Bytes:
    generator = _generator(words)
    generator.random_raw(WORDS * count, output=False)
    return np.asarray(generator.state["state"]["key"]).astype("<u4").view(np.uint8)


def _count_refills(before: Bytes, after: Bytes) -> int | None:
    """How many refills lead from words to others; None if it is more than `MAX_REFILLS`, or never."""
    if np.array_equal(before, after):
        return 0
    first = int(_generator(after, 0).random_raw())  # a word is another number than what is returned for it
    generator = _generator(before)
    for start in range(0, MAX_REFILLS, _BLOCK):
        found = np.flatnonzero(generator.random_raw(WORDS * _BLOCK)[::WORDS] == first)
        for count in (start + 1 + int(place) for place in found):
            if np.array_equal(_refill(before, count), after):
                return count
    return None


def is_generator_state(info: TensorInfo) -> bool:
    """True if a tensor has the layout of a state; a delta of it then costs next to nothing, mostly."""
    return (info.dtype, info.nbytes) == _TORCH_STATE[:2] or (info.dtype == "U32" and WORDS <= info.numel <= WORDS + 1)


def _split(info: TensorInfo, state: Bytes) -> tuple[Bytes, Bytes]:
    """The words of a state, 4 bytes each, and all bytes before and after them."""
    begin, size = _TORCH_STATE[2:] if info.dtype == "U8" else (0, 4)
    end = begin + WORDS * size
    words = state[begin:end].reshape(WORDS, size)[:, :4].reshape(-1)
    return np.ascontiguousarray(words), np.concatenate([state[:begin], state[end:]])


def _join(info: TensorInfo, words: Bytes, rest: Bytes) -> Bytes:
    """The state of these words, and of these bytes before and after them."""
    begin, size = _TORCH_STATE[2:] if info.dtype == "U8" else (0, 4)
    wide = np.zeros((WORDS, size), np.uint8)
    wide[:, :4] = words.reshape(WORDS, 4)
    return np.concatenate([rest[:begin], wide.reshape(-1), rest[begin:]])


class TwisterDecoder(RecordDecoder):
    """Refills the parent's states; it decodes all of a record."""

    splittable, uses_parent, cacheable = False, True, False

    def __init__(self, view: RecordView, recipe: TwisterRecipe) -> None:
        super().__init__(view, [info.nbytes for info in view.infos])
        if len(recipe.refills) != len(view.infos) or not all(map(is_generator_state, view.infos)):
            raise ValueError("refills of tensors that are no states of generators")
        self._refills = recipe.refills
        self._rests = [len(_split(info, np.zeros(info.nbytes, np.uint8))[1]) for info in view.infos]
        if sum(self._rests) != view.sizes["rest"]:
            raise ValueError(f"{view.sizes['rest']} bytes beside the words, expected {sum(self._rests)}")

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        return self._parent_ranges(self._tensor_ranges(lo, hi))

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        ranges = self._tensor_ranges(lo, hi)
        before = [inputs.fetch([span]) for span in self._parent_ranges(ranges)]
        if inputs.base_digests is not None:
            inputs.base_digests.check_base(digest_arrays(before))
        values, start, rests = inputs.allocate(self.count), 0, self._view.read_array("rest")
        for info, old, count, size in zip(self._view.infos, before, self._refills, self._rests, strict=True):
            words = _refill(_split(info, old)[0], count)
            values[start : start + info.nbytes] = _join(info, words, rests[:size])
            start, rests = start + info.nbytes, rests[size:]
        if inputs.value_digests is not None:
            inputs.value_digests.check_values(digest_arrays([values]))
        return self._split(values, ranges)

    def _unit_bytes(self, info: TensorInfo) -> int:
        return 1
