"""Words reach everybody, and never one who came to another board."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shrinkpoint.comm.rendezvous import StoreChannel


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_word_is_heard_by_seat_and_turn():
    board = StoreChannel(None, "test")
    board.publish(3, "three")
    board.publish(3, "again", 1)
    assert (board.read(3, 1), board.read(3, 1, 1)) == ("three", "again")


def test_who_comes_later_never_hears_an_older_word():
    StoreChannel(None, "test").publish(0, "old")
    board = StoreChannel(None, "test")
    with pytest.raises(TimeoutError):
        board.read(0, 0.1)


def test_boards_of_two_kinds_are_two():
    StoreChannel(None, "one").publish(0, "word")
    with pytest.raises(TimeoutError):
        StoreChannel(None, "other").read(0, 0.1)


def test_a_word_that_was_wiped_is_gone():
    board = StoreChannel(None, "test")
    board.publish(0, "word")
    board.delete(0, 0)
    with pytest.raises(TimeoutError):
        board.read(0, 0.1)
