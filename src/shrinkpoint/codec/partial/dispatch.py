"""Which records can be decoded in part."""

from __future__ import annotations

from collections.abc import Sequence

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.partial.codebook import codebook_decoder
from shrinkpoint.codec.partial.coded import CodedDecoder
from shrinkpoint.codec.partial.interface import CopyDecoder, PartialDecoder, PlainDecoder, RecordView
from shrinkpoint.codec.partial.lattice import lattice_decoder
from shrinkpoint.codec.recipe import CodebookRecipe, CodedRecipe, CopyRecipe, LatticeRecipe, PlainRecipe, SameRecipe


def partial_decoder(view: RecordView) -> PartialDecoder | None:
    """The record's pieces; None where it can only be decoded as a whole (`codec.decode`).

    A record of kind `same` has none of its own: those of the parent's tensors serve.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    match recipe:
        case PlainRecipe():
            return PlainDecoder(view)
        case CopyRecipe(of):
            return CopyDecoder(view, of)
        case CodedRecipe():
            return CodedDecoder(view, recipe)
        case CodebookRecipe():
            return codebook_decoder(view, recipe)
        case LatticeRecipe():
            return lattice_decoder(view, recipe)
        case SameRecipe():
            raise ValueError("a record that says only that nothing has changed")


def required_tensors(view: RecordView) -> list[tuple[bool, str]]:
    """The tensors that decoding the record as a whole needs: (of its own file, name).

    Raises:
        ValueError, LookupError: the recipe is at fault.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    members, own, parent = [info.name for info in view.infos], list[int](), list[str]()
    match recipe:
        case SameRecipe():
            parent = members
        case CopyRecipe(of):
            own = [*of]
        case CodedRecipe(_, _, base, moments):
            own = [ordinal for pair in moments for ordinal in pair]
            parent = [*members, *_parent_first_moments(view, moments)] if base else []
        case CodebookRecipe():
            own = [*recipe.contexts, *(ordinal for pair in recipe.moments for ordinal in pair)]
            parent = members if recipe.base or recipe.residual else []
        case LatticeRecipe():
            own, parent = [*recipe.relative_to], members if recipe.base else []
    named = [(True, view.tensor_at(ordinal).name) for ordinal in own]
    return list(dict.fromkeys(named + [(False, name) for name in parent]))


def _parent_first_moments(view: RecordView, moments: Sequence[tuple[int, int]]) -> list[str]:
    """Those that the parent has as well, with the same shape and dtype."""
    before = view.parent_tensors or {}
    first = [view.tensor_at(pair[0]) for pair in moments]
    fit = [before.get(info.name) for info in first]
    return [
        info.name
        for info, one in zip(first, fit, strict=True)
        if one is not None and (one.shape, one.dtype) == (info.shape, info.dtype)
    ]
