"""A run of Weights & Biases, with its files in the run's folder."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.folder import FILE_MODE, RunFolder, owned_folder, owner_only
from megatrain.trace import write_atomically

logger = logging.getLogger(__name__)

INIT_S, FINISH_S = 30.0, 50.0  # without an answer of the server; its library alone would hold up the program's end
ID_FILE = "run-id"  # by which a resumed run is known for the same


class WandbSink:
    """Logs in the mode that WANDB_MODE says; offline where that says nothing and no API key is configured.

    It never asks for a key, and tells the server neither of code, nor of a git repository, nor of what is printed.
    Steps that are trained once more after a resume are passed over there: they are the same.

    about: plain values that the run is told by, shown as its config.
    """

    def __init__(self, folder: RunFolder, about: Mapping[str, Any]) -> None:
        import wandb

        self._folder = folder.wandb
        owned_folder(self._folder)
        self._run = wandb.init(
            dir=folder.path,
            id=_run_id(self._folder / ID_FILE),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "megatrain"),
            name=os.environ.get("WANDB_NAME", folder.path.name),
            config=dict(about),
            mode=None if _may_send(wandb) else "offline",
            settings=wandb.Settings(
                init_timeout=INIT_S,
                finish_timeout=FINISH_S,
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                symlink=False,
            ),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        try:
            self._run.finish()
        finally:
            owner_only(self._folder)


def _may_send(wandb: Any) -> bool:
    if "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False):
        return True
    logger.warning("wandb: no API key is configured; the run is recorded offline, and `wandb sync` can send it later")
    return False


def _run_id(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    run_id = secrets.token_hex(4)
    write_atomically(path, run_id.encode(), FILE_MODE)
    return run_id
