"""Shared memory is stored once and shared again on request."""

from __future__ import annotations

import torch

from shrinkpoint.tensors.flat_state import flatten, snapshot, unflatten


def test_the_tensor_that_covers_all_others_keeps_its_name() -> None:
    weight = torch.arange(12.0)
    flat = snapshot(flatten({"part": weight[3:5], "whole": weight}))
    assert list(flat.tensors) == ["whole"]
    back = unflatten(flat.tree, flat.tensors)
    back["whole"][3] = -1
    assert back["part"].tolist() == [-1, 4]


def test_overlapping_views_are_stored_as_one_row() -> None:
    memory = torch.arange(100.0)
    flat = snapshot(flatten({"a": memory[10:20], "b": memory[15:30], "far": memory[80:82]}))
    assert {name: tuple(tensor.shape) for name, tensor in flat.tensors.items()} == {"a/%storage": (20,), "far": (2,)}
    back = unflatten(flat.tree, flat.tensors)
    back["a"][9] = -1
    assert back["b"][4] == -1
    assert torch.equal(back["far"], memory[80:82])


def test_a_small_view_does_not_drag_a_large_storage_along() -> None:
    memory = torch.zeros(1_000_000)
    assert flatten([memory[:3], memory[-3:], memory[::300_000], memory[1::300_000]]).nbytes < 100


def test_expanded_tensors_cost_what_they_hold() -> None:
    wide = torch.arange(3.0).expand(1000, 3)
    flat = snapshot(flatten(wide))
    assert flat.nbytes == 12
    for tie in (True, False):
        back = unflatten(flat.tree, flat.tensors, tie=tie)
        assert torch.equal(back, wide)
        assert back.untyped_storage().nbytes() == 12


def test_views_of_another_dtype_share_memory_too() -> None:
    values = torch.arange(8.0)
    flat = snapshot(flatten({"c": values.view(torch.complex64), "r": values, "i": values.view(torch.int16)[1:]}))
    assert len(flat.tensors) == 1
    back = unflatten(flat.tree, flat.tensors)
    back["r"][0] = 7
    assert back["c"][0] == 7 + 1j
    assert torch.equal(back["i"], back["r"].view(torch.int16)[1:])
