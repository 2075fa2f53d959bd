"""A judge that grades by rule, behind an OpenAI-compatible URL: `python -m tests.rule_judge [PORT]`.

The score is 10 for the right answer, 5 for the right answer's number alone, else 0.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Context that serves the judge in threads of this process and gives the API's URL.

    Args:
        port: 0 selects a free port.
    """
    with _Server(("127.0.0.1", port), _Judge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def score_of(asked: str) -> int:
    """The score of the answer that a prompt of the environment `judge` contains."""
    right = re.search(r"A right answer:\n(.*)\n", asked)
    answer = re.search(r"^(----- \w+ -----)\n(.*)\n\1$", asked, flags=re.DOTALL | re.MULTILINE)
    assert right is not None
    assert answer is not None
    if answer[2] == right[1]:
        return 10
    return 5 if [answer[2]] == re.findall(r"\d+", right[1]) else 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # all episodes of a step may send requests at once


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"Score: {score_of(asked)}"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": message}]}).encode())

    def log_message(self, *_: Any, **__: Any) -> None: ...


if __name__ == "__main__":
    with serving(int(sys.argv[1]) if len(sys.argv) > 1 else 8000) as url:
        print(f"the judge answers at {url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
