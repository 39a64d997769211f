"""Messages through the store of a group: by sender and round, and never those of an older channel."""

from __future__ import annotations

import pytest

from shrinkpoint.comm.rendezvous import StoreChannel

pytestmark = pytest.mark.usefixtures("lonely_group")


def test_a_message_is_read_by_sender_and_round():
    channel = StoreChannel(None, "test")
    channel.publish(3, "three")
    channel.publish(3, "again", 1)
    assert (channel.read(3, 1), channel.read(3, 1, 1)) == ("three", "again")


def test_a_later_channel_never_reads_an_older_message():
    StoreChannel(None, "test").publish(0, "old")
    channel = StoreChannel(None, "test")
    with pytest.raises(TimeoutError):
        channel.read(0, 0.1)


def test_channels_of_two_topics_are_separate():
    StoreChannel(None, "one").publish(0, "word")
    with pytest.raises(TimeoutError):
        StoreChannel(None, "other").read(0, 0.1)


def test_a_deleted_message_is_gone():
    channel = StoreChannel(None, "test")
    channel.publish(0, "word")
    channel.delete(0, 0)
    with pytest.raises(TimeoutError):
        channel.read(0, 0.1)
