"""Checkpoints: whole at every instant, and a resumed run has the bits of one that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LR, differing, engine_config
from reference import make_batch
from safetensors.torch import load_file
from tiny_models import DroppingForCausalLM, tiny

from megatrain import AdamWConfig, StreamingEngine
from megatrain.checkpoint import CheckpointError, Checkpoints, CheckpointWriter, Keep, restore
from megatrain.checkpoint.parts import file_of, metadata_of, tensors_of
from megatrain.checkpoint.shards import FileNote, note_of, read_shard, write_shard
from megatrain.update import update_layer

LAYERS = 3
ADAMW = AdamWConfig(lr=LR, weight_decay=0.1)
BATCHES = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(6)]


def engine_for(layers: int = LAYERS, **config: Any) -> StreamingEngine:
    return StreamingEngine(tiny(layers=layers), engine_config(**config), ADAMW)


def train(engine: StreamingEngine, first: int, last: int) -> list[float]:
    return [engine.step(batch).loss for batch in BATCHES[first:last]]


def write(engine: StreamingEngine, checkpoints: Checkpoints, step: int, **state: Any) -> None:
    writer = CheckpointWriter(engine, checkpoints)
    writer.write(step, state)
    writer.wait()
    assert writer.error is None


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


@pytest.fixture
def written(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Of steps 1, 2 and 3."""
    with engine_for() as engine:
        for step in (1, 2, 3):
            train(engine, step - 1, step)
            write(engine, checkpoints, step, position=step * 10)
        yield checkpoints


# ---- bit by bit ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    checkpoints: Checkpoints, dtype: str, moments: str, overlap: str
) -> None:
    config = {"dtype": dtype, "moments_dtype": moments, "optimizer_overlap": overlap, "micro_batch_size": 2}
    with engine_for(**config) as engine:
        straight, weights = train(engine, 0, 6), engine.state_dict()
    with engine_for(**config) as engine:
        begun = train(engine, 0, 2)
        write(engine, checkpoints, 2)
    with engine_for(**config, prefetch_depth=3, grad_buffers=1) as engine:  # knobs are free
        assert restore(engine, checkpoints).step == 2
        assert begun + train(engine, 2, 6) == straight
        assert differing(engine.state_dict(), weights) == []


def test_dropout_goes_on_where_it_was(checkpoints: Checkpoints) -> None:
    def dropping() -> StreamingEngine:
        return StreamingEngine(tiny(DroppingForCausalLM, LAYERS).train(), engine_config(), ADAMW)

    torch.manual_seed(7)
    with dropping() as engine:
        straight = train(engine, 0, 4)
    torch.manual_seed(7)
    with dropping() as engine:
        begun = train(engine, 0, 2)
        write(engine, checkpoints, 2)
    torch.manual_seed(99)
    with dropping() as engine:
        restore(engine, checkpoints)
        assert begun + train(engine, 2, 4) == straight


