"""A scale is a storage to whoever writes, and holds headers only."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.container import FileWriter
from shrinkpoint.convert.import_ import SizingStorage
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store


def _stored(storage) -> list[int]:
    with Store(storage, keyframe_every=2) as store:
        for step in range(4):
            values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(step))
            store.save(step, {f"layer {i}": row for i, row in enumerate(values)})
        return [one.stored_bytes for one in store.list()]


@pytest.mark.parametrize("spool", [0, 1 << 24])
def test_it_weighs_what_a_storage_would_hold(monkeypatch, spool):
    """With and without room reserved for the header, which may have to be moved."""
    monkeypatch.setattr(FileWriter, "spool", spool)
    assert _stored(SizingStorage()) == _stored(MemoryStorage())


def test_a_payload_cannot_be_read_again():
    scale = SizingStorage()
    _stored(scale)
    with Store(scale) as store, pytest.raises(ShrinkpointError):
        store.load()
