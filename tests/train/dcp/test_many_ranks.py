"""What each rank does at a save or a load does not grow with the files, chunks and entries of all other ranks.

Operations and bytes are counted, on directories of many small files and plans of many ranks in one process.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.sharded_states import Ranks
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shrinkpoint import Lossless
from shrinkpoint.storage import LocalStorage, local
from shrinkpoint.store import manifest as manifests
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.directory import MANIFEST, commit, has_committed, read_directory_manifest
from shrinkpoint.store.manifest import DCP_KEY
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train.dcp import Reader, chain_registry, directory, latest_valid, load, reset_chains, save_plan
from shrinkpoint.train.dcp.checkpoint_metadata import (
    CheckpointMetadata,
    ChunkMetadata,
    EntryMetadata,
    find_owners,
    report_entries,
    share_chunks,
)
from shrinkpoint.train.dcp.save_plan import colocate_moments, rank_slots

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WIDTH = 6
ROWS = 4


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """How often each thread has opened each file, by its name."""
    counts: Counter[tuple[int, str]] = Counter()
    stock = LocalStorage.open

    def counted(self: LocalStorage, key: str) -> Any:
        counts[threading.get_ident(), key] += 1
        return stock(self, key)

    monkeypatch.setattr(LocalStorage, "open", counted)
    return counts


def write(writers: Sequence[DeltaWriter], place: Path, value: float) -> None:
    """A checkpoint of one vector, cut into as many shards as there are writers."""
    payloads = []
    for rank, writer in enumerate(writers):
        part = torch.arange(ROWS) * value + rank
        writer.write(place, flatten({"x": {str(ROWS * rank): part}}), scheme=Lossless(), rank=rank)
        payloads.append(writer.payload)
        writer.commit_reference()
    chunks = [[[ROWS * rank], [ROWS], rank] for rank in range(len(writers))]
    layouts = [[[ROWS * len(writers)], chunks]]
    commit(place, payloads, scheme="lossless", extra={DCP_KEY: {"items": [["x", ["x"], "F32", 0]], "layouts": layouts}})


def checkpoint(root: Path, saves: int = 1) -> Path:
    writers = [DeltaWriter(threads=1) for _ in range(WIDTH)]
    for step in range(saves):
        write(writers, root / f"step-{step}", step + 1.5)
    return root / f"step-{saves - 1}"


def newest(roots: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """What `latest_valid` finds on each of several ranks, which are threads, and the thread of each."""
    of_thread = threading.local()
    monkeypatch.setattr(directory, "make_collectives", lambda group: of_thread.collectives)

    def find(rank: int, collectives: Any) -> tuple[Any, int]:
        of_thread.collectives = collectives
        return latest_valid(roots[rank]), threading.get_ident()

    results = Ranks(len(roots)).all(find)
    return [found for found, _ in results], [thread for _, thread in results]


def test_ranks_divide_the_files_of_a_shared_disk_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Counter[tuple[int, str]]
) -> None:
    place = checkpoint(tmp_path, saves=3)
    (tmp_path / "alone").mkdir()
    opened.clear()
    found, threads = newest([tmp_path] * WIDTH, monkeypatch)
    assert found == [place] * WIDTH
    of_files = Counter(key for _, key in opened.elements() if key != MANIFEST)
    assert len(of_files) == 3 * WIDTH and set(of_files.values()) == {1}  # a payload and two bases of each rank
    for thread in threads:
        assert sum(count for (of, key), count in opened.items() if of == thread and key != MANIFEST) == 3


@pytest.mark.parametrize("victim", range(WIDTH))
def test_what_one_rank_finds_missing_is_missing_for_all(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = checkpoint(tmp_path, saves=2)
    next((place / "bases").iterdir()).unlink() if victim == 0 else (place / f"rank-0000{victim}.safetensors").unlink()
    assert newest([tmp_path] * 3, monkeypatch)[0] == [tmp_path / "step-0"] * 3


def test_on_a_disk_of_its_own_a_rank_verifies_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Counter[tuple[int, str]]
) -> None:
    checkpoint(tmp_path / "0")
    roots = [tmp_path / str(rank) for rank in range(3)]
    for root in roots[1:]:
        shutil.copytree(roots[0], root)
    opened.clear()
    assert newest(roots, monkeypatch)[0] == [root / "step-0" for root in roots]
    assert sum(count for (_, key), count in opened.items() if key != MANIFEST) == 3 * WIDTH
    (roots[2] / "step-0" / "rank-00000.safetensors").unlink()
    assert newest(roots, monkeypatch)[0] == [None] * 3


@pytest.mark.parametrize("how", ["dcp.load", "load"])
def test_a_manifest_is_read_once_however_many_files_are(
    how: str, tmp_path: Path, opened: Counter[tuple[int, str]]
) -> None:
    place = checkpoint(tmp_path, saves=2)
    opened.clear()
    state = {"x": torch.zeros(ROWS * WIDTH)}
    if how == "load":
        state = load(place)
    else:
        dcp.load(state, storage_reader=Reader(place))
    assert state["x"].tolist() == [row * 2.5 + rank for rank in range(WIDTH) for row in range(ROWS)]
    assert sum(count for (_, key), count in opened.items() if key == MANIFEST) == 1


def test_the_first_delta_after_a_restore_reads_the_manifest_once(
    tmp_path: Path, opened: Counter[tuple[int, str]]
) -> None:
    place = checkpoint(tmp_path)
    dcp.load({"x": torch.zeros(ROWS * WIDTH)}, storage_reader=Reader(place))
    (origin,) = chain_registry.restored_origins().values()
    opened.clear()
    with chain_registry.acquire_chain("x", 1, keyframe_every=20, threads=1) as chain:
        state = flatten({"x": {str(ROWS): torch.zeros(ROWS)}})
        chain.load_parent(origin, state, 1, 1)
        assert chain.delta_writer.reference is not None
    assert sum(count for (_, key), count in opened.items() if key == MANIFEST) == 1


def test_a_commit_opens_payloads_and_the_manifest_it_replaces(tmp_path: Path, opened: Counter[tuple[int, str]]) -> None:
    writers = [DeltaWriter(threads=1) for _ in range(WIDTH)]
    for step in range(4):
        write(writers, tmp_path / f"step-{step}", step + 1.5)
    payloads = read_directory_manifest(tmp_path / "step-3").payloads
    opened.clear()
    commit(tmp_path / "step-3", payloads, scheme="lossless")
    assert sorted(key for _, key in opened) == [*(payload.name for payload in payloads), MANIFEST]
    assert sum(len(payload.bases) for payload in payloads) == 3 * WIDTH


def test_a_rank_lists_no_directory_when_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, writer, names = checkpoint(tmp_path), DeltaWriter(threads=1), list[str]()

    def refuse(*_: object) -> Iterator[object]:
        raise AssertionError("a directory is listed")

    with monkeypatch.context() as patch:
        for name in ("scandir", "listdir"):
            patch.setattr(os, name, refuse)
        for step in ("step-0", "next"):
            writer.write(tmp_path / step, flatten({"y": torch.ones(2)}), scheme=Lossless(), rank=WIDTH - 1)
            names.append(writer.payload.name)
            writer.commit_reference()
    assert names == [f"rank-0000{WIDTH - 1}.2.safetensors", f"rank-0000{WIDTH - 1}.safetensors"]
    assert (tmp_path / "next" / "bases").is_dir() and place.name == "step-0"


def test_directories_are_flushed_once_for_all_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    stock = local._fsync_dir
    monkeypatch.setattr(local, "_fsync_dir", lambda path: (flushed.append(path), stock(path)))
    writer, counts = DeltaWriter(threads=1), []
    for step in range(5):
        place = tmp_path / f"step-{step}"
        writer.write(place, flatten({"x": torch.full((3,), float(step))}), scheme=Lossless())
        counts.append((len(writer.payload.bases), sum(path == place / "bases" for path in flushed)))
        writer.commit_reference()
        flushed.clear()
    assert counts == [(0, 0), *((step, 1) for step in range(1, 5))]


def test_a_payload_is_found_in_a_manifest_without_parsing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path, saves=2)
    payloads, data = read_directory_manifest(place).payloads, (place / MANIFEST).read_bytes()
    monkeypatch.setattr(manifests.json, "loads", lambda data: pytest.fail("it is parsed"))
    assert all(has_committed(place, payload) for payload in payloads)
    other = payloads[0]
    for changes in ({"size": other.size + 1}, {"digest": other.bases[0][0]}, {"name": payloads[1].name}):
        assert not has_committed(place, replace(other, **changes))
    for at in range(0, len(data), 7):  # of a damaged manifest nothing is believed
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert not manifests.names_payload(bytes(damaged), other)
    assert not manifests.names_payload(b"", other)


class Counted(tuple):
    """Counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).passes += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        type(self).passes += 1
        return reversed(tuple.__getitem__(self, slice(None)))


