"""Makes what the other files here train with: a tiny model's form, its tokenizer, and data of every kind.

python examples/make_inputs.py [FOLDER]: into runs/inputs by default; needs no network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from megatrain.data import docstring_records, train_tokenizer

FOLDER = Path("runs/inputs")


def main(folder: Path = FOLDER) -> None:
    chats = [list(row["messages"]) for row in docstring_records(limit=400, max_chars=200).rows]
    said = [message["content"] for chat in chats for message in chat]
    save_model_form(folder / "tiny", said)
    sums = [(a, b) for a in range(10) for b in range(10)]
    write(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    write(folder / "texts.jsonl", [{"text": text} for text in said])
    write(folder / "pairs.jsonl", [preference(a, b) for a, b in sums])
    write(folder / "prompts.jsonl", [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in sums])


def preference(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": " I do not know"}


def save_model_form(folder: Path, texts: list[str]) -> None:
    """A configuration without weights (they are made when a run begins), and a tokenizer."""
    tokenizer = train_tokenizer(texts, vocab_size=1024)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
