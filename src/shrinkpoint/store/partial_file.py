"""The files of a chain, open for reading in part: which record holds which tensor, and what that depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

from shrinkpoint.codec.decoder import RecordView
from shrinkpoint.container import FileReader, RecordHead
from shrinkpoint.errors import ChainError, NotFoundError, PolicyError
from shrinkpoint.storage import Source
from shrinkpoint.store.chain import check_parent
from shrinkpoint.store.checkpoint_file import Allowance
from shrinkpoint.store.file_place import AnyPlace, FilePlace, place_file
from shrinkpoint.tensors.info import TensorInfo

_DO = "restore another checkpoint; `verify` says which are whole"


class PartialFile:
    """One file of a chain, open for reading in part.

    Attributes:
        reader: its header.
        infos: its tensors by name, in their order.
        records: by name of a tensor, the index of the record that holds it.
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
        """The name of a record in messages."""
        return f"{self.reader.where}: {self.head(index).label}"

    def is_same(self, index: int) -> bool:
        """Whether a record only states that its tensors have not changed since the parent."""
        return bool(self.head(index).recipe == {"kind": "same"})

    def tensors_before(self, index: int) -> list[str]:
        """The tensors of the records before this one."""
        return [info.name for info in self._infos[: self._first_tensor[index]]]

    def record_view(self, index: int, parent: PartialFile | None) -> RecordView:
        """A record for partial decoding; `parent` is the file before in the chain."""
        head = self.head(index)

        def earlier_tensor(ordinal: int) -> TensorInfo:
            if not 0 <= ordinal < self._first_tensor[index]:
                raise LookupError(f"tensor {ordinal} is not one of an earlier record")
            return self._infos[ordinal]

        read = partial(self.reader.read_part, head)
        sizes = {part: entry.size for part, entry in head.parts.items()}
        parents = {} if parent is None else parent.infos
        return RecordView(head.infos, head.recipe, sizes, read, earlier_tensor, parents.get)

    def close(self) -> None:
        self._source.close()


def open_chain(paths: Sequence[AnyPlace], max_bytes: int | None = None) -> list[PartialFile]:
    """Open the files of a chain, keyframe first, and verify that each was made against the one before.

    Raises:
        PolicyError: `paths` is empty.
        NotFoundError: the last file does not exist.
        ChainError: another one does not, or is not the one its child was made against.
        FormatError: a header is damaged.
        StorageError: reading failed.
    """
    if not paths:
        raise PolicyError("chain", found="no file", expected="at least one", do="name the payload, its bases before it")
    files: list[PartialFile] = []
    allowance = Allowance(max_bytes)
    try:
        for path in paths:
            files.append(_open_file(place_file(path), files[-1] if files else None, last=path is paths[-1]))
            reader = files[-1].reader
            allowance.admit(reader.where, reader.size, sum(info.nbytes for info in files[-1].infos.values()))
    except BaseException:
        close_chain(files)
        raise
    return files


def close_chain(files: Sequence[PartialFile]) -> None:
    for file in files:
        file.close()


def _open_file(place: FilePlace, base: PartialFile | None, *, last: bool) -> PartialFile:
    try:
        source = place.open()
    except NotFoundError as error:
        if last:
            raise
        expected = "a file that a later one of its chain depends on"
        raise ChainError(str(place), found="no such file", expected=expected, do=_DO) from error
    try:
        file = PartialFile(source, str(place))
        check_parent(file.reader, None if base is None else base.reader)
    except BaseException:
        source.close()
        raise
    return file
