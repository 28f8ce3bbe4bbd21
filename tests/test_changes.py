"""Settings that are others than those of the checkpoint that a run goes on from: told, noted, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain.changes import Change, Changes, changes_since_checkpoint, differences
from megatrain.checkpoint import Checkpoints
from megatrain.checkpoint.store import Manifest
from megatrain.folder import RunFolder
from megatrain.jobs import make_run
from megatrain.plain import to_plain
from megatrain.settings import Settings, SettingsError, load_settings

LEAST = {
    "model": {"name": "m"},
    "data": {"source": "d.jsonl"},
    "recipe": {"name": "dpo"},
    "run": {"folder": "r", "steps": 10},
}


@pytest.fixture
def begun(tmp_path: Path) -> Settings:
    """What a run with two checkpoints was asked to do; the second was written by a run with another learning rate."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LEAST, "run": {"folder": str(tmp_path), "steps": 10}}))
    settings = load_settings(path)
    left_by(settings, 2)
    left_by(replace(settings, optimizer=replace(settings.optimizer, lr=2e-5)), 10)
    return settings


def left_by(settings: Settings, step: int) -> None:
    checkpoints = Checkpoints(RunFolder(settings.run.folder).checkpoints)
    state = json.loads(json.dumps({"settings": to_plain(settings)}))
    checkpoints.commit(checkpoints.begin(step, 0), Manifest(step, {}, state))


def changed(settings: Settings, *changes: str) -> Settings:
    return load_settings(Path(settings.run.folder) / "run.yaml", ["optimizer.lr=2e-5", *changes])


def test_the_newest_checkpoint_is_what_a_run_goes_on_from(begun: Settings) -> None:
    assert changes_since_checkpoint(begun) == Changes(10, [Change("optimizer.lr", 2e-5, 1e-5)])
    assert changes_since_checkpoint(changed(begun)) is None


def test_a_run_without_checkpoints_begins_with_what_it_is_asked(begun: Settings, tmp_path: Path) -> None:
    assert changes_since_checkpoint(replace(begun, run=replace(begun.run, folder=str(tmp_path / "new")))) is None


def test_changes_are_told_and_noted(begun: Settings, tmp_path: Path) -> None:
    found = changes_since_checkpoint(changed(begun, "run.steps=20", "engine.throttle.link_bytes_per_s=1e9"))
    assert str(found) == (
        "changed since the checkpoint of step 10: run.steps 10 → 20; "
        'engine.throttle null → {"link_bytes_per_s": 1000000000.0, "update_bytes_per_s": null}'
    )
    assert found is not None
    for _ in range(2):
        found.note(tmp_path / "changes.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()]
    throttle = {"link_bytes_per_s": 1e9, "update_bytes_per_s": None}
    assert lines == [{"step": 10, "changed": {"run.steps": [10, 20], "engine.throttle": [None, throttle]}}] * 2


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.name=other", "model.name"),
        ("lora.r=4", "lora"),
        ("data.sequence=16", "data.sequence"),
        ("recipe.beta=0.2", "recipe.beta"),
        ("recipe={name: sft}", "recipe.name"),
        ("run.seed=1", "run.seed"),
        ("engine.dtype=float32", "engine.dtype"),
        ("engine.moments_dtype=bfloat16", "engine.moments_dtype"),
    ],
)
def test_what_the_state_was_made_of_cannot_change(begun: Settings, change: str, key: str) -> None:
    said = rf"^{key} is .*, and was .* for the checkpoint of step 10: .*Put it back \(megatrain resume .* {key}=.*"
    with pytest.raises(SettingsError, match=said):
        changes_since_checkpoint(changed(begun, change))


@pytest.mark.parametrize(
    "change",
    [
        "data.source=moved.jsonl",  # that it is the same is seen by what is in it
        "engine.prefetch_depth=3",
        "engine.micro_batch_size=1",
        "optimizer.betas=[0.8,0.9]",
        "run.schedule=constant",
        "run.checkpoint_every=5",
        "evaluation.every=1 evaluation.prompts=[a]",
    ],
)
def test_everything_else_can(begun: Settings, change: str) -> None:
    found = changes_since_checkpoint(changed(begun, *change.split()))
    assert found is not None
    assert len(found.changes) == 1


def test_a_run_that_cannot_go_on_so_is_refused_before_anything_is_loaded(begun: Settings) -> None:
    with pytest.raises(SettingsError, match=r"recipe\.beta is 0\.2, and was 0\.1 "):  # the model is not there either
        make_run(changed(begun, "recipe.beta=0.2"), resume=True)


def test_a_run_that_was_moved_has_not_changed(begun: Settings, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "new").mkdir()
    (tmp_path / "moved").rename(tmp_path / "new" / "checkpoints")
    here = changed(begun)
    assert changes_since_checkpoint(replace(here, run=replace(here.run, folder=str(tmp_path / "new")))) is None


def test_a_checkpoint_of_an_older_version_is_compared_as_far_as_it_says() -> None:
    before = {"optimizer": {"lr": 1}, "gone": 3}
    assert list(differences(before, {"model": {"name": "m"}, "optimizer": {"lr": 2, "new": 0}})) == [
        Change("optimizer.lr", 1, 2)
    ]


VALUES = st.recursive(
    st.none() | st.integers() | st.booleans(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.dictionaries(st.sampled_from("abc"), VALUES))
def test_nothing_differs_from_itself_and_differences_have_two_sides(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert not list(differences(a, a))
    there, back = list(differences(a, b)), list(differences(b, a))
    assert {(c.key, repr(c.before), repr(c.now)) for c in there} == {(c.key, repr(c.now), repr(c.before)) for c in back}
