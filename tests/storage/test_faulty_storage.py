"""Every call of a storage can fail in tests, and local storage keeps its promises then."""

from __future__ import annotations

import errno

import pytest
from helpers.faulty_storage import FaultyStorage
from helpers.parameters import each_value

from shrinkpoint.errors import NoSpaceError
from shrinkpoint.storage import LocalStorage, MemoryStorage


def use(storage):
    storage.put("a", b"1")
    with storage.create("b") as sink:
        sink.write(b"2")
        sink.write(b"3")
    with storage.open("b") as source:
        source.read(0, 2)
    storage.get("a")
    storage.list()
    storage.link("a", "c")
    storage.delete("c")


CALLS = ["put a", "create b", "write b", "write b", "commit b", "open b", "read b", "get a", "list ", "link c"]
CALLS += ["delete c"]


def test_every_operation_is_a_call():
    storage = FaultyStorage(MemoryStorage())
    use(storage)
    assert storage.log == CALLS


@pytest.mark.parametrize(("call", "late"), each_value(range(1, len(CALLS) + 1), [False, True]))
def test_every_call_can_fail_and_local_storage_keeps_its_promises(tmp_path, call, late):
    local = LocalStorage(tmp_path)
    storage = FaultyStorage(local, call, OSError(errno.ENOSPC, "No space left on device"), late=late)
    with pytest.raises(NoSpaceError, match="No space left"):
        use(storage)
    assert storage.calls == call
    assert ("a" in local.list()) == (call > 1 or late)
    assert ("b" in local.list()) == (call > 5 or (call == 5 and late))
    assert local.remove_stale() == []
