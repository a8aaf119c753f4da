"""A local HTTP server for tests of clients."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answers by ``handler`` until the block ends; gives the address."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # It looks for its end that often, in seconds; the default of 0.5 would be most of a test's time.
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