def test_it_is_the_state_between_two_steps_although_training_goes_on(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is so slow that the next step's updates come before their layers are written: they wait."""
    with engine_for() as engine:
        straight = train(engine, 0, 5)
    monkeypatch.setattr("megatrain.checkpoint.writer._write_part", _slowly)
    with engine_for() as engine:
        writer = CheckpointWriter(engine, checkpoints)
        begun = train(engine, 0, 2)
        writer.write(2, {})
        begun += train(engine, 2, 4)  # two steps beside it
        writer.write(4, {})
        assert begun + train(engine, 4, 5) == straight
        writer.wait()
        assert writer.written == [2, 4]
    for step in (2, 4):
        with engine_for() as engine:
            restore(engine, checkpoints, step)
            assert train(engine, step, 5) == straight[step:]


def test_each_layer_is_written_after_its_own_update(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of the last step are still to come when writing begins: nothing of the step before may be written."""
    with engine_for() as engine:
        straight = train(engine, 0, 4)
    with engine_for() as engine, monkeypatch.context() as slow:

        def late(*args: Any) -> None:
            time.sleep(0.05)
            update_layer(*args)

        slow.setattr("megatrain.executor.update_layer", late)
        writer = CheckpointWriter(engine, checkpoints)
        begun = train(engine, 0, 2)
        writer.write(2, {})
        writer.wait()
    with engine_for() as engine:
        restore(engine, checkpoints, 2)
        assert begun + train(engine, 2, 4) == straight


def _slowly(folder: Path, layer: int | None, host: Any) -> FileNote:
    time.sleep(0.05)
    return write_shard(folder / file_of(layer), tensors_of(host), metadata_of(host))


# ---- on the disk ----


def test_shards_are_safetensors_and_checked(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b/c": torch.arange(7, dtype=torch.int16),
        "bf": torch.randn(4).bfloat16(),
        "none": torch.empty(0, 2),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    note = write_shard(path, tensors, {"k": "v"})
    found, metadata = read_shard(path)
    assert metadata == {"k": "v"}
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert load_file(path).keys() == tensors.keys()
    assert note_of(path) == note == FileNote(path.stat().st_size, note.checksum)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_are_kept_and_every_kth(checkpoints: Checkpoints) -> None:
    keeping = Checkpoints(checkpoints.folder, Keep(last=2, every=4))
    with engine_for(1) as engine:
        for step in range(1, 11):
            write(engine, keeping, step)
    assert keeping.steps() == [4, 8, 9, 10]


def test_steps_are_sorted_as_numbers(checkpoints: Checkpoints) -> None:
    for step in (200, 1000, 99_999_999, 123_456_789):
        checkpoints.path(step).mkdir(parents=True)
    assert checkpoints.steps() == [200, 1000, 99_999_999, 123_456_789]


def test_what_was_begun_and_not_finished_is_no_checkpoint(written: Checkpoints) -> None:
    unfinished = written.begin(4, 0)
    shutil.copy(written.path(3) / "shell.safetensors", unfinished)
    assert written.steps() == [1, 2, 3]
    with engine_for() as engine:
        assert restore(engine, written).state["position"] == 30
        write(engine, written, 4)
    assert written.steps() == [2, 3, 4]
    assert not unfinished.exists()


@pytest.mark.parametrize("file", ["shell.safetensors", "layer-00001.safetensors", "random.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_offered(
    written: Checkpoints, file: str, damage: str
) -> None:
    path = written.path(3) / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.unlink() if damage == "remove" else path.write_bytes(data[:-1] if damage == "cut" else data)
    with engine_for() as engine:
        before = engine.state_dict()
        with pytest.raises(CheckpointError, match=rf"step 3 is damaged: .*{file}: .*; the one before is of step 2"):
            restore(engine, written)
        assert differing(engine.state_dict(), before) == []
        assert restore(engine, written, 2).step == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}'])
def test_a_manifest_that_is_none_is_refused(written: Checkpoints, text: str) -> None:
    (written.path(3) / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step 3 is damaged: .*checkpoint.json: "):
        written.verify(3)


def test_another_model_s_is_refused(written: Checkpoints) -> None:
    with engine_for(layers=2) as engine, pytest.raises(CheckpointError, match="it has 3 layers, this one 2"):
        restore(engine, written)
    with engine_for(dtype="bfloat16") as engine, pytest.raises(CheckpointError, match="is not of this model: it lacks"):
        restore(engine, written)


def test_none_at_all_is_said(checkpoints: Checkpoints) -> None:
    with (
        engine_for() as engine,
        pytest.raises(CheckpointError, match=r"there is no checkpoint in .*: a run leaves some where"),
    ):
        restore(engine, checkpoints)


def test_a_disk_without_room_is_found_before_writing(written: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(written.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with engine_for() as engine:
        writer = CheckpointWriter(engine, written)
        writer.write(4, {})
        writer.wait()
        assert "a checkpoint needs" in str(writer.error)
        train(engine, 0, 1)  # training goes on
    assert written.steps() == [1, 2, 3]


@pytest.mark.parametrize("after", range(5))
def test_a_disk_that_fails_in_the_middle_costs_nothing_but_this_one(
    written: Checkpoints, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    calls = iter(range(100))
    real = os.fsync

    def fail(handle: int) -> None:
        if next(calls) >= after:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fail)
    with engine_for() as engine:
        writer = CheckpointWriter(engine, written)
        writer.write(4, {})
        losses = train(engine, 0, 2)
        writer.wait()
        assert "No space left on device" in str(writer.error)
    monkeypatch.undo()
    assert written.steps() == [1, 2, 3]
    assert written.verify(3).step == 3
    assert [path.name for path in written.folder.iterdir() if path.name.startswith(".")] == []
    with engine_for() as engine:
        assert train(engine, 0, 2) == losses


def test_a_manifest_tells_people_what_is_there(written: Checkpoints) -> None:
    values = json.loads((written.path(3) / "checkpoint.json").read_text())
    assert values["step"] == 3
    assert values["state"] == {"position": 30, "engine_step": 3}
    assert sorted(values["files"]) == sorted(path.name for path in written.path(3).iterdir() if path.suffix != ".json")


@pytest.mark.parametrize("keep", [{"last": 0}, {"last": True}, {"every": -1}, {"every": 1.5}])
def test_what_keep_refuses(keep: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep (last|every) must be a whole number ≥ 1"):
        Keep(**keep)