def test_chunks_are_found_without_a_search() -> None:
    chunks = Counted(ChunkMetadata((4 * row,), (4,), row) for row in range(500))
    chunks = Counted((*chunks, ChunkMetadata((2000,), (0,), 500), ChunkMetadata((2000,), (0,), 501)))
    entries = {name: EntryMetadata(name, None, "F32", (2000,), chunks) for name in ("a", "b")}
    metadata = CheckpointMetadata(entries)
    Counted.passes = 0
    for name in entries:
        assert [metadata.find_chunk(name, (4 * row,), "here").payload for row in range(501)] == [*range(501)]
    assert Counted.passes == 1


def layout(ranks: int) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size((3 * rank, 0)), torch.Size((3, 7))) for rank in range(ranks)]


def metadata_of(tensors: int, ranks: int) -> Metadata:
    properties = TensorProperties(dtype=torch.float32)
    size = torch.Size((3 * ranks, 7))
    entries: dict[str, Any] = {
        f"layers.{number}.weight": TensorStorageMetadata(properties, size, layout(ranks)) for number in range(tensors)
    }
    return Metadata(entries | {"step": BytesStorageMetadata()})


def test_the_metadata_that_every_rank_receives_has_each_layout_once() -> None:
    one, many = metadata_of(1, 64), metadata_of(50, 64)
    expected = pickle.dumps(many)
    share_chunks(many)
    assert len(pickle.dumps(many)) < len(pickle.dumps(one)) + 50 * 200 < len(expected) / 8
    restored = pickle.loads(pickle.dumps(many))
    assert restored.state_dict_metadata == pickle.loads(expected).state_dict_metadata


