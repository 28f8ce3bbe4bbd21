"""Names of models: what leads to nothing, or to code that nobody allowed, is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError

ANSWER_S = 10.0


@contextmanager
def loading(name: str | Path) -> Iterator[None]:
    """Whatever transformers raises while it loads `name` becomes a ValueError that helps."""
    try:
        if not Path(name).is_dir():
            _require_reachable(str(name))
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(_told(name, str(error))) from error


def _require_reachable(name: str) -> None:
    """Ask once for what is not on this machine: transformers would ask six times, and take 23 s to give up."""
    try:
        if is_offline_mode() or isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=ANSWER_S)
    except (HfHubHTTPError, HFValidationError):
        return  # there is an answer, or no such name can be: transformers tells that better
    except Exception as error:  # of whichever library the installed version asks with
        raise ValueError(f"the hub cannot be reached ({error}); what was downloaded before needs no network") from error


def _told(name: str | Path, error: str) -> str:
    if "trust_remote_code" in error:
        return (
            f"{name} brings code of its own, which would run on this machine with all your rights. Read it; if you "
            "trust it, set model.trust_remote_code: true (in Python trust_remote_code=True)"
        )
    if "safetensors" in error and Path(name).is_dir() and list(Path(name).glob("*.bin")):
        return (
            f"{name} has its weights as pickle (.bin), which could run code when read; store them as safetensors: "
            "save_pretrained of the loaded model writes that"
        )
    if is_offline_mode() and not Path(name).is_dir():
        return (
            f"{str(name)!r} is neither a folder nor a model that was downloaded before, and HF_HUB_OFFLINE forbids "
            "asking the hub: correct the name, or unset HF_HUB_OFFLINE"
        )
    if "instantiate the backend tokenizer" in error:
        return f"there is no tokenizer in {str(name)!r}: give another model's that fits (model.tokenizer)"
    return f"{str(name)!r} cannot be loaded: {error.strip().splitlines()[0]}"
