"""A small server that speaks OpenAI's completions protocol, over HTTP."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Answers with what `choices` makes of a request; keeps all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.status = 200
        self.ids = True
        self.words: list[int] = []
        self.end = 1

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        said = {
            "text": "three",
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-1.0] * (len(self.words) + 1)},
        }
        cut = {"text": "three", "finish_reason": "length", "logprobs": {"token_logprobs": [-2.0] * len(self.words)}}
        found: list[dict[str, Any]] = []
        for index in range(request["n"]):
            choice = {"index": index, **(cut if index % 2 else said)}
            ids = self.words if index % 2 else [*self.words, self.end]
            found.insert(0, choice | ({"token_ids": ids} if self.ids else {}))  # in no order
        return found


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "some-model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **request})
        self.server.headers.append(self.headers)
        self.answer({"choices": self.server.choices(request)})

    def answer(self, body: dict[str, Any]) -> None:
        text = json.dumps(body if self.server.status == 200 else {"error": "too busy"}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
