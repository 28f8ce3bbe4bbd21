"""Models from a configuration, from a folder, or from the hub, as the engine wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Mxfp4Config,
)

from megatrain.anatomy.hub import loading


def from_config(config: Any, *, dtype: torch.dtype, seed: int = 0, outputs: int | None = None) -> Any:
    """A randomly initialised model in training mode; the same for the same seed. outputs: see `load_model`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if outputs is None:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        config.num_labels = outputs
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype).train()


def load_model(
    name: str | Path, *, dtype: torch.dtype, trust_remote_code: bool = False, outputs: int | None = None
) -> Any:
    """A pretrained model in training mode, from a folder or the hub; ValueError, in one line, where that fails.

    trust_remote_code: whether code that the model brings may be run. Weights that are stored as MXFP4 (gpt-oss) are
    expanded to `dtype`: quantized ones cannot be trained exactly. outputs: so many numbers per sequence instead of a
    word after each token; that head is new where none is stored.
    """
    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        options = {"dtype": dtype, "use_safetensors": True, **_expanded(config)}  # the other format is pickle
        if outputs is None:
            return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust_remote_code, **options).train()
        options["num_labels"] = outputs
        kind = AutoModelForSequenceClassification
        return kind.from_pretrained(name, trust_remote_code=trust_remote_code, **options).train()


def _expanded(config: Any) -> dict[str, Any]:
    stored: Any = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return {"quantization_config": Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}


def without_dropout(model: torch.nn.Module) -> None:
    """Switch all dropout off for good, in training, too."""
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):  # given to the kernel, not a module
            module.attention_dropout = 0.0


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that belongs to a model; as for `load_model`."""
    with loading(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def local_weights(name: str) -> Path | None:
    """Where a hub model's whole files lie on this machine, or None; the hub is not asked."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def answer(model: Any, tokenizer: Any, question: str, *, max_new_tokens: int = 40) -> str:
    """What a chat model says to one question, greedily."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    model.train(was_training)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()
