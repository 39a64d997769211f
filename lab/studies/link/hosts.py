"""Hosts in network namespaces of this machine, joined by links whose rate is limited in each direction.

Two hosts share one cable (a veth pair); more of them hang on a bridge in a namespace of its own, so that the machine's
own network is never touched. Every host sees one device, `wire`. With a latency packets go through a relay of ours
(relay.py), since many kernels have no netem; it takes processor time: 3% of a core at 100 Mbit/s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

DEVICE = "wire"
_PREFIX = "shrinkpoint"
_NAMES = Path("/run/netns")
_PACKET = 16384
"""Bytes that the kernel hands on in one piece at rates where that takes long; otherwise 64 KiB."""


class Network:
    """A context: the namespaces exist inside it. What still runs in them at its end is killed.

    Args:
        hosts: their number.
        delay_ms: latency of each direction, by the relay; then `mbps` limits every host, and `shape` is not for use.
    """

    def __init__(self, hosts: int, delay_ms: float = 0, mbps: float = 0) -> None:
        self.hosts = [f"{_PREFIX}-{os.getpid()}-{i}" for i in range(hosts)]
        self.hub = f"{_PREFIX}-{os.getpid()}-hub" if hosts > 2 else ""
        self.running: list[subprocess.Popen[str]] = []
        self._delay_ms, self._mbps = delay_ms, mbps
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        sweep()
        try:
            for name in self._names():
                _do("ip", "netns", "add", name)
                _do("ip", "-n", name, "link", "set", "lo", "up")
            self._start_relay() if self._delay_ms else self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, what: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, mbps: float | None) -> None:
        """Limit what every host may send, and get through the hub, a second; None: no limit."""
        ends = [(name, DEVICE) for name in self.hosts]
        ends += [(self.hub, f"port{i}") for i in range(len(self.hosts))] if self.hub else []
        for name, device in ends:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            _do(
                "ip",
                "-n",
                name,
                "link",
                "set",
                device,
                "gso_max_size",
                str(_PACKET if mbps and mbps <= 1000 else 65536),
            )
            if mbps is not None:
                _do("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *_bucket(mbps))

    def run(self, commands: Sequence[Sequence[str]], *, env: dict[str, str], timeout: float) -> list[str]:
        """Run as many commands on each host, one host after the other; what they printed.

        Raises:
            RuntimeError: one failed, or they took longer than `timeout` seconds; all of them are killed then.
        """
        deadline = time.monotonic() + timeout
        for place, command in enumerate(commands):
            line = ["ip", "netns", "exec", self.hosts[place * len(self.hosts) // len(commands)], *command]
            self.running.append(subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [
                process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for process in self.running
            ]
            codes = [process.returncode for process in self.running]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{commands[0][:2]}: not done in {timeout:.0f} s") from None
        finally:
            self._kill()
        if any(codes):
            raise RuntimeError(f"{commands[0][:2]}: exit codes {codes}")
        return outputs

    def close(self) -> None:
        self._kill()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in self._names():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _names(self) -> list[str]:
        return [*self.hosts, *([self.hub] if self.hub and not self._delay_ms else [])]

    def _kill(self) -> None:
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                one.kill()
            one.wait()
        self.running.clear()

    def _start_relay(self) -> None:
        addresses = [self.address(host) for host in range(len(self.hosts))]
        job = {"names": self.hosts, "addresses": addresses, "mbps": self._mbps, "delay_ms": self._delay_ms}
        job["packet"] = 9000 if self._mbps <= 200 else 32000
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), json.dumps(job)]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the relay did not start")

    def _connect(self) -> None:
        if self.hub:
            _do("ip", "-n", self.hub, "link", "add", "hub", "type", "bridge")
            _do("ip", "-n", self.hub, "link", "set", "hub", "up")
        for i, name in enumerate(self.hosts):
            if self.hub:
                port = f"port{i}"
                _do(*f"ip link add {DEVICE} netns {name} type veth peer name {port} netns {self.hub}".split())
                _do("ip", "-n", self.hub, "link", "set", port, "master", "hub", "up")
            elif i == 0:
                _do(*f"ip link add {DEVICE} netns {name} type veth peer name {DEVICE} netns {self.hosts[1]}".split())
            _do("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", DEVICE)
            _do("ip", "-n", name, "link", "set", DEVICE, "up")


def sent_bytes() -> int:
    """What the kernel counted on this host's device, headers included; inside a namespace."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def refusal() -> str:
    """Why there can be no such network here; nothing if there can."""
    try:
        with Network(2) as network:
            network.shape(100)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def sweep() -> None:
    """Remove namespaces of processes that are no more."""
    for path in _NAMES.glob(f"{_PREFIX}-*-*"):
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def leave_on_signals() -> None:
    """SIGTERM and SIGHUP become exceptions, so that contexts close."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def _bucket(mbps: float) -> list[str]:
    # What a link that was idle may send at once is a gift to small messages: as little as packets and timers allow.
    burst = max(_PACKET + 4096 if mbps <= 1000 else 70000, round(mbps * 1e6 / 8 * 0.0001))
    return ["rate", f"{mbps:g}mbit", "burst", str(burst), "latency", "400ms"]


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
