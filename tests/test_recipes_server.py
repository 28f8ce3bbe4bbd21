"""Answers from a server that speaks OpenAI's protocol: a small one here, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from completions_server import Server
from pairs import engine_config
from transformers import LlamaConfig

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy.load import from_config
from megatrain.data import PromptBatch, records_from_rows, tokenize_prompts, train_tokenizer
from megatrain.recipes import GRPO
from megatrain.recipes.server import ask

TOKENIZER = train_tokenizer(["one two three four"], vocab_size=300)
END = int(TOKENIZER.eos_token_id)
WORDS = TOKENIZER("three", add_special_tokens=False)["input_ids"]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.words, server.end = WORDS, END
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


def test_what_a_server_said_is_trained_on(server: Server) -> None:
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    recipe = GRPO(server=server.address, rewards=[f"{__file__}:ended"], num_generations=2, epsilon_low=0.2)
    with StreamingEngine(from_config(config, dtype=torch.float32), engine_config(), AdamWConfig()) as engine:
        result = recipe.step(engine, batch())
    assert result.metrics["reward/mean"] == 0.5
    assert result.metrics["completions/truncated"] == 0.5
    assert result.tokens == 2 * (2 * len(WORDS) + 1)
    assert result.grad_norm > 0


def ended(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(ids[-1] == END) for ids in completion_ids]
