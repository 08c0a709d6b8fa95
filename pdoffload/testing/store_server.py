"""A store of few words: an HTTP server that a test tells what to answer, and how late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import msgspec

from pdoffload.config import ObjTierConfig, StoreConfig
from pdoffload.testing.s3_server import ACCESS_KEY, SECRET_KEY


class Reply(msgspec.Struct, frozen=True):
    """What to answer. `wait`: not before this event."""

    status: int = 200
    code: str = ""
    wait: threading.Event | None = None


class StoreServer:
    """Answers by `script(method, path)`, which is called on a thread per request; it keeps what it is given.

    Where the script says nothing (None), it is a store: PUT keeps, GET and HEAD find.
    """

    def __init__(self, script: Callable[[str, str], Reply | None] = lambda *_: None) -> None:
        self.script = script
        self.asked: list[str] = []
        """`METHOD path` of every request."""
        self.objects: dict[str, bytes] = {}
        self.released = threading.Event()
        """Set at the end, so that no request waits on."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.answer(self, body)

            def do_GET(self) -> None:
                outer.answer(self, b"")

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse every connection from now on."""
        self.released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        method, path = request.command, request.path.partition("?")[0]
        self.asked.append(f"{method} {path}")
        reply = self.script(method, path)
        if reply is not None and reply.wait is not None:
            while not (reply.wait.is_set() or self.released.is_set()):
                reply.wait.wait(0.01)
        said = b""
        if reply is not None and reply.status != 200:
            said = f"<Error><Code>{reply.code}</Code></Error>".encode() if reply.code else b""
            status = reply.status
        elif method == "PUT":
            self.objects[path] = body
            status = 200
        elif path in self.objects:
            said, status = _ranged(self.objects[path], request.headers.get("Range", ""))
        else:
            said, status = b"<Error><Code>NoSuchKey</Code></Error>", 404
        try:
            request.send_response(status)
            request.send_header("Content-Length", str(len(said)))
            request.end_headers()
            if method != "HEAD":
                request.wfile.write(said)
        except OSError:
            return  # the client has given up

    def tier(self, bucket: str = "chunks", **settings: Any) -> ObjTierConfig:
        """The table of a tier in this store."""
        store = {
            "bucket": bucket,
            "endpoint_override": self.url,
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            **settings,
        }
        return ObjTierConfig(store_config=StoreConfig(**store))


def _ranged(content: bytes, wanted: str) -> tuple[bytes, int]:
    if not wanted.startswith("bytes="):
        return content, 200
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    return content[int(first) : int(last) + 1], 206
