"""The example files train, as they are, from the repository's root, and get better at what they train."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.make_inputs import main as make_inputs
from megatrain.jobs import make_run
from megatrain.settings import load_settings

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the repository's root has after `python examples/make_inputs.py`."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(EXAMPLES, root / "examples")
    make_inputs(root / "runs" / "inputs")
    return root


@pytest.mark.parametrize("name", FILES)
def test_an_example_trains(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    settings = load_settings(f"examples/{name}", ["run.steps=6"])
    make_run(settings).start().wait(120)
    lines = (root / settings.run.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["skipped"] for record in records] == [None] * 6
    assert all(math.isfinite(record["loss"]) for record in records)
    if settings.recipe.reads != "prompts":  # a policy's loss says nothing of how good it is
        assert records[-1]["loss"] < records[0]["loss"]
    told = set().union(*(record["metrics"] for record in records))
    assert bool(told) == (settings.recipe.reads in ("pairs", "prompts"))
    assert (root / settings.run.folder / "model").is_dir()


def test_there_is_an_example_of_every_recipe() -> None:
    names = {load_settings(EXAMPLES / name).recipe.name for name in FILES}
    assert names == {"sft", "pretrain", "dpo", "reward", "grpo"}
    assert any(load_settings(EXAMPLES / name).lora for name in FILES)


def test_a_reward_model_with_adapters_trains_its_head_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    changes = ["recipe={name: reward}", "run.steps=3", "run.folder=runs/adapted-reward"]
    settings = load_settings("examples/lora.yaml", changes)
    make_run(settings).start().wait(120)
    saved = load_file(root / "runs" / "adapted-reward" / "model" / "adapter_model.safetensors")
    assert any(name.endswith("score.weight") for name in saved)
