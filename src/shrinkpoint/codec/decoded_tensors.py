"""Tensors of a checkpoint by name, held as what they are made from: values, codes on a lattice, or another tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, as_matrix


class LatticeSource(NamedTuple):
    """A tensor on a lattice: a quarter of its values' bytes.

    Attributes:
        quantized: its codes and lattice.
        dtype: of its values.
        values: the values, if they have been decoded already.
    """

    quantized: LatticeTensor
    dtype: torch.dtype
    values: Tensor | None = None


class CastSource(NamedTuple):
    """A tensor that is another one in a narrower dtype.

    Attributes:
        name: of the other tensor.
        dtype: of its values.
    """

    name: str
    dtype: torch.dtype


TensorSource: TypeAlias = Tensor | LatticeSource | CastSource


class DecodedTensors(Mapping[str, Tensor]):
    """Tensors by name, decoded anew whenever they are asked for, unless they are held as values.

    Args:
        sources: by name.

    Attributes:
        names: the names in order, indexed by ordinal; listing the keys for each record would take quadratic time.
    """

    def __init__(self, sources: Mapping[str, TensorSource] | None = None) -> None:
        self._sources: dict[str, TensorSource] = {}
        self.names: list[str] = []
        self.add(sources or {})

    def add(self, sources: Mapping[str, TensorSource] | Mapping[str, Tensor]) -> None:
        """Add the tensors of the next record; of those of another mapping of this kind, their sources."""
        self._sources.update(sources._sources if isinstance(sources, DecodedTensors) else sources)
        self.names.extend(sources)

    def skip(self, names: Iterable[str]) -> None:
        """Number the tensors of the next record, which nobody needs."""
        self.names.extend(names)

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if isinstance(source, Tensor):
            return source
        if isinstance(source, CastSource):
            return self[source.name].to(source.dtype)
        if source.values is not None:
            return source.values
        other = source.quantized.relative_to
        return source.quantized.dequantize(source.dtype, self[other] if other else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    @property
    def nbytes(self) -> int:
        """Bytes that are held: of values, and of codes."""
        return sum(_held_bytes(source) for source in self._sources.values())

    def layout(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor."""
        source = self._sources[name]
        if isinstance(source, Tensor):
            return tuple(source.shape), source.dtype
        if isinstance(source, CastSource):
            return self.layout(source.name)[0], source.dtype
        return tuple(source.quantized.codes.shape), source.dtype

    def lattice_source(self, name: str) -> LatticeSource | None:
        """Return the codes that a tensor's values are made from; None if it is held as values alone."""
        source = self._sources[name]
        return source if isinstance(source, LatticeSource) else None

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, viewed as a matrix; only these are decoded."""
        source = self._sources[name]
        if isinstance(source, CastSource):
            return self.rows(source.name, rows).to(source.dtype)
        if isinstance(source, Tensor) or source.values is not None:
            return as_matrix(self[name])[rows]
        other = source.quantized.relative_to
        return source.quantized.dequantize_rows(rows, source.dtype, self.rows(other, rows) if other else None)

    def subset(self, names: Iterable[str]) -> DecodedTensors:
        """Return these tensors alone; what one of them is made from must be among them, or it is held as values."""
        names = list(names)
        chosen = set(names)
        return DecodedTensors({name: self._self_contained(name, chosen) for name in names})

    def needed_names(self) -> set[str]:
        """Return the names of the tensors that others are made from."""
        out = set()
        for source in self._sources.values():
            if isinstance(source, CastSource):
                out.add(source.name)
            elif isinstance(source, LatticeSource) and source.quantized.relative_to:
                out.add(source.quantized.relative_to)
        return out

    def without_values(self) -> DecodedTensors:
        """Return the same tensors, those that can be decoded without their values."""
        return DecodedTensors(
            {
                name: source._replace(values=None) if isinstance(source, LatticeSource) else source
                for name, source in self._sources.items()
            }
        )

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> DecodedTensors:
        """Return the same tensors, some of those that are held as values with other memory."""
        return DecodedTensors({**self._sources, **tensors})

    def held_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are held as values alone, by name."""
        return {name: source for name, source in self._sources.items() if isinstance(source, Tensor)}

    def _self_contained(self, name: str, names: set[str]) -> TensorSource:
        source = self._sources[name]
        if isinstance(source, CastSource) and source.name not in names:
            return self[name]
        is_relative = isinstance(source, LatticeSource) and source.quantized.relative_to not in {"", *names}
        return source._replace(values=self[name]) if isinstance(source, LatticeSource) and is_relative else source


def _held_bytes(source: TensorSource) -> int:
    if isinstance(source, Tensor):
        return source.nbytes
    if isinstance(source, CastSource):
        return 0
    return source.quantized.nbytes + (0 if source.values is None else source.values.nbytes)


_MAX_EXACT_SHARE = 8


def is_mostly_codes(tensors: Mapping[str, Tensor]) -> bool:
    """Whether at most an eighth of the values' bytes belong to tensors that are held as values alone."""
    exact = coded = 0
    for source in as_decoded(tensors)._sources.values():
        if isinstance(source, Tensor):
            exact += source.nbytes
        elif isinstance(source, LatticeSource):
            coded += source.quantized.codes.numel() * source.dtype.itemsize
    return exact <= (exact + coded) // _MAX_EXACT_SHARE


def as_decoded(tensors: Mapping[str, Tensor]) -> DecodedTensors:
    """Return any tensors by name as `DecodedTensors`."""
    return tensors if isinstance(tensors, DecodedTensors) else DecodedTensors(tensors)


def tensor_layout(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor, without decoding it."""
    if isinstance(tensors, DecodedTensors):
        return tensors.layout(name)
    return tuple(tensors[name].shape), tensors[name].dtype


def tensor_rows(tensors: Mapping[str, Tensor], name: str, rows: slice) -> Tensor:
    """Return some rows of a tensor, viewed as a matrix, without decoding others."""
    return tensors.rows(name, rows) if isinstance(tensors, DecodedTensors) else as_matrix(tensors[name])[rows]


def lattice_source(tensors: Mapping[str, Tensor], name: str) -> LatticeSource | None:
    """Return the codes that a tensor's values are made from; None if it is held as values alone."""
    return tensors.lattice_source(name) if isinstance(tensors, DecodedTensors) else None
