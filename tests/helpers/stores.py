"""Places for stores under test, and ways to hurt them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import s3_server

from shrinkpoint.storage import LocalStorage, MemoryStorage, Storage


class Linkless(MemoryStorage):
    """A place that cannot link, as object storages cannot."""

    def link(self, source: str, target: str) -> bool:
        return False


PLACES = ("local", "memory", "linkless")
PLACES_AND_BUCKET = ("local", "linkless", pytest.param("bucket", marks=pytest.mark.nightly))
"""With links, without, and over the network: to a store, `memory` is `local`."""


def place(kind: str, path: Path) -> Storage:
    make = {"local": lambda: LocalStorage(path), "memory": MemoryStorage, "linkless": Linkless, "bucket": new_bucket}
    return make[kind]()


def new_bucket() -> Storage:
    """A new place in a bucket of a server that all tests share."""
    return s3_server.shared_server().storage(f"s3://{s3_server.BUCKET}/{secrets.token_hex(8)}")


def state(seed: int) -> dict[str, Any]:
    """A small state. Those of two seeds differ by little, so that deltas are worth it, and not at all in `frozen`."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, 300, generator=generator)
    generator.manual_seed(seed)
    w, m = base * (1 + 1e-6 * torch.randn(2, 300, generator=generator))
    return {
        "model": {"w": w.clone(), "frozen": torch.arange(12.0)},
        "optimizer": {"state": {0: {"exp_avg": m.clone()}}, "param_groups": [{"params": [0], "lr": 1e-3 * seed}]},
        "seed": seed,
    }


def noisy_state(seed: int, num_bytes: int) -> dict[str, Any]:
    """`state` with noise, which does not shrink."""
    noise = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return {**state(seed), "noise": noise}


def weights_only(seed: int) -> dict[str, Any]:
    """What retention leaves of `state` when it deletes moments."""
    saved = state(seed)
    saved["optimizer"]["state"] = {}
    return saved


def stored_bytes(storage: Storage) -> int:
    """Bytes of a store's files, each once; not in `memory`, where a link is told by no one from a copy."""
    if isinstance(storage, LocalStorage):
        stats = [path.stat() for path in storage.path.rglob("step-*/**/*") if path.is_file()]
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())
    return sum(len(storage.get(key)) for key in storage.list("step-"))


def flip(storage: Storage, key: str, at: int | None = None) -> None:
    """Turn one bit of a file, in place: under every name it has. By default of the first byte behind its header."""
    data = bytearray(storage.get(key))
    at = payload_start(data) if at is None else at % len(data)
    data[at] ^= 1
    if isinstance(storage, LocalStorage):
        with (storage.path / key).open("r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
    else:
        storage.put(key, bytes(data))


def payload_start(data: bytes | bytearray) -> int:
    """Where the payload of a file of ours begins: its index is its end."""
    return 8 + int.from_bytes(data[:8], "little")


def remove(storage: Storage, step: int) -> None:
    """What a foreign hand does to an old checkpoint: its whole directory goes."""
    for key in storage.list(f"step-{step:09d}/"):
        storage.delete(key)


def payloads(storage: Storage, step: int) -> list[str]:
    return storage.list(f"step-{step:09d}/rank-")
