"""Chooses the partial decoder of a record, and lists what decoding it whole needs."""

from __future__ import annotations

from collections.abc import Sequence

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.partial.codebook import codebook_decoder
from shrinkpoint.codec.partial.coded import CodedDecoder
from shrinkpoint.codec.partial.interface import CopyDecoder, PartialDecoder, PlainDecoder, RecordView, has_same_layout
from shrinkpoint.codec.partial.lattice import lattice_decoder
from shrinkpoint.codec.recipe import CodebookRecipe, CodedRecipe, CopyRecipe, LatticeRecipe, PlainRecipe, SameRecipe


def partial_decoder(view: RecordView) -> PartialDecoder | None:
    """Return the partial decoder of a record; None if it can only be decoded whole, by `codec.decode`.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged; or the record
            is of kind `same`, for which the parent's record is to be decoded instead.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    match recipe:
        case PlainRecipe():
            return PlainDecoder(view)
        case CopyRecipe(sources):
            return CopyDecoder(view, sources)
        case CodedRecipe():
            return CodedDecoder(view, recipe)
        case CodebookRecipe():
            return codebook_decoder(view, recipe)
        case LatticeRecipe():
            return lattice_decoder(view, recipe)
        case SameRecipe():
            raise ValueError("a record of kind same has no bytes to decode")


def required_tensors(view: RecordView) -> list[tuple[bool, str]]:
    """Return the tensors that decoding the whole record needs: (whether of its own file or of the parent, name).

    Raises:
        ValueError, LookupError: the recipe is malformed.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    members, own, parent = [info.name for info in view.infos], list[int](), list[str]()
    match recipe:
        case SameRecipe():
            parent = members
        case CopyRecipe(sources):
            own = [*sources]
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
    """Return the names of first moments that the parent has with the same shape and dtype."""
    parents = view.parent_tensors or {}
    first_moments = [view.tensor_at(first) for first, _ in moments]
    return [info.name for info in first_moments if has_same_layout(parents.get(info.name), info)]
