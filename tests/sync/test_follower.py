"""`Follower` holds what is published, and names the tensors that changed."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.errors import ChainError, CorruptError, NotFoundError
from shrinkpoint.sync import Publisher
from shrinkpoint.sync.follower import Follower, changed_names


def state(version):
    return {
        "moving": torch.arange(4096.0) + version,
        "still": torch.full((5,), torch.nan),
        "tied": (x := torch.ones(3)),
        "twin": x,
    }


def test_follower_reads_the_newest_version_over_those_it_missed(tmp_path):
    follower = Follower(tmp_path)
    with pytest.raises(NotFoundError, match="nothing published"):
        follower.read()
    with Publisher(tmp_path) as publisher:
        publisher.publish(state(0))
        assert follower.read() == follower.version == 0
        first = follower.tensors
        for version in (1, 2):
            publisher.publish(state(version))
        assert follower.read(2) == 2
        assert torch.equal(follower.tensors["moving"], state(2)["moving"])
        assert follower.tensors["tied"].data_ptr() == follower.tensors["twin"].data_ptr()
        assert changed_names(follower.tensors, first) == ["moving"]
        assert changed_names(follower.tensors, {}) == list(state(0))
        with pytest.raises(NotFoundError, match="version 2; expected version 3 or a newer one"):
            follower.read(3, wait=0.1)


def test_damage_leaves_the_version_before(tmp_path):
    follower, publisher = Follower(tmp_path), Publisher(tmp_path)
    publisher.publish(state(0))
    follower.read()
    publisher.publish(state(1))
    publisher.close()
    for path in tmp_path.glob("version-000000000001-*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (tmp_path / "version-000000000000.safetensors").unlink()
    with pytest.raises((ChainError, CorruptError)):
        follower.read()
    assert follower.version == 0
    assert torch.equal(follower.tensors["moving"], state(0)["moving"])


def test_names_of_other_shapes_and_dtypes_have_changed():
    old = {"shape": torch.zeros(4), "dtype": torch.zeros(4), "same": torch.zeros(4)}
    new = {"shape": torch.zeros(2, 2), "dtype": torch.zeros(4, dtype=torch.int32), "same": torch.zeros(4)}
    assert changed_names(new, old) == ["shape", "dtype"]
