"""Answers from an OpenAI-compatible server, such as vLLM or SGLang, over its completions endpoint.

Note: the server's weights
    Nothing here sends weights to the server: it answers with those that it was started with. Where it tells the
    log-probabilities of its tokens, the loss takes them for those that the answers were drawn with, and clips what has
    moved too far. So a server is for the first steps, or is to be started anew from the run's exported model.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from megatrain.data import PromptBatch
from megatrain.recipes.rollouts import Answer, Rollouts, rollouts_of

log = logging.getLogger("megatrain")

TIMEOUT_S = 600.0
AT_ONCE = 64  # requests; the server batches them


def ask(server: str, model: str | None, batch: PromptBatch, per_prompt: int, max_tokens: int) -> Rollouts:
    """Let the server at an address such as "http://127.0.0.1:8000/v1" answer each prompt `per_prompt` times."""
    _say_once(server)
    wishes = {
        "model": model or _first_model(server),
        "n": per_prompt,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,  # vLLM and SGLang would take the model's own otherwise
        "logprobs": 0,
        "return_token_ids": True,  # vLLM's; others answer in text
    }
    kept = zip(batch.input_ids, batch.attention_mask, strict=True)
    prompts = [ids[mask == 1].tolist() for ids, mask in kept]

    def answers_to(prompt: list[int]) -> list[Answer]:
        said = _call(f"{server}/completions", {**wishes, "prompt": prompt}).get("choices", [])
        if len(said) != per_prompt:
            raise RuntimeError(f"{server} was asked for {per_prompt} answers to a prompt, and gave {len(said)}")
        return [_answer(choice, batch.tokenizer) for choice in sorted(said, key=lambda choice: choice["index"])]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = [answer for group in threads.map(answers_to, prompts) for answer in group]
    return rollouts_of(batch, answers, per_prompt)


def _answer(choice: dict[str, Any], tokenizer: Any) -> Answer:
    ended = choice.get("finish_reason") == "stop"
    ids = choice.get("token_ids")
    if ids is None:
        ids = tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
    if ended and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    scores = (choice.get("logprobs") or {}).get("token_logprobs")
    known = scores is not None and len(scores) == len(ids) and None not in scores
    return Answer(list(ids), ended, scores if known else None)


@cache
def _first_model(server: str) -> str:
    found = _call(f"{server}/models", None).get("data") or [{}]
    name = found[0].get("id")
    if not isinstance(name, str):
        raise RuntimeError(f"{server}/models names no model; set server_model")
    return name


@cache
def _say_once(server: str) -> None:
    log.warning("%s answers with the weights that it was started with; nothing sends it new ones", server)


def _call(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Return the JSON that a server answers; RuntimeError, with the address, for anything else."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode(errors="replace")
        raise RuntimeError(f"{url} answered {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{url} cannot be asked: {error}; is the server running there?") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"{url} answered with something else than a JSON object")
    return found
