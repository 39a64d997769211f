"""A server of the S3 protocol in a process of its own: moto's, behind a layer that makes it fail as told.

`python s3_server.py` prints its port and serves until its standard input is closed. Faults are set by a POST to
`/-/fault` (JSON): for the next `count` requests whose method and path match `pattern`, do `kind`:

- "slow_down": answer 503 SlowDown, and do nothing
- "error": answer 500, and do nothing
- "cut_before": close the connection, and do nothing
- "lost": do it, and close the connection instead of answering
- "unconditional": do it whatever its condition says
- "cut_answer": do it, and close the connection in the middle of the answer

`/-/pace` limits bytes a second in both directions; `/-/delay` is how many seconds every request waits first;
`/-/log` returns the requests so far, as [method, path, bytes in]; `/-/peak` how many of them waited at once.
moto looks at the condition of a write and writes in two steps; real services do both at once, so writes take turns.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "checkpoints"


class FaultyService:
    """The WSGI application: moto's, with faults."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.faults: list[dict[str, Any]] = []
        self.log: list[tuple[str, str, int]] = []
        self.bytes_per_second = self.delay = 0.0
        self.num_waiting = self.peak = 0
        self.mutex, self.write_mutex = threading.Lock(), threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if path.startswith("/-/"):
            return [self.control(path, body, start_response)]
        name = f"{method} {path}" + (f"?{query}" if query else "")
        self.wait()
        self.pause(len(body))
        fault = self.next_fault(name, len(body))
        if fault in ("slow_down", "error"):
            status, code = ("503 Slow Down", "SlowDown") if fault == "slow_down" else ("500 Error", "InternalError")
            start_response(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>SECRET-KEY</Message></Error>".encode()]
        if fault == "cut_before":
            return self.cut(environ)
        if fault == "unconditional":
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        environ["wsgi.input"] = io.BytesIO(body)
        with self.write_mutex if method in ("PUT", "POST", "DELETE") else contextlib.nullcontext():
            answer: dict[str, Any] = {}

            def collect(status: str, headers: list[tuple[str, str]], *more: Any) -> None:
                answer.update(status=status, headers=headers)

            data = b"".join(self.app(environ, collect))
        if fault == "lost":
            return self.cut(environ)
        self.pause(len(data))
        if fault == "cut_answer" and data:
            length = [header for header in answer["headers"] if header[0].lower() != "content-length"]
            start_response(answer["status"], [*length, ("Content-Length", str(len(data)))])
            return self.send_half(environ, data)
        start_response(answer["status"], answer["headers"])
        return [data]

    def control(self, path: str, body: bytes, start_response: Any) -> bytes:
        start_response("200 OK", [("Content-Type", "application/json")])
        with self.mutex:
            if path == "/-/fault":
                self.faults.append(json.loads(body))
            elif path == "/-/pace":
                self.bytes_per_second = json.loads(body)
            elif path == "/-/delay":
                self.delay = json.loads(body)
            elif path == "/-/clear":
                self.faults, self.log, self.bytes_per_second, self.delay, self.peak = [], [], 0.0, 0.0, 0
            elif path == "/-/peak":
                return str(self.peak).encode()
            return json.dumps(self.log).encode()

    def next_fault(self, name: str, size: int) -> str:
        with self.mutex:
            method, _, path = name.partition(" ")
            self.log.append((method, path, size))
            for fault in self.faults:
                if fault["count"] > 0 and re.search(fault["pattern"], name):
                    fault["skip"] = fault.get("skip", 0) - 1
                    if fault["skip"] >= 0:
                        continue
                    fault["count"] -= 1
                    return fault["kind"]
        return ""

    def wait(self) -> None:
        with self.mutex:
            self.num_waiting += 1
            self.peak = max(self.peak, self.num_waiting)
        time.sleep(self.delay)
        with self.mutex:
            self.num_waiting -= 1

    def pause(self, size: int) -> None:
        if self.bytes_per_second:
            time.sleep(size / self.bytes_per_second)

    def cut(self, environ: dict[str, Any]) -> Any:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("cut")

    def send_half(self, environ: dict[str, Any], data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("cut")


def serve() -> None:
    """Serve until the parent closes our standard input, or dies."""
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    os.environ.setdefault("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(1 << 28))

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: object) -> None:
            pass

    service = FaultyService(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, service, threaded=True, request_handler=Handler)
    server.log = lambda *arguments: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    print(server.port, flush=True)
    sys.stdin.read()


class S3Server:
    """A running server, as the tests see it.

    Attributes:
        environ: what the environment of a client says to reach it.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environ = {
            "AWS_ENDPOINT": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "SECRET-KEY",
            "AWS_REGION": "us-east-1",
        }

    def storage(self, url: str, **options: Any) -> Any:
        """An `ObjectStorage` there, whatever the environment says."""
        from shrinkpoint.storage.object_storage import ObjectStorage

        names = ("endpoint", "access_key_id", "secret_access_key", "region")
        config = {f"aws_{name}": self.environ[f"AWS_{name.upper()}"] for name in names}
        return ObjectStorage(url, config=config, client_options={"allow_http": True}, **options)

    def post(self, path: str, value: Any = None) -> Any:
        data = json.dumps(value).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def fail(self, pattern: str, kind: str, *, count: int = 1, skip: int = 0) -> None:
        """Make the next `count` requests that match fail, after `skip` that do not."""
        self.post("/-/fault", {"pattern": pattern, "kind": kind, "count": count, "skip": skip})

    def set_pace(self, bytes_per_second: float) -> None:
        self.post("/-/pace", bytes_per_second)

    def set_delay(self, seconds: float) -> None:
        self.post("/-/delay", seconds)

    def peak(self) -> int:
        """How many requests waited at once, at most, since `clear`."""
        return int(self.post("/-/peak"))

    def clear(self) -> None:
        """Forget faults, pace, delay and log; objects stay."""
        self.post("/-/clear")

    def requests(self) -> list[list[Any]]:
        """[method, path with query, bytes of the body] of each request since `clear`."""
        return list(self.post("/-/log"))


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    """A server for the block."""
    command = [sys.executable, str(Path(__file__).resolve())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin and process.stdout
    try:
        yield S3Server(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@functools.cache
def shared_server() -> S3Server:
    """A server until this process ends."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running_server())


if __name__ == "__main__":
    serve()
