"""`ObjectStorage` is a storage, over HTTP, whatever the service does."""

from __future__ import annotations

import itertools
import os

import pytest
from contracts.storage import StorageSuite

from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.storage import Storage
from shrinkpoint.storage.object_storage import ObjectStorage

_numbers = itertools.count()


def new_storage(**options) -> ObjectStorage:
    return ObjectStorage(f"s3://checkpoints/run-{next(_numbers)}", **options)


@pytest.mark.usefixtures("s3")
class TestObjectStorage(StorageSuite):
    def make(self) -> Storage:
        return new_storage()

    def test_source_outlives_the_deletion_and_the_replacement_of_its_object(self, storage):
        """No service keeps what is replaced: then reading fails, and never gives other bytes."""
        for change in (lambda: storage.put("a", b"2" * (1 << 20)), lambda: storage.delete("a")):
            storage.put("a", b"1" * (1 << 20))
            with storage.open("a") as source:
                change()
                assert bytes(source.read(0, 100)) == b"1" * 100  # read when it was opened
                with pytest.raises(StorageError, match="another object than the one that was opened"):
                    source.read(1 << 19, 100)


BYTES = bytes(range(256)) * (1 << 13)  # 2 MiB
LARGE = 20 << 20  # bytes that go in three parts


def use(storage, data=BYTES):
    storage.put("dir/small", b"small")
    with storage.create("dir/large") as sink:
        for _ in range(LARGE // len(data)):
            sink.write(data)
        sink.seek(0)
        sink.write(b"header")
    with storage.open("dir/large") as source:
        read = bytes(source.read(0, 1 << 23)), bytes(source.read(LARGE - 999, 999))
    names = storage.list("dir/"), storage.list_dirs(), storage.get("dir/small")
    storage.delete("dir/small")
    return read, names, storage.list()


@pytest.mark.parametrize("kind", ["slow_down", "error", "cut_before", "lost", "cut_answer"])
@pytest.mark.parametrize("every", [".", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("POST", "GET"))])
def test_a_service_that_fails_for_a_moment_is_asked_again(s3, kind, every):
    expected = use(new_storage())
    for skip in range(12):
        s3.fail(every, kind, skip=2 * skip)
    assert use(new_storage()) == expected


@pytest.mark.parametrize("kind", ["slow_down", "cut_before"])
def test_a_service_that_goes_on_failing_is_an_error_that_ends_and_says_no_secret(s3, kind):
    storage = new_storage(retry_config={"max_retries": 2})
    storage.put("a", b"a")
    source = storage.open("a")
    s3.fail(".", kind, count=10**6)

    def create():
        with storage.create("b") as sink:
            sink.write(BYTES)

    for use in (
        lambda: storage.put("a", b""),
        create,
        lambda: storage.open("a"),
        lambda: storage.get("a"),
        lambda: storage.list(),
        lambda: storage.list_dirs(),
        lambda: storage.version("a"),
        lambda: storage.delete("a"),
        lambda: storage.lock().__enter__(),
    ):
        with pytest.raises(StorageError, match=r"s3://checkpoints/run-.* failed .*2 retries.*committed") as caught:
            use()
        assert "SECRET" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    source.close()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_fork_of_a_process_that_used_a_bucket_does_not_wait_forever(s3):
    storage = new_storage()
    storage.put("a", b"a")
    pid = os.fork()
    if pid == 0:
        try:
            storage.get("a")
        except StorageError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert storage.get("a") == b"a"


def test_settings_of_which_no_client_is_made_are_an_error_without_them():
    for place in ("az://container/run", "s3://bucket/run"):
        with pytest.raises(PolicyError, match="variables that begin with A") as caught:
            ObjectStorage(place, config={"nonsense": "SECRET"})
        assert "SECRET" not in str(caught.value)


def test_endpoint_that_no_client_takes_is_an_error_that_says_how_to_write_one(monkeypatch):
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "SECRET", "aws_region": "us-east-1"}
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    for endpoint, found in (("http://127.0.0.1:9", "an endpoint without https://"), ("127.0.0.1:9", "PanicException")):
        storage = ObjectStorage("s3://bucket/run", config={**keys, "aws_endpoint": endpoint})
        with pytest.raises(StorageError, match=rf"listing failed \({found}\).*AWS_ALLOW_HTTP=true"):
            storage.list()


def test_what_is_fetched_ahead_is_asked_for_once(s3):
    storage, data = new_storage(), BYTES * 5
    storage.put("a", data)
    with storage.open("a") as source:
        s3.clear()
        source.read_ahead()
        source.read_ahead()
        assert bytes(source.read(0, len(data))) == data
        assert bytes(source.read(999, 1 << 20)) == data[999 : 999 + (1 << 20)]
    assert len(s3.requests()) == 3  # four MiB each
    with storage.open("a") as source:
        storage.put("a", data[::-1])
        source.read_ahead()
        with pytest.raises(StorageError, match="another object than the one that was opened"):
            source.read(1 << 19, 5 << 20)


def test_large_object_is_not_fetched_ahead(s3):
    storage = new_storage()
    with storage.create("a") as sink:
        for _ in range(17):
            sink.write(BYTES)
    with storage.open("a") as source:
        s3.clear()
        source.read_ahead()
        assert s3.requests() == []
        assert bytes(source.read(5, 6 << 20)) == (BYTES * 4)[5 : 5 + (6 << 20)]
