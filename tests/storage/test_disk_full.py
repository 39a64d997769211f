"""A disk that is really full, and a file that may really not grow."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap

import pytest
import torch

from shrinkpoint.convert.export import write_state
from shrinkpoint.errors import NoSpaceError
from shrinkpoint.storage import LocalStorage

LIMITED = """
    import resource, sys
    from shrinkpoint.errors import NoSpaceError, StorageError
    from shrinkpoint.storage import LocalStorage

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    storage = LocalStorage(sys.argv[1])
    storage.put("small", bytes(50_000))
    try:
        storage.put("step/large", bytes(50_001))
    except StorageError as error:
        print(type(error).__name__, error.errno, error)
"""


@pytest.fixture
def tiny(tmp_path):
    """A directory on a file system of 64 KiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_told_as_such_and_keeps_what_was_there(tiny):
    storage = LocalStorage(tiny / "store")
    storage.put("step-1/a", b"old")
    with pytest.raises(NoSpaceError, match="no space left while writing") as caught, storage.create("step-2/a") as sink:
        for _ in range(100):
            sink.write(bytes(1024))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(NoSpaceError):
        storage.put("step-1/a", bytes(100_000))
    assert (storage.list(), storage.get("step-1/a"), storage.remove_stale()) == (["step-1/a"], b"old", [])
    assert not (tiny / "store/step-2").exists()


def test_full_disk_can_be_locked_and_freed(tiny):
    storage = LocalStorage(tiny)
    storage.put("old", b"old")
    with pytest.raises(OSError, match="No space"), (tiny / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    with pytest.raises(NoSpaceError):
        storage.put("new", b"new")
    with storage.lock():
        storage.delete("ballast")
    storage.put("new", b"new")
    assert storage.list() == ["new", "old"]


def test_file_that_may_not_grow_is_a_storage_error_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"StorageError {errno.EFBIG} ")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("as_torch", [False, True])
def test_full_disk_is_told_as_such_by_an_export_and_keeps_the_old_file(tiny, as_torch):
    out = tiny / "out"
    out.write_bytes(b"old")
    with pytest.raises(NoSpaceError, match="no space left while writing") as caught:
        write_state({"w": torch.zeros(100_000)}, out, as_torch=as_torch)
    assert (caught.value.where, caught.value.errno) == (str(out), errno.ENOSPC)
    assert [path.name for path in tiny.iterdir()] == ["out"] and out.read_bytes() == b"old"
