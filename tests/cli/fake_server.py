"""A server of HTTP in this process that answers with recorded text: what `top` and `bench` are pointed at."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str]
"""Status and body."""


@contextlib.contextmanager
def serving(answer: Callable[[str, dict[str, str], bytes], Answer]) -> Iterator[str]:
    """`answer` is given the path, the headers in lower case, and the body. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, text = answer(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def events(*parts: dict[str, object]) -> str:
    """A stream of them, as OpenAI's servers send it."""
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
