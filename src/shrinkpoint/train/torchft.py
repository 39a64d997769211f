"""TORCHFT: `torchft.Manager(checkpoint_transport=CompressedTransport(), ...)` sends compressed states to new replicas.

docs/elastic.md.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import CorruptError, MembershipError, PolicyError, error_text, missing_extra
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.select import TensorSelection
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.storage.base import MemorySource
from shrinkpoint.store.checkpoint_file import Allowance, build_state, read_file, write_file
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.memory import available_bytes
from shrinkpoint.tensors.names import tensor_name

try:
    from torchft.checkpointing import HTTPTransport
except ModuleNotFoundError as error:
    raise missing_extra(error, "elastic") from None

__all__ = ["CompressedTransport"]

_WHERE = "CompressedTransport"
_BLOCK = 1 << 20  # Bytes that are read between two looks at the clock
_DO = "read the log of the replica that sent it; torchft retries in the next round"


class CompressedTransport(HTTPTransport):  # its server, its address, and its lock until the state is there
    """Sends a state to a recovering replica over HTTP, as the file that `shrinkpoint.save` writes.

    Each rank of a replica makes its own, and gives it to its `torchft.Manager` as `checkpoint_transport=`. All replicas
    have to use this class. The state is encoded before the others go on, and reading it never unpickles. Digests find
    damage; they do not tell who sent the bytes.

    All weights, and whatever else replicas have to have the same, arrive bit for bit. States are nests of dicts, lists,
    tuples, tensors and plain values, without DTensors.

    Args:
        timeout: within which a state has to arrive.
        own_moments: keys of `Manager.register_state_dict_fn`, or "default", whose optimizer moments each replica has of
            its own, such as the inner optimizer of DiLoCo. They are coded on the grids of `Fisher`. Replicas of DDP and
            outer optimizers have the same moments everywhere: leave these out.
        threads: native threads; None: every core.
        max_bytes: how much memory the received bytes, and the tensors in them, may each take; None: three quarters of
            the free memory, and for tensors what `shrinkpoint.load` allows.

    Raises:
        PolicyError: an argument is unusable.
        StateError: from `send_checkpoint`: the state holds something that cannot be stored.
        MembershipError: from `recv_checkpoint`: the replica did not send the state in time.
        FormatError: from `recv_checkpoint`: the bytes are damaged, or ask for more memory than they may.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        own_moments: Sequence[str] = (),
        threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        do = "pass datetime.timedelta(seconds=60)"
        validate.check_instance(f"{_WHERE}, timeout", timeout, timedelta, expected="a timedelta", do=do)
        validate.check_float(f"{_WHERE}, timeout", timeout.total_seconds(), do=do)
        if not isinstance(own_moments, list | tuple) or not all(isinstance(key, str) for key in own_moments):
            do = 'pass e.g. ["inner"]'
            raise validate.argument_error(f"{_WHERE}, own_moments", own_moments, "a list of keys", do)
        self._own_moments = tuple(own_moments)
        self._threads = validate.check_threads(threads)
        self._max_bytes = validate.check_optional_int("max_bytes", max_bytes, none_meaning="for the free memory")
        self._files: dict[str, bytes] = {}  # by path
        super().__init__(timeout, num_chunks=0)
        self._server.RequestHandlerClass = _make_handler(self, timeout.total_seconds())

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Encode a state, and serve it until `disallow_checkpoint`."""
        if missing := [key for key in self._own_moments if key not in state_dict["user"]]:
            found, expected = f"no state {missing[0]!r}", f"one of {sorted(state_dict['user'])}"
            raise PolicyError(f"{_WHERE}, own_moments", found=found, expected=expected, do="register it first")
        storage, scheme = MemoryStorage(), _OwnMoments(self._own_moments) if self._own_moments else Lossless()
        quantized = scheme.quantize(flatten(state_dict), None)
        write_file(storage, "state", quantized, scheme=scheme, reference=None, parent=None, threads=self._threads)
        self._files = {f"/checkpoint/{step}": storage.get("state")}
        self.allow_checkpoint(step)

    def disallow_checkpoint(self) -> None:
        """Serve the state no longer. A replica that is receiving it goes on: it is a copy."""
        super().disallow_checkpoint()
        self._files = {}

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive and decode the state of a step from the replica whose `metadata` this is."""
        where = f"state of step {step} from {metadata}"
        limit = self._max_bytes or available_bytes() * 3 // 4
        data = _fetch(metadata, step, where, timeout.total_seconds(), limit)
        decoded = read_file(
            MemorySource(data, where), where, None, threads=self._threads, allowance=Allowance(self._max_bytes)
        )
        return build_state(decoded, where)

    def find_file(self, path: str) -> bytes:
        """The encoded state that a request asks for, once there is one; a LookupError if it asks for another one."""
        with self._checkpoint_lock.r_lock():
            if path not in self._files:
                raise LookupError(f"{' '.join(self._files)} is served")
            return self._files[path]


class _OwnMoments(Fisher):
    """Quantizes moments below some keys alone. No weight changes, so there is no rise of the loss to measure."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(copies="exact", evaluate=lambda state: 0.0)
        self._prefixes = tuple(f"{tensor_name(('user', key))}/" for key in keys)

    def select(self, state: FlatState, tensors: GlobalTensors, quantizable: frozenset[str] | None) -> TensorSelection:
        return super().select(state, tensors, frozenset())

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        result = super().quantize(state, reference)
        own = {name: codes for name, codes in result.quantized.items() if name.startswith(self._prefixes)}
        tensors = {**state.tensors, **{name: result.state.tensors[name] for name in own}}
        return replace(result, state=replace(state, tensors=tensors), quantized=own)


def _make_handler(transport: CompressedTransport, seconds: float) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = seconds

        def do_GET(self) -> None:
            with suppress(ConnectionError):  # the receiver has gone, and its log says why
                try:
                    data = transport.find_file(self.path)
                except (LookupError, TimeoutError) as error:
                    self.send_error(404, str(error))
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def _fetch(address: str, step: int, where: str, seconds: float, limit: int) -> bytearray:
    """The bytes of a state, at most `limit` of them."""
    deadline, data = time.monotonic() + seconds, bytearray()
    try:
        url = urlsplit(address)
        with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=seconds)) as connection:
            connection.request("GET", f"{url.path}{step}")
            response = connection.getresponse()
            if response.status != 200 or response.length is None:
                raise http.client.HTTPException(f"{response.status} {response.reason}")
            if (size := response.length) > limit:
                raise CorruptError(where, found=f"{size} bytes", expected=f"at most {limit}", do="raise max_bytes=")
            while len(data) < size:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(data)} of {size} bytes in {seconds:g} s")
                if not (block := response.read1(min(_BLOCK, size - len(data)))):
                    raise http.client.IncompleteRead(b"", size - len(data))
                data += block
        return data
    except (OSError, ValueError, http.client.HTTPException) as error:
        found = error_text(error)
        raise MembershipError(where, found=found, expected="the state", do=_DO) from error
