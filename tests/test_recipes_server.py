"""Answers from a server that speaks OpenAI's protocol: a small one here, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts, train_tokenizer
from megatrain.recipes.server import ask

TOKENIZER = train_tokenizer(["one two three four"], vocab_size=300)
END = int(TOKENIZER.eos_token_id)
WORDS = TOKENIZER("three", add_special_tokens=False)["input_ids"]


class Server(ThreadingHTTPServer):
    """Answers with what `choices` makes of a request; keeps all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.status = 200
        self.ids = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        said = {"text": "three", "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0] * (len(WORDS) + 1)}}
        cut = {"text": "three", "finish_reason": "length", "logprobs": {"token_logprobs": [-2.0] * len(WORDS)}}
        found: list[dict[str, Any]] = []
        for index in range(request["n"]):
            choice = {"index": index, **(cut if index % 2 else said)}
            ids = WORDS if index % 2 else [*WORDS, END]
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


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def batch() -> PromptBatch:
    rows = [{"prompt": "one two four"}, {"prompt": "two"}]
    return tokenize_prompts(records_from_rows(rows), TOKENIZER, 16).batch([0, 1])


def test_each_prompt_is_asked_in_tokens_and_its_answers_stay_in_order(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "my-key")
    rollouts = ask(server.address, "mine", batch(), per_prompt=3, max_tokens=20)
    prompts = [TOKENIZER(text)["input_ids"] for text in ("one two four", "two")]
    assert sorted(request["prompt"] for request in server.requests) == sorted(prompts)
    assert {(request["path"], request["model"], request["max_tokens"]) for request in server.requests} == {
        ("/v1/completions", "mine", 20)
    }
    assert all(request["temperature"] == 1 and request["n"] == 3 for request in server.requests)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer my-key"}
    assert rollouts.prompts == [prompts[0]] * 3 + [prompts[1]] * 3
    assert [answer.ended for answer in rollouts.answers] == [True, False, True] * 2
    assert [answer.ids for answer in rollouts.answers[:2]] == [[*WORDS, END], WORDS]
    assert rollouts.answers[1].scores == [-2.0] * len(WORDS)
    assert rollouts.completions == ["three"] * 6


def test_a_server_that_answers_in_text_only(server: Server) -> None:
    server.ids = False
    rollouts = ask(server.address, None, batch(), per_prompt=2, max_tokens=20)
    assert {request["model"] for request in server.requests} == {"some-model"}
    assert [answer.ids for answer in rollouts.answers[:2]] == [[*WORDS, END], WORDS]


def test_that_weights_are_not_sent_is_said_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        ask(server.address, "mine", batch(), per_prompt=2, max_tokens=20)
    said = [record.message for record in caplog.records if "nothing sends it new ones" in record.message]
    assert len(said) == 1


def test_a_server_that_fails_is_named(server: Server) -> None:
    server.status = 503
    with pytest.raises(RuntimeError, match=r'http://127.0.0.1:\d+/v1/completions answered 503: {"error": "too busy"}'):
        ask(server.address, "mine", batch(), per_prompt=2, max_tokens=20)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9/v1/completions cannot be asked: .*; is the server"):
        ask("http://127.0.0.1:9/v1", "mine", batch(), per_prompt=2, max_tokens=20)
