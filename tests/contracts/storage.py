"""What every storage promises. Subclass `StorageSuite`, give `storage` and `again`, get every test."""

from __future__ import annotations

import pytest

from shrinkpoint.errors import LockedError, NotFoundError, PolicyError, TruncatedError
from shrinkpoint.storage import Storage, copy_object
from shrinkpoint.storage.base import MemorySource


class StorageSuite:
    """The tests; a subclass overrides the two fixtures' makers."""

    def make(self) -> Storage:
        """An empty storage."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self) -> Storage:
        return self.make()

    def test_gives_back_what_was_put(self, storage):
        storage.put("a/b.json", b"one")
        storage.put("empty", bytearray())
        assert (storage.get("a/b.json"), storage.get("empty")) == (b"one", b"")

    def test_put_replaces(self, storage):
        storage.put("a", b"a long one")
        storage.put("a", memoryview(b"short"))
        assert storage.get("a") == b"short"

    def test_put_takes_any_bytes(self, storage):
        storage.put("wide", memoryview(bytes(range(16))).cast("I", (2, 2)))
        assert storage.get("wide") == bytes(range(16))

    def test_created_object_can_be_written_in_pieces_and_patched(self, storage):
        with storage.create("a/b") as sink:
            sink.write(b"........")
            sink.write(memoryview(bytes(range(8))).cast("d"))
            sink.write(b"")
            assert sink.tell() == 16
            sink.seek(2)
            sink.write(b"xyz")
            sink.seek(1)
            assert sink.read(5) == b".xyz."
            sink.seek(14)
            assert sink.read(99) == b"\6\7"
        assert storage.get("a/b") == b"..xyz..." + bytes(range(8))

    def test_created_object_appears_only_when_its_block_ends(self, storage):
        storage.put("a/b", b"old")
        with storage.create("a/b") as sink:
            sink.write(b"new")
            assert storage.get("a/b") == b"old"
            assert storage.list() == ["a/b"]
        assert storage.get("a/b") == b"new"

    def test_copy_of_an_open_object_has_its_bytes(self, storage):
        for data in (b"", b"small", bytes(range(256)) * (1 << 16)):
            copy_object(MemorySource(data), storage, "a/b")
            assert storage.get("a/b") == data

    @pytest.mark.parametrize("kind", [RuntimeError, OSError, KeyboardInterrupt])
    def test_exception_discards_what_was_written_and_passes_unchanged(self, storage, kind):
        error = kind("mine")
        storage.put("old", b"old")
        for key in ("new/one", "old"):
            with pytest.raises(kind) as caught, storage.create(key) as sink:
                sink.write(b"half")
                raise error
            assert caught.value is error
        assert storage.list() == ["old"]
        assert storage.get("old") == b"old"
        assert storage.remove_stale() == []

    def test_source_reads_ranges(self, storage):
        storage.put("a", bytes(range(100)))
        with storage.open("a") as source:
            assert source.size == 100
            assert bytes(source.read(0, 100)) == bytes(range(100))
            assert bytes(source.read(98, 2)) == b"bc"
            assert bytes(source.read(100, 0)) == b""

    @pytest.mark.parametrize(("offset", "length"), [(0, 4), (3, 1), (2, 1 << 62), (1 << 62, 1)])
    def test_reading_past_the_end_is_a_truncation(self, storage, offset, length):
        storage.put("a", b"abc")
        with storage.open("a") as source, pytest.raises(TruncatedError, match="expected"):
            source.read(offset, length)

    def test_source_outlives_the_deletion_and_the_replacement_of_its_object(self, storage):
        storage.put("a", b"one")
        with storage.open("a") as first:
            storage.put("a", b"two")
            with storage.open("a") as second:
                storage.delete("a")
                assert (bytes(first.read(0, 3)), bytes(second.read(0, 3))) == (b"one", b"two")

    @pytest.mark.parametrize("key", ["nothing", "a", "a/b/c/d", "no/such/thing"])
    def test_what_is_not_there_is_not_found(self, storage, key):
        storage.put("a/b/c", b"")
        for ask in (storage.get, storage.open, lambda key: storage.link(key, "target")):
            with pytest.raises(NotFoundError, match=key):
                ask(key)
        assert storage.list() == ["a/b/c"]

    def test_list_is_sorted_and_takes_any_prefix(self, storage):
        keys = ["b", "a/2", "a/10", "a-b/x", "a/1/deep", "é/ü"]
        for key in keys:
            storage.put(key, b"")
        assert storage.list() == sorted(keys)
        for prefix in ("a", "a/", "a/1", "a/1/", "a/1/d", "c", "c/d/", "b"):
            assert storage.list(prefix) == sorted(key for key in keys if key.startswith(prefix))

    def test_empty_storage_lists_nothing(self, storage):
        assert (storage.list(), storage.list("a/b"), storage.remove_stale()) == ([], [], [])

    def test_delete_is_idempotent_and_leaves_the_neighbours(self, storage):
        storage.put("a/b/c", b"1")
        storage.put("a/d", b"2")
        for key in ("a/b/c", "a/b/c", "a", "a/d/e", "never"):
            storage.delete(key)
        assert storage.list() == ["a/d"]
        storage.put("a/b", b"a file where a directory was")
        assert storage.get("a/b")

    def test_linked_objects_live_and_die_alone(self, storage):
        storage.put("a", b"bytes")
        if not storage.link("a", "deep/b"):
            pytest.skip("no links here")
        assert storage.link("a", "deep/b")
        storage.put("a", b"other")
        assert storage.get("deep/b") == b"bytes"
        assert storage.link("a", "deep/b")
        storage.delete("a")
        assert storage.get("deep/b") == b"other"
        assert (storage.list(), storage.remove_stale()) == (["deep/b"], [])

    def test_keys_stay_inside(self, storage):
        storage.put("ok", b"")
        uses = {
            "put": lambda key: storage.put(key, b""),
            "create": lambda key: storage.create(key).__enter__(),
            "open": storage.open,
            "get": storage.get,
            "delete": storage.delete,
            "link to": lambda key: storage.link("ok", key),
            "link from": lambda key: storage.link(key, "ok"),
        }
        taken = []
        for key in ("", "/", "/etc/x", "a//b", "a/", "../x", "a/../b", "a/./b", "a/.shrinkpoint-lock", "a\0b"):
            for name, use in uses.items():
                try:
                    use(key)
                except PolicyError as error:
                    assert "relative path" in str(error), (name, key)
                else:
                    taken.append((name, key))
        assert taken == [] and storage.list() == ["ok"]

    def test_second_lock_is_refused_at_once_and_granted_later(self, storage):
        for _ in range(2):
            with storage.lock():
                with pytest.raises(LockedError, match="is saving here already"), storage.lock():
                    pass
                storage.put("a", b"")
            assert storage.list() == ["a"]

    def test_lock_is_released_by_an_exception(self, storage):
        with pytest.raises(ZeroDivisionError), storage.lock():
            1 / 0
        with storage.lock():
            pass

    def test_describe_names_place_and_key(self, storage):
        assert storage.describe("a/b").endswith("a/b")
        assert storage.describe("a/b").startswith(storage.describe().rstrip("/"))
