"""States of Mersenne Twisters as refills of the parent's: torch's, Python's and numpy's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import DecodedTensors, Reference
from shrinkpoint.codec.twister_record import encode_twisters
from shrinkpoint.errors import ChainError, CorruptError
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.tensors.info import EncodedRecord, Role, TensorInfo

KINDS = ["torch", "python", "numpy"]


def state_of(kind: str, draws: int) -> Tensor:
    """The state of a generator of one seed after so many draws of 32 bits."""
    if kind == "torch":
        generator = torch.Generator().manual_seed(5)
        torch.randint(9, (draws,), generator=generator)
        return generator.get_state()
    if kind == "python":
        own = random.Random(5)
        for _ in range(draws):
            own.getrandbits(32)
        return torch.from_numpy(np.array(own.getstate()[1], np.uint32))
    legacy = np.random.RandomState(5)
    legacy.tomaxint(draws // 2)
    return torch.from_numpy(legacy.get_state()[1].copy())


def info_of(state: Tensor, name: str = "rng") -> TensorInfo:
    return TensorInfo(name, tuple(state.shape), "U8" if state.dtype == torch.uint8 else "U32", Role.OTHER)


def reference_of(**tensors: Tensor) -> Reference:
    return Reference(DecodedTensors(tensors), {})


def encoded(kind: str, before: int, after: int) -> tuple[EncodedRecord | None, Tensor, Tensor]:
    old, new = state_of(kind, before), state_of(kind, after)
    return encode_twisters("rng", [info_of(new)], {"rng": new}, reference_of(rng=old)), old, new


@pytest.mark.parametrize(("kind", "draws"), each_value(KINDS, [0, 2, 623, 624, 626, 5000, 600_000]))
def test_a_state_comes_back_from_the_parents(kind, draws):
    record, old, new = encoded(kind, 100, 100 + draws)
    assert record is not None and sum(len(part) for part in record.parts.values()) <= 64
    found = decode(record, {}, reference_of(rng=old)).tensors["rng"]
    assert found.dtype == new.dtype and torch.equal(found, new)


def test_refills_are_those_that_the_format_describes():
    words = state_of("numpy", 10).numpy().astype(np.int64)
    record, _, new = encoded("numpy", 10, 10 + 2 * 624)
    assert record is not None and record.recipe == {"kind": "twister", "refills": [2]}
    for _ in range(2):
        for i in range(624):
            y = (words[i] & 0x80000000) | (words[(i + 1) % 624] & 0x7FFFFFFF)
            words[i] = words[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
    assert np.array_equal(words.astype(np.uint32), new.numpy())


def test_what_does_not_follow_is_coded_otherwise():
    old = state_of("torch", 0)
    other = torch.Generator().manual_seed(6).get_state()
    far = state_of("torch", 624 * 1100)
    wide = state_of("torch", 0)
    wide[28] = 1  # an upper byte of a word
    for state in (other, far, wide, torch.zeros(5056, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)):
        base = old if state.shape == old.shape else state
        assert encode_twisters("rng", [info_of(state)], {"rng": state}, reference_of(rng=base)) is None


def test_states_share_a_record():
    olds = {kind: state_of(kind, 1) for kind in KINDS}
    news = {kind: state_of(kind, 2000) for kind in KINDS}
    record = encode_twisters("~0", [info_of(x, kind) for kind, x in news.items()], news, reference_of(**olds))
    assert record is not None
    found = decode(record, {}, reference_of(**olds)).tensors
    assert all(torch.equal(found[kind], news[kind]) for kind in KINDS)


def test_another_parent_and_damaged_bytes_are_refused():
    record, old, _ = encoded("torch", 0, 5000)
    assert record is not None
    wrong = old.clone()
    wrong[100] ^= 1
    with pytest.raises(ChainError):
        decode(record, {}, reference_of(rng=wrong))
    with pytest.raises(ChainError):
        decode(record, {}, None)
    rest = bytes(record.parts["rest"])
    for recipe, part in (
        ({"kind": "twister", "refills": [3]}, rest),
        ({"kind": "twister", "refills": [-1]}, rest),
        ({"kind": "twister", "refills": [1 << 40]}, rest),
        ({"kind": "twister", "refills": [True]}, rest),
        ({"kind": "twister", "refills": []}, rest),
        (record.recipe, rest[:-1]),
        (record.recipe, rest[:-1] + b"\1"),
    ):
        damaged = EncodedRecord("rng", record.infos, recipe, {"rest": part}, record.digest, record.base)
        with pytest.raises(CorruptError):
            decode(damaged, {}, reference_of(rng=old))
    small = TensorInfo("rng", (8,), "U8", Role.OTHER)
    damaged = EncodedRecord("rng", (small,), record.recipe, {"rest": rest}, record.digest, record.base)
    with pytest.raises(CorruptError):
        decode(damaged, {}, reference_of(rng=torch.zeros(8, dtype=torch.uint8)))


def test_a_part_of_a_state_is_read_alone(tmp_path):
    paths, state = [], torch.empty(0)
    for draws in (0, 2000, 4000):
        state = state_of("torch", draws)
        sp.save({"rng": state}, tmp_path / str(draws), base=paths[-1] if paths else None)
        paths.append(tmp_path / str(draws))
    with PartialReader(paths) as reader:
        for first, size in ((0, 5056), (20, 40), (5000, 56)):
            assert torch.equal(reader.read("rng", (first,), (size,)), state[first : first + size])


def test_the_generators_of_a_run_cost_a_delta_next_to_nothing(tmp_path):
    model = torch.nn.Linear(8, 8)
    manager = sp.CheckpointManager(tmp_path)
    stored = []
    for step in range(3):
        torch.nn.init.normal_(model.weight)
        stored.append(manager.save(step, model=model).roles["other"].stored)
    expected = torch.rand(3)
    manager.restore(model=model)
    assert torch.equal(torch.rand(3), expected) and stored[0] > 5000 and max(stored[1:]) < 200