def test_a_rank_reports_ten_bytes_an_entry_and_all_owners_are_found() -> None:
    tensors, ranks = 40, 300
    metadata, generator = metadata_of(tensors, ranks), np.random.default_rng(0)
    share_chunks(metadata)
    entries = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if fqn != "step"}
    owners = {fqn: generator.integers(0, 8, ranks) for fqn in entries}
    by_rank: list[list[MetadataIndex]] = [[] for _ in range(8)]
    for fqn, entry in entries.items():
        for chunk, owner in zip(entry.chunks, owners[fqn], strict=True):
            by_rank[owner].append(MetadataIndex(fqn, chunk.offsets))
    by_rank[5].append(MetadataIndex("step"))
    lost = by_rank[3].pop()
    reports = [report_entries(generator.permutation(indices)) for indices in by_rank]
    for indices, report in zip(by_rank, reports, strict=True):
        assert len(report.name_hashes) + len(report.positions) <= 10 * len(indices)
    found = find_owners(metadata, [pickle.loads(pickle.dumps(report)) for report in reports])
    row = next(row for row, chunk in enumerate(entries[lost.fqn].chunks) if chunk.offsets == lost.offset)
    owners[lost.fqn][row] = -1
    assert found.keys() == metadata.state_dict_metadata.keys() and found["step"].tolist() == [5]
    assert all(np.array_equal(found[fqn], owners[fqn]) for fqn in owners)
    assert (find_owners(metadata, [])["step"] == -1).all()


def plans_of(ranks: int, replicas: int, tensors: int) -> list[Any]:
    """Of optimizers that number their weights, so that no moment has a weight by name; replicas have the same shards.

    Torch has given the first moments to one replica, and the second ones to the other.
    """
    plans = []
    for rank in range(ranks):
        state = {f"{kind}.{n}": torch.ones(2) for n in range(tensors) for kind in ("exp_avg", "exp_avg_sq")}
        names = {f"optim.state.{key.partition('.')[2]}.{key.partition('.')[0]}": x for key, x in state.items()}
        shard = rank // replicas
        plan = create_default_local_save_plan({f"{name}@{shard}": x for name, x in names.items()}, rank == 0)
        paths = {name: ("optim", "state", *name.removeprefix("optim.state.").split(".")) for name in names}
        paths = {f"{name}@{shard}": (*path[:-2], f"{path[-2]}@{shard}", path[-1]) for name, path in paths.items()}
        plan = replace(plan, planner_data=paths)
        plan = replace(plan, storage_data=rank_slots(plan))
        if replicas > 1:
            kept = "exp_avg@" if rank % replicas == 0 else "exp_avg_sq@"
            plan = replace(plan, items=[item for item in plan.items if kept in item.index.fqn])
        plans.append(plan)
    return plans


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_coordinator_looks_at_each_entry_a_few_times_only(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: Counter[int] = Counter()
    stock, split = save_plan._slot_hash, save_plan._split_hashes
    plans_by_ranks = {ranks: plans_of(ranks, replicas, tensors=5) for ranks in (16, 64)}
    for ranks, plans in plans_by_ranks.items():

        def count_hash(index: MetadataIndex, ranks: int = ranks) -> bytes:
            hashed[ranks] += 1
            return stock(index)

        def count_split(joined: bytes, ranks: int = ranks) -> Iterator[bytes]:
            for slot_hash in split(joined):
                hashed[ranks] += 1
                yield slot_hash

        monkeypatch.setattr(save_plan, "_slot_hash", count_hash)
        monkeypatch.setattr(save_plan, "_split_hashes", count_split)
        moved = colocate_moments(plans)
        assert sum(len(plan.items) for plan in moved) == sum(len(plan.items) for plan in plans)
        owners = {item.index.fqn: rank for rank, plan in enumerate(moved) for item in plan.items}
        assert all(owners[name] == owners[name.replace("exp_avg@", "exp_avg_sq@")] for name in owners)
    assert hashed[64] == 4 * hashed[16] and hashed[64] <= 3 * 64 * 10 if replicas > 1 else not hashed


def test_a_row_of_a_payload_in_text_is_no_payload(tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    payload = read_directory_manifest(place).payloads[0]
    row = json.dumps([payload.name, payload.size, "0" * 32], separators=(",", ":"))[:-1] + ","
    commit(place, read_directory_manifest(place).payloads, scheme="lossless", note=row)
    assert not has_committed(place, replace(payload, digest="0" * 32)) and has_committed(place, payload)
