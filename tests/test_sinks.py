"""Sinks: what TensorBoard and Weights & Biases read afterwards, and that none of them can harm a run."""

from __future__ import annotations

import errno
import json
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pairs import LR, engine_config
from reference import make_batch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_models import tiny
from wandb.proto.wandb_internal_pb2 import Record

from megatrain import AdamWConfig, StreamingEngine, TrainingRun
from megatrain.folder import RunFolder
from megatrain.sinks import Sink, require_sinks
from megatrain.sinks.guarded import GuardedSink
from megatrain.sinks.tensorboard import TensorBoardSink
from megatrain.sinks.told import scalars_of
from megatrain.sinks.wandb import WandbSink
from megatrain.trace import StepRecord

TIMEOUT_S = 60
BATCHES = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(3)]
CURVES = {"train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second"}
BOTH = ("tensorboard", "wandb")
BLOCK_BYTES = 32 * 1024


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))


def make_engine() -> StreamingEngine:
    return StreamingEngine(tiny(layers=2), engine_config(), AdamWConfig(lr=LR))


def boards(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a run: curve → step → value."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: {point.step: point.value for point in events.Scalars(name)} for name in events.Tags()["scalars"]}


def wandb_files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def history(file: Path) -> dict[str, dict[int, float]]:
    """What `wandb sync` would send of one file: curve → step → value."""
    curves: dict[str, dict[int, float]] = {}
    for record in records_of(file):
        if record.WhichOneof("record_type") == "history":
            values = {(item.key or item.nested_key[0]): float(item.value_json) for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                curves.setdefault(name, {})[int(values["_step"])] = values[name]
    return curves


def records_of(file: Path) -> Iterator[Any]:
    """Format: LevelDB's log (its "Log format" document), after 7 bytes by which W&B knows its own files."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:  # no header is cut by the end of a block
            at += BLOCK_BYTES - at % BLOCK_BYTES
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def require_curves(curves: dict[str, dict[int, float]], run: TrainingRun, first: int = 1) -> None:
    """Every step's figures, in float32 at least."""
    steps = range(first, run.steps + 1)
    assert curves.keys() == CURVES
    assert all(list(curve) == list(steps) for curve in curves.values())
    losses = [result.loss for result in run.results][-len(steps) :]
    assert list(curves["train/loss"].values()) == pytest.approx(losses, rel=1e-6)
    assert list(curves["train/learning_rate"].values()) == pytest.approx([LR] * len(steps), rel=1e-6)
    assert all(value > 0 for value in curves["train/tokens_per_second"].values())


def test_both_hold_every_step(tmp_path: Path) -> None:
    with make_engine() as engine:
        run = TrainingRun(engine, BATCHES, steps=5, run_dir=tmp_path / "run", sinks=BOTH).start().wait(TIMEOUT_S)
    require_curves(boards(tmp_path / "run"), run)
    (file,) = wandb_files(tmp_path / "run")
    require_curves(history(file), run)
    (told,) = [record.run for record in records_of(file) if record.WhichOneof("record_type") == "run"]
    config = {item.key: item.value_json for item in told.config.update}
    assert (told.project, told.display_name) == ("megatrain", "run")
    assert (config["model"], config["steps"]) == (json.dumps(run.info.model), "5")
    assert str(LR) in config["optimizer"]


def test_a_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    run = TrainingRun(make_engine, BATCHES, steps=3, run_dir=tmp_path, sinks=BOTH).start().wait(TIMEOUT_S)
    require_curves(boards(tmp_path), run)
    (file,) = wandb_files(tmp_path)
    require_curves(history(file), run)


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    def stop(done: int, _: object) -> None:
        if done == 4:
            raise RuntimeError("the power is gone")

    with make_engine() as engine:
        broken = TrainingRun(
            engine, BATCHES, steps=6, run_dir=tmp_path, on_step=stop, checkpoint_every=3, sinks=BOTH
        ).start()
        with pytest.raises(RuntimeError, match="power"):
            broken.wait(TIMEOUT_S)
    before = boards(tmp_path)
    assert list(before["train/loss"]) == [1, 2, 3, 4]
    with make_engine() as engine:
        run = TrainingRun(engine, BATCHES, steps=6, run_dir=tmp_path, checkpoint_every=3, resume=True, sinks=BOTH)
        run.start().wait(TIMEOUT_S)
    after = boards(tmp_path)
    assert list(after["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert {step: after["train/loss"][step] for step in range(1, 5)} == before["train/loss"]
    first, second = wandb_files(tmp_path)
    assert first.name == second.name  # one run to W&B
    assert list(history(first)["train/loss"]) == [1, 2, 3, 4]
    require_curves(history(second), run, first=4)


def test_a_new_run_in_the_same_folder_does_not_mix_with_the_old_one(tmp_path: Path) -> None:
    for steps in (3, 2):
        with make_engine() as engine:
            TrainingRun(engine, BATCHES, steps=steps, run_dir=tmp_path, sinks=BOTH).start().wait(TIMEOUT_S)
    assert list(boards(tmp_path)["train/loss"]) == [1, 2]
    (kept,) = (tmp_path / "earlier").iterdir()
    assert list(boards(kept)["train/loss"]) == [1, 2, 3]
    assert wandb_files(kept)[0].name != wandb_files(tmp_path)[0].name


def test_no_key_means_offline_and_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("sys.stdin", Questioned())
    sink = WandbSink(RunFolder(tmp_path), {})
    sink.scalars(1, {"eval/loss": 2.5})
    sink.close()
    assert "no API key is configured; the run is recorded offline" in caplog.text
    (file,) = wandb_files(tmp_path)
    assert history(file) == {"eval/loss": {1: 2.5}}


class Questioned:
    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        raise AssertionError("somebody was asked")


def test_nobody_else_can_read_what_they_write(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for sink in (TensorBoardSink(folder, 1), WandbSink(folder, {})):
        sink.scalars(1, {"train/loss": 1.0})
        sink.close()
    paths = [*folder.tensorboard.rglob("*"), *folder.wandb.rglob("*")]
    assert paths
    assert not [path for path in paths if path.is_symlink()]
    assert not [path for path in paths if path.stat().st_mode & 0o077]


# ---- what goes wrong ----


def test_names_are_checked_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (["tensorbord"], "wandb", ["wandb", "wandb"]):
        with pytest.raises(ValueError, match="sinks must be a list of tensorboard and wandb, each at most once; got"):
            require_sinks(wrong)
    with make_engine() as engine, pytest.raises(ValueError, match="left in the run's folder; give run_dir"):
        TrainingRun(engine, BATCHES, steps=1, sinks=["tensorboard"])
    monkeypatch.setattr("megatrain.sinks.names.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"wandb is not installed; run: pip install 'megatrain\[wandb\]'"):
        TrainingRun(make_engine, BATCHES, steps=1, run_dir=tmp_path, sinks=["wandb"])


class Broken:
    """A sink that fails at its second point, or wherever it is told to."""

    def __init__(self, where: str = "scalars") -> None:
        self._where = where
        self.steps: list[int] = []
        self._fail("open")

    def _fail(self, here: str) -> None:
        if here == self._where:
            raise OSError(errno.ENOSPC, "No space left on device")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.steps:
            self._fail("scalars")
        self.steps.append(step)

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("where", ["open", "scalars", "close"])
def test_a_failure_is_logged_once_and_ends_the_sink_alone(where: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = GuardedSink("board", lambda: Broken(where))
    for step in range(100):
        sink.scalars(step, {"train/loss": 1.0})
    sink.close()
    sink.scalars(101, {})
    sink.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the run goes on without board: OSError: [Errno 28] No space left on device"
    ]


@pytest.mark.parametrize("open_sink", [lambda: Hanging("scalars"), lambda: Hanging("close"), lambda: Hanging("open")])
def test_a_sink_that_hangs_holds_nobody_up(open_sink: Callable[[], Sink], caplog: pytest.LogCaptureFixture) -> None:
    sink = GuardedSink("board", open_sink)
    sink.scalars(1, {})
    sink.close(timeout_s=0.05)
    Hanging.released.set()
    sink._thread.join(TIMEOUT_S)
    Hanging.released.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "the run goes on without board: it has not finished within 0.05 s"
    ]


class Hanging:
    released = threading.Event()

    def __init__(self, where: str) -> None:
        self._where = where
        self._hang("open")

    def _hang(self, here: str) -> None:
        if here == self._where:
            assert self.released.wait(TIMEOUT_S)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._hang("scalars")

    def close(self) -> None:
        self._hang("close")


def test_a_sink_that_lags_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    sink = GuardedSink("board", lambda: Hanging("open"), most_waiting=10)
    for step in range(20):
        sink.scalars(step, {})
    Hanging.released.set()
    sink.close()
    Hanging.released.clear()
    assert "the run goes on without board: it lags 10 points behind" in caplog.text


def test_training_goes_on_without_its_sinks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    (tmp_path / "wandb").write_text("in the way")
    caplog.set_level(logging.WARNING)
    with make_engine() as engine:
        run = TrainingRun(engine, BATCHES, steps=2, run_dir=tmp_path, resume=True, sinks=BOTH).start().wait(TIMEOUT_S)
    assert run.steps_done == 2
    assert sorted(record.getMessage()[:36] for record in caplog.records) == [
        "the run goes on without tensorboard:",
        "the run goes on without wandb: FileE",
    ]


def test_what_is_no_number_is_no_point() -> None:
    record = StepRecord(0, 1.0, 1.0, float("nan"), float("inf"), 1e-3, 10, 10, 0, 1, 1, "no tokens")
    assert scalars_of(record) == {"train/learning_rate": 1e-3}
