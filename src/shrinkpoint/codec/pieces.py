"""Which records can be decoded in part."""

from __future__ import annotations

from collections.abc import Sequence

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.partial import Copied, Opened, Pieces, Stored
from shrinkpoint.codec.partial_coded import CodedPieces
from shrinkpoint.codec.partial_gridded import gridded_pieces
from shrinkpoint.codec.partial_quantized import quantized_pieces
from shrinkpoint.codec.recipe import Coded, Copy, Gridded, Plain, Quantized, Same


def pieces_of(opened: Opened) -> Pieces | None:
    """The record's pieces; None where it can only be decoded as a whole (`codec.decode`).

    A record of kind `same` has none of its own: those of the parent's tensors serve.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    recipe = recipes.from_json(opened.recipe, len(opened.infos))
    match recipe:
        case Plain():
            return Stored(opened)
        case Copy(of):
            return Copied(opened, of)
        case Coded():
            return CodedPieces(opened, recipe)
        case Quantized():
            return quantized_pieces(opened, recipe)
        case Gridded():
            return gridded_pieces(opened, recipe)
        case Same():
            raise ValueError("a record that says only that nothing has changed")


def needed_whole(opened: Opened) -> list[tuple[bool, str]]:
    """The tensors that decoding the record as a whole needs: (of its own file, name).

    Raises:
        ValueError, LookupError: the recipe is at fault.
    """
    recipe = recipes.from_json(opened.recipe, len(opened.infos))
    members, own, parent = [info.name for info in opened.infos], list[int](), list[str]()
    match recipe:
        case Same():
            parent = members
        case Copy(of):
            own = [*of]
        case Coded(_, _, base, moments):
            own = [ordinal for pair in moments for ordinal in pair]
            parent = [*members, *_first_moments(opened, moments)] if base else []
        case Quantized():
            own = [*recipe.under, *(ordinal for pair in recipe.moments for ordinal in pair)]
            parent = members if recipe.base or recipe.residual else []
        case Gridded():
            own, parent = [*recipe.others], members if recipe.base else []
    named = [(True, opened.earlier(ordinal).name) for ordinal in own]
    return list(dict.fromkeys(named + [(False, name) for name in parent]))


def _first_moments(opened: Opened, moments: Sequence[tuple[int, int]]) -> list[str]:
    """Those that the parent has as well, with the same shape and dtype."""
    before = opened.before or {}
    first = [opened.earlier(pair[0]) for pair in moments]
    fit = [before.get(info.name) for info in first]
    return [
        info.name
        for info, one in zip(first, fit, strict=True)
        if one is not None and (one.shape, one.dtype) == (info.shape, info.dtype)
    ]
