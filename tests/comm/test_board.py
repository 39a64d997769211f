"""Words reach everybody, and never one who came to another board."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shrinkpoint.comm.board import Board


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_word_is_heard_by_seat_and_turn():
    board = Board(None, "test")
    board.say(3, "three")
    board.say(3, "again", 1)
    assert (board.hear(3, 1), board.hear(3, 1, 1)) == ("three", "again")


def test_who_comes_later_never_hears_an_older_word():
    Board(None, "test").say(0, "old")
    board = Board(None, "test")
    with pytest.raises(TimeoutError):
        board.hear(0, 0.1)


def test_boards_of_two_kinds_are_two():
    Board(None, "one").say(0, "word")
    with pytest.raises(TimeoutError):
        Board(None, "other").hear(0, 0.1)


def test_a_word_that_was_wiped_is_gone():
    board = Board(None, "test")
    board.say(0, "word")
    board.wipe(0, 0)
    with pytest.raises(TimeoutError):
        board.hear(0, 0.1)
