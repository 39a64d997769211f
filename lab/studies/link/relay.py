"""A link with latency: packets of hosts in namespaces wait here for their time. Run by hosts.py.

    python -m lab.studies.link.relay '{"names": [...], "addresses": [...], "mbps": 100, "delay_ms": 5, "packet": 9000}'

Kernels without netem cannot delay packets. This makes a TUN device in each namespace, reads the packets that a host
sends, and writes each to the device of its destination when a link of that rate and delay would have delivered it:
one link from each host to a switch, and one back, both of this rate. It prints "ready" and runs until it is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

DEVICE = "wire"
_SET_DEVICE, _TUN, _NO_HEADER, _NEW_NETWORK = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MOST_QUEUED_SECONDS = 0.4
"""A packet that would wait longer for the link is dropped, as a router's full buffer does."""


def open_device(name: str, address: str, packet: int) -> int:
    """Make the device of a namespace, and return its file descriptor."""
    libc, own = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(other, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH", DEVICE.encode(), _TUN | _NO_HEADER))
        for command in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} mtu {packet} txqueuelen 10000 up"):
            subprocess.run(["ip", *command.split()], check=True)
    finally:
        libc.setns(own, _NEW_NETWORK)
        os.close(own)
        os.close(other)
    return device


class Link:
    """One direction of a cable: when a packet that is sent now has left it."""

    def __init__(self, mbps: float) -> None:
        self._seconds_per_byte, self._free_at = 8 / (mbps * 1e6), 0.0

    def leave(self, size: int, now: float) -> float | None:
        """The time at which the last byte has left; None if the buffer is full."""
        begin = max(now, self._free_at)
        if begin - now > _MOST_QUEUED_SECONDS:
            return None
        self._free_at = begin + size * self._seconds_per_byte
        return self._free_at


def relay(devices: dict[bytes, int], mbps: float, delay: float, packet: int) -> None:
    """Carry packets between devices, by the address of their destination, for ever."""
    up, down = ({device: Link(mbps) for device in devices.values()} for _ in range(2))
    waiting: list[tuple[float, int, int, bytes]] = []
    count, descriptors = 0, list(devices.values())
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, device, data = heapq.heappop(waiting)
            write(device, data)
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(descriptors, [], [], timeout)[0]:
            for data in packets(device, packet):
                target = devices.get(data[16:20])
                now = time.monotonic()
                left = None if target is None else up[device].leave(len(data), now)
                if target is None or left is None:
                    continue
                # A switch hands a packet on when it has all of it; two hosts share one cable.
                arrived = left if len(devices) == 2 else down[target].leave(len(data), left)
                if arrived is not None:
                    count += 1
                    heapq.heappush(waiting, (arrived + delay, count, target, data))


def packets(device: int, packet: int, most: int = 16) -> list[bytes]:
    """What is there to read."""
    found = []
    while len(found) < most:
        try:
            data = os.read(device, packet + 64)
        except BlockingIOError:
            break
        if data[0] >> 4 == 4:
            found.append(data)
    return found


def write(device: int, data: bytes) -> None:
    """Deliver a packet; one that the device has no room for is lost, as on a wire."""
    try:
        os.write(device, data)
    except BlockingIOError:
        return


def main() -> None:
    job = json.loads(sys.argv[1])
    devices = {}
    for name, address in zip(job["names"], job["addresses"], strict=True):
        assert Path("/run/netns", name).exists(), name
        devices[socket.inet_aton(address)] = open_device(name, address, job["packet"])
    print("ready", flush=True)
    relay(devices, job["mbps"], job["delay_ms"] / 1000, job["packet"])


if __name__ == "__main__":
    main()
