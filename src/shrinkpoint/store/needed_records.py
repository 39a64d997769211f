"""Finds the records of a chain's files that its last file needs: many tensors are coded anew in every file."""

from __future__ import annotations

from collections.abc import Collection

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.recipe import CopyRecipe, LatticeRecipe, PlainRecipe, Recipe, RecipeParser
from shrinkpoint.container import FileReader
from shrinkpoint.container.metadata import RecordHead


def needed_records(reader: FileReader, names: Collection[str] | None) -> tuple[frozenset[int], frozenset[str]]:
    """Return the records that decoding some tensors of a file needs, and the names of the parent's tensors besides.

    Args:
        reader: the file.
        names: of the tensors; those that the file lacks need nothing. None: all of them.

    Returns:
        Indices of records, and names; more than needed where a recipe does not say exactly what it needs.
    """
    heads, parse = reader.records, RecipeParser()
    record_of = {info.name: index for index, head in enumerate(heads) for info in head.infos}
    by_ordinal = [info.name for head in heads for info in head.infos]
    needed = set(range(len(heads))) if names is None else {record_of[name] for name in names if name in record_of}
    parents: set[str] = set()
    for index in reversed(range(len(heads))):  # a record needs earlier ones only
        if index not in needed:
            continue
        head = heads[index]
        try:
            recipe = parse(head.recipe, len(head.infos))
            others = [by_ordinal[ordinal] for ordinal in recipes.ordinals(recipe)]
        except (ValueError, LookupError):  # decoding it says what is wrong
            continue
        needed.update(record_of[name] for name in others if record_of[name] < index)
        if _may_need_parent(head, recipe):
            parents.update(others, (info.name for info in head.infos))
    return frozenset(needed), frozenset(parents)


def _may_need_parent(head: RecordHead, recipe: Recipe) -> bool:
    if isinstance(recipe, LatticeRecipe):
        return recipe.base
    return not isinstance(recipe, PlainRecipe | CopyRecipe)
