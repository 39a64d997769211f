"""Headers and manifests with malice in them, and digests that are right: read, or refused with an error of our tree.

A program of its own, so that its memory and time can be limited: `python header_fuzz.py COUNT SEED [CASE]`
prints what came of so many cases, as JSON. With CASE only that one is run, and its error is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from helpers.fingerprint import fingerprint
from helpers.malformed import SEAL, changed, repacked, split, unpacked, with_index
from helpers.mutations import Mutator, canonical
from helpers.paths import TESTS

import shrinkpoint as sp
from shrinkpoint._native import xxh3_128
from shrinkpoint.container import FileReader, RecordHead
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.report.files import file_report, list_plain_values
from shrinkpoint.storage import LocalStorage
from shrinkpoint.storage.base import MemorySource
from shrinkpoint.store.checkpoint_file import build_state
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import chain_places, read_directory_manifest, verify_directory
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.train.dcp import load as load_shards

GOLDEN = TESTS / "golden"
VERSIONS = ("v1", "v2")
"""Of the format."""
FILES = {f"{v}/{path.name}": path for v in VERSIONS for path in (GOLDEN / v).glob("*/*.safetensors")}
"""Golden files by version and name; a chain shares a folder."""
MEMORY = 1 << 30
"""Bytes of address space beyond what a warm process has; the files are small, and may ask for 32 MiB."""
CASE_SECONDS = 20


class TooLong(BaseException):
    """No reader may swallow it."""


def _alarm(*_: object) -> None:
    raise TooLong


class Wrong(BaseException):
    """What no reader may do; the text says what it did."""


def altered(data: bytes, mutator: Mutator) -> tuple[bytes, bool]:
    """A mutant of a file, and whether it must still decode to the same, if to anything."""
    same = True

    def change(entries: dict[str, Any], document: dict[str, Any]) -> None:
        nonlocal same
        before = canonical([document.get("tree"), _said(document)])
        kind = mutator.random.randrange(12)
        if kind == 0:
            mutator.mutate({"entries": entries})
        elif kind == 1:
            mutator.mutate({"records": document["records"], "recipes": document["recipes"]})
        elif kind == 2:
            mutator.mutate({"tree": document["tree"], "records": document["records"]})
        else:
            mutator.mutate(document)
        with contextlib.suppress(Exception):
            same = canonical([document.get("tree"), _said(document)]) == before
            return
        same = False

    kind = mutator.random.random()
    if kind < 0.15:
        return _other_payload(data, mutator), False
    if kind < 0.25 and "digests" in unpacked(data)[1]:
        return _other_index(data, mutator), False
    return changed(data, change), same


def _said(document: dict[str, Any]) -> Any:
    """What a document says of values: digests vouch for them."""
    if "digests" not in document:
        return [[record[0], record[2], [row[:3] for row in record[4]]] for record in document["records"]]
    tensors, records = document["tensors"], document["records"]
    names = [document["patterns"], tensors["pattern"], tensors["numbers"]]
    kinds = [[kind[:2] for kind in document["kinds"]], tensors["kind"]]
    return [names, kinds, records["name"], records["tensors"], records["base"], document["digests"]]


def _other_payload(data: bytes, mutator: Mutator) -> bytes:
    """Stored bytes that are others, with digests of them that are right."""
    entries, document, payload = unpacked(data)
    if not payload:
        return data
    body = bytearray(payload)
    for _ in range(mutator.random.choice([1, 1, 2, 8])):
        body[mutator.random.randrange(len(body))] = mutator.random.choice(
            [0, 1, 127, 128, 255, mutator.random.randrange(256)]
        )
    start = len(data) - len(split(data)[1])
    heads = FileReader(MemorySource(data), "golden").records
    own = [[xxh3_128(bytes(body[e.offset - start :][: e.size])) for e in head.parts.values()] for head in heads]
    if "digests" in document:
        records = zip(heads, own, strict=True)
        document["digests"] = [digest for head, parts in records for digest in _digests_of(head, parts)]
        return repacked(entries, document, bytes(body))
    for record, parts in zip(document["records"], own, strict=True):
        for part, found in zip(record[5], parts, strict=True):
            whole = record[5][part] is None
            record[5][part] = found
            if whole and mutator.random.random() < 0.9:
                record[2], record[5][part] = found, None
    return repacked(entries, document, bytes(body))


def _digests_of(head: RecordHead, parts: list[str]) -> list[str]:
    """The digests of a record in an index, with those of other stored bytes."""
    base = [] if head.base is None else [head.base]
    return [*parts, *base] if head.recipe == {"kind": "plain"} else [head.digest, *base, *parts]


def _other_index(data: bytes, mutator: Mutator) -> bytes:
    """An index of other bytes, with a digest of them that is right."""
    entries, document, payload = unpacked(data)
    index = bytearray(split(data)[1][len(payload) :])
    for _ in range(mutator.random.choice([1, 1, 2, 8])):
        place = mutator.random.randrange(len(index))
        index[place : place + mutator.random.choice([0, 1, 1, 1, 4])] = bytes([mutator.random.randrange(256)])
    outer = {"format": document["format"], "writer": document["writer"]}
    return with_index(entries, outer, bytes(index), payload)


def manifest_of(document: dict[str, Any]) -> bytes:
    document = {key: value for key, value in document.items() if key != "digest"}
    return canonical({**document, "digest": xxh3_128(canonical(document))})


@cache
def golden(name: str) -> dict[str, str]:
    return fingerprint(sp.load(FILES[name], threads=1))


@cache
def golden_step(name: str, step: int) -> dict[str, str]:
    return fingerprint(sp.Store(GOLDEN / name).load(step, keep=False))


def tried(read: Callable[[], Any]) -> tuple[bool, Any]:
    """(True, what was read), or (False, the error)."""
    try:
        return True, read()
    except ShrinkpointError as error:
        if "out of memory" in error.found:
            raise Wrong(f"memory was taken by what a file says: {error}") from error
        return False, error


def one_file(folder: Path, mutator: Mutator) -> str:
    name = mutator.random.choice(sorted(FILES))
    path = folder / name
    data, same = altered(FILES[name].read_bytes(), mutator)
    path.write_bytes(data)
    try:
        tried(lambda: sp.inspect(path))
        tried(lambda: _shown(path))
        tie = mutator.random.random() < 0.7
        loaded, found = tried(lambda: sp.load(path, threads=1, tie=tie))
        if loaded and same and fingerprint(found) != golden(name):
            raise Wrong("another state than was saved")
        whole, _ = tried(lambda: _boxes(path, mutator))
        return f"{'read' if loaded else 'refused'}, {'read' if whole else 'refused'} in part"
    finally:
        shutil.copy(FILES[name], path)


def _shown(path: Path) -> None:
    with LocalStorage(path.parent).open(path.name) as source:
        reader = FileReader(source, str(path))
        file_report(reader, str(path))
        list_plain_values(reader.tree)
        list(reader.check())


def _boxes(path: Path, mutator: Mutator) -> None:
    chain = [path]
    while True:
        with LocalStorage(path.parent).open(chain[0].name) as source:
            parent = FileReader(source, str(path)).parent
        if not isinstance(parent, dict) or not isinstance(parent.get("name"), str) or len(chain) > 5:
            break
        below = path.parent / Path(parent["name"]).name
        if not os.path.isfile(below):  # noqa: PTH113 - Path.is_file raises for names that are too long
            break
        chain.insert(0, below)
    with PartialReader(chain, 1) as boxes:
        for name, info in list(boxes.infos.items())[:6]:
            sizes = tuple(min(side, mutator.random.choice([1, 2, 5])) for side in info.shape)
            boxes.read(
                name,
                tuple(
                    mutator.random.randrange(side - size + 1) if side else 0
                    for side, size in zip(info.shape, sizes, strict=True)
                ),
                sizes,
            )


KINDS_OF_STORES = ["0.1.0_store", "0.1.0_lossy_store", "0.1.0_tracked_store", "0.1.0_fisher_store"]
STORES = [f"{version}/stores/{name}" for version in VERSIONS for name in KINDS_OF_STORES]


def one_store(folder: Path, mutator: Mutator) -> str:
    name = mutator.random.choice(STORES)
    place = folder / "store"
    shutil.copytree(GOLDEN / name, place)
    try:
        steps = sorted(path.parent for path in place.glob("*/manifest.json"))
        step = mutator.random.choice(steps)
        manifest = json.loads((step / "manifest.json").read_text())
        same = True
        if mutator.random.random() < 0.5:
            mutator.mutate(manifest)
        else:
            payload = step / manifest["files"][0][0]
            data, same = altered(payload.read_bytes(), mutator)
            payload.unlink()
            payload.write_bytes(data)
            manifest["files"][0][1:] = [len(data), data[SEAL].decode("latin-1")]
        with contextlib.suppress(Exception):
            (step / "manifest.json").write_bytes(manifest_of(manifest))
        return _read_store(place, name, same)
    finally:
        shutil.rmtree(place)


def _read_store(place: Path, name: str, same: bool) -> str:
    store = sp.Store(place, threads=1)
    listing = store.scan()
    if len(listing.manifests) + len(listing.broken) < len(list(place.glob("*/manifest.json"))):
        raise Wrong("a step is in no list")
    findings = store.verify(deep=True)
    bad = {one.step for one in findings if not one.loads}
    for step in listing.visible:
        loaded, found = tried(lambda step=step: store.load(step, keep=False))
        if not loaded and step not in bad:
            raise Wrong(f"step {step} passes verify and does not load: {found}")
        if loaded and step in bad:
            raise Wrong(f"step {step} loads, and verify says that it does not")
        if loaded and same and step in golden_steps(name) and fingerprint(found) != golden_step(name, step):
            raise Wrong(f"step {step} has another state than was saved")
    restored, found = tried(lambda: store.restore(keep=False))
    if not restored and set(listing.visible) - bad:
        raise Wrong(f"nothing is restored, though a step loads: {found}")
    return "restored" if restored else "refused"


@cache
def golden_steps(name: str) -> set[int]:
    return set(sp.Store(GOLDEN / name).steps())


def one_folder(folder: Path, mutator: Mutator) -> str:
    source = mutator.random.choice(sorted(path.parent for path in GOLDEN.glob("*/directories/*/*/shrinkpoint.json")))
    place = folder / "checkpoint-1"
    shutil.copytree(source, place)
    try:
        manifest = json.loads((place / "shrinkpoint.json").read_text())
        if mutator.random.random() < 0.5:
            mutator.mutate(manifest)
        else:
            row = mutator.random.choice(manifest["payloads"])
            data, _ = altered((place / row[0]).read_bytes(), mutator)
            (place / row[0]).unlink()
            (place / row[0]).write_bytes(data)
            row[1:3] = [len(data), data[SEAL].decode("latin-1")]
        with contextlib.suppress(Exception):
            (place / "shrinkpoint.json").write_bytes(manifest_of(manifest))
        return _read_folder(place)
    finally:
        shutil.rmtree(place)


def _read_folder(place: Path) -> str:
    read, manifest = tried(lambda: read_directory_manifest(place))
    tried(lambda: verify_directory(place, deep=True))
    tried(lambda: load_shards(place, threads=1))
    if not read:
        return "refused"
    outcomes = []
    for rank, payload in enumerate(manifest.payloads[:4]):
        outcomes.append(tried(lambda rank=rank: build_state(decode_directory(place, rank, threads=1), str(place)))[0])
        with contextlib.suppress(ShrinkpointError), PartialReader(chain_places(place, payload), 1) as boxes:
            for name, info in list(boxes.infos.items())[:3]:
                tried(lambda boxes=boxes, name=name, info=info: boxes.read(name, (0,) * len(info.shape), info.shape))
    return "read" if all(outcomes) else "refused"


KINDS = [one_file, one_file, one_file, one_file, one_store, one_folder]


def run_case(folder: Path, seed: int, index: int) -> str:
    mutator = Mutator(f"{seed}:{index}")
    kind = mutator.random.choice(KINDS)
    signal.alarm(CASE_SECONDS)
    try:
        return f"{kind.__name__}: {kind(folder, mutator)}"
    finally:
        signal.alarm(0)


def main(count: int, seed: int, case: int | None) -> int:
    torch.set_num_threads(1)
    os.environ["SHRINKPOINT_MAX_BYTES"] = str(32 << 20)  # not when imported: the tests' process collects this file
    signal.signal(signal.SIGALRM, _alarm)
    outcomes: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, path in FILES.items():
            (folder / key).parent.mkdir(exist_ok=True)
            shutil.copy(path, folder / key)
        for version in VERSIONS:
            sp.load(folder / version / "0.1.0_adam_step.safetensors", threads=1)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for index in range(count) if case is None else [case]:
            try:
                outcomes[run_case(folder, seed, index)] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                if case is not None:
                    raise
                failures.append([index, type(error).__name__, str(error)[:300], traceback.format_exc()[-1500:]])
    print(
        json.dumps(
            {"seed": seed, "cases": outcomes.total() + len(failures), "outcomes": dict(outcomes), "failures": failures}
        )
    )
    return len(failures)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)))
