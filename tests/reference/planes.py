"""Byte 0 of all numbers, then byte 1 of all, and so on."""

from __future__ import annotations


def split(data: bytes, width: int) -> bytes:
    return b"".join(data[place::width] for place in range(width))


def join(planes: bytes, width: int) -> bytes:
    count = len(planes) // width
    return bytes(planes[place * count + i] for i in range(count) for place in range(width))
