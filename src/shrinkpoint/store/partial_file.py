"""A file of a chain, open for reading in part: which record has which tensor, and what that stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from shrinkpoint.codec.partial.interface import RecordView
from shrinkpoint.container import FileReader
from shrinkpoint.container.metadata import RecordHead
from shrinkpoint.errors import ChainError, NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, Source
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.chain import check_parent
from shrinkpoint.tensors.info import TensorInfo

_DO = "restore another checkpoint; `verify` says which are whole"


class PartialFile:
    """One file, and its place in the chain.

    Attributes:
        reader: of the file.
        infos: its tensors by name, in their order.
        records: the index of the record that has a tensor, by name.
    """

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self.reader = FileReader(source, where)
        heads = self.reader.records
        self._infos = [info for head in heads for info in head.infos]
        self._first_tensor = [0, *accumulate(len(head.infos) for head in heads)]
        self.infos: Mapping[str, TensorInfo] = {info.name: info for info in self._infos}
        self.records = {info.name: index for index, head in enumerate(heads) for info in head.infos}

    def head(self, index: int) -> RecordHead:
        return self.reader.records[index]

    def describe(self, index: int) -> str:
        """A record, as messages name it."""
        return f"{self.reader.where}: record {self.head(index).name!r}"

    def is_same(self, index: int) -> bool:
        """Whether a record says only that nothing has changed."""
        return bool(self.head(index).recipe == {"kind": "same"})

    def tensors_before(self, index: int) -> list[str]:
        """The tensors of the records before this one."""
        return [info.name for info in self._infos[: self._first_tensor[index]]]

    def record_view(self, index: int, parent: PartialFile | None) -> RecordView:
        """A record, to be decoded in part."""
        head = self.head(index)

        def earlier(ordinal: int) -> TensorInfo:
            if not 0 <= ordinal < self._first_tensor[index]:
                raise LookupError(f"tensor {ordinal} is not one of an earlier record")
            return self._infos[ordinal]

        def read(part: str, begin: int, end: int) -> memoryview:
            return self.reader.read_part(head, part, begin, end)

        sizes = {part: entry.size for part, entry in head.parts.items()}
        return RecordView(head.infos, head.recipe, sizes, read, earlier, None if parent is None else parent.infos)

    def close(self) -> None:
        self._source.close()


def open_chain(paths: Sequence[Path]) -> list[PartialFile]:
    """The files of a chain, keyframe first, each checked against what its child says of it.

    Raises:
        PolicyError: no file at all.
        NotFoundError: the last file is not there.
        ChainError: another one is not, or is not the one its child was made against.
        FormatError: a header is damaged.
        StorageError: reading failed.
    """
    if not paths:
        raise PolicyError("chain", found="no file", expected="at least one", do="name the payload, its bases before it")
    out: list[PartialFile] = []
    allowance = Allowance()
    try:
        for path in paths:
            out.append(_open_file(path.absolute(), out[-1] if out else None, last=path is paths[-1]))
            reader = out[-1].reader
            allowance.admit(reader.where, reader.size, sum(info.nbytes for info in out[-1].infos.values()))
    except BaseException:
        close_chain(out)
        raise
    return out


def close_chain(files: Sequence[PartialFile]) -> None:
    for one in files:
        one.close()


def _open_file(path: Path, base: PartialFile | None, *, last: bool) -> PartialFile:
    try:
        source = LocalStorage(path.parent).open(path.name)
    except NotFoundError as error:
        if last:
            raise
        expected = "a file that a later one of its chain stands on"
        raise ChainError(str(path), found="no such file", expected=expected, do=_DO) from error
    try:
        file = PartialFile(source, str(path))
        check_parent(file.reader, None if base is None else base.reader)
    except BaseException:
        source.close()
        raise
    return file
