"""What goes wrong names itself, leaves nothing half-done, and never hangs."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from pairs import LR, MICRO_ROWS, differing, engine_config, outcome, require_same
from reference import Batch, make_batch

import megatrain.executor
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.control import State
from megatrain.executor import NonFiniteError
from megatrain.lanes import CpuStream, LaneError
from megatrain.trace import StepRecord

TIMEOUT_S = 10.0
MODEL = build("llama")
BATCH = make_batch(MODEL)
ROWS, TOKENS = BATCH["input_ids"].shape


def engine_for(adamw: AdamWConfig | None = None, **config: Any) -> StreamingEngine:
    return StreamingEngine(copy.deepcopy(MODEL), engine_config(micro_batch_size=MICRO_ROWS, **config), adamw)


@pytest.fixture
def engine() -> Iterator[StreamingEngine]:
    with engine_for(AdamWConfig(lr=LR)) as engine:
        yield engine


def within_time(work: Callable[[], Any]) -> Any:
    """Run in a thread of its own; a call that does not come back is a failure, not a hang."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "still not back"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def step_and_flush(engine: StreamingEngine) -> None:
    engine.step(BATCH)
    engine.flush()


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("megatrain-")}


# ---- batches ----


def changed(name: str, row: int, column: int, value: int) -> dict[str, torch.Tensor]:
    tensor = BATCH[name].clone()
    tensor[row, column] = value
    return {name: tensor}


BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "id beyond the vocabulary": (changed("input_ids", 1, 5, 101), r"input_ids\[1, 5\] is 101, outside .* of 101 ids"),
    "negative id": (changed("input_ids", 0, 2, -3), r"input_ids\[0, 2\] is -3, outside the model's vocabulary"),
    "label beyond the vocabulary": (changed("labels", 2, 3, 999), r"labels\[2, 3\] is 999, outside"),
    "label -1": (changed("labels", 2, 3, -1), r"labels\[2, 3\] is -1, outside .* and -100 for labels to ignore"),
    "ids int32": ({"input_ids": BATCH["input_ids"].int()}, r"input_ids must be int64 .*; got torch.int32: convert"),
    "labels float": ({"labels": BATCH["labels"].float()}, "labels must be int64 .*; got torch.float32"),
    "positions float": ({"position_ids": torch.rand(ROWS, TOKENS)}, "position_ids must be int64 positions; got"),
    "mask float": ({"attention_mask": torch.ones(ROWS, TOKENS)}, "attention_mask must be 1 .* and 0 .*; got torch.fl"),
    "mask 4-D": ({"attention_mask": torch.ones(ROWS, 1, TOKENS, TOKENS)}, r"attention_mask must .* shape .*\(6, 24\)"),
    "mask None": ({"attention_mask": None}, "attention_mask must be a tensor .* got NoneType"),
    "labels shorter": (
        {"labels": BATCH["labels"][:, :-1]},
        r"labels must be .* shape of input_ids, \(6, 24\); got \(6, 23",
    ),
    "labels missing": ({"labels": None}, "a batch needs 'labels', an int64 tensor of shape"),
    "ids as a list": ({"input_ids": BATCH["input_ids"].tolist()}, "a batch needs 'input_ids'"),
    "one dimension": (
        {name: tensor[0] for name, tensor in BATCH.items()},
        r"input_ids must have shape .*; got \(24,\)",
    ),
    "no rows": ({name: tensor[:0] for name, tensor in BATCH.items()}, r"input_ids must have shape .*; got \(0, 24\)"),
    "no tokens": ({name: tensor[:, :0] for name, tensor in BATCH.items()}, r"must have shape .*; got \(6, 0\)"),
    "unknown entry": (
        {"token_type_ids": BATCH["labels"]},
        r"a batch holds input_ids, .*; got also \['token_type_ids'\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_bad_batch_is_refused_before_anything_is_touched(
    change: dict[str, Any], message: str, engine: StreamingEngine
) -> None:
    before = engine.state_dict()
    with pytest.raises(ValueError, match=message):
        engine.step({**BATCH, **change})
    assert differing(engine.state_dict(), before) == []
    assert engine.recorder.spans() == []
    assert engine.step(BATCH).loss == pytest.approx(float(MODEL(**BATCH).loss.detach()), rel=1e-6)


def nothing_to_predict() -> Batch:
    return {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}


def only_first_labels() -> Batch:
    """Nothing in the batch predicts the first token of a row."""
    labels = torch.full_like(BATCH["labels"], -100)
    labels[:, 0] = BATCH["input_ids"][:, 0]
    return {**BATCH, "labels": labels}


@pytest.mark.parametrize("empty", [nothing_to_predict(), only_first_labels()], ids=["all ignored", "first tokens only"])
def test_a_batch_that_predicts_nothing_is_skipped_and_said_so(
    empty: Batch, engine: StreamingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, moments and AdamW's step count stay: the steps after it are as if it had not been."""
    batches = [make_batch(MODEL, seed=seed) for seed in range(3)]
    expected = outcome(copy.deepcopy(MODEL), batches, AdamWConfig(lr=LR), micro_batch_size=MICRO_ROWS)
    results = [engine.step(batches[0])]
    skipped = engine.step(empty)
    results += [engine.step(batch) for batch in batches[1:]]
    assert [result.loss for result in results] == expected.losses
    assert differing(engine.state_dict(), expected.state) == []
    assert skipped.tokens == 0
    assert skipped.skipped is not None
    assert "every label is -100" in skipped.skipped
    assert "skipped: every label is -100" in caplog.text
    assert [record.skipped for record in engine.recorder.steps()] == [None, skipped.skipped, None, None]


# ---- numbers ----


class Poison:
    """Makes the output of one layer infinite or not a number, in forward or in backward, while it is on."""

    def __init__(self, engine: StreamingEngine, value: float, *, backward: bool) -> None:
        self.on = True
        self._value, self._backward = value, backward
        engine._anatomy.layers[2].register_forward_hook(self._hook)

    def _hook(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return output
        if not self._backward:
            return output * self._value
        if output.requires_grad:
            register: Any = output.register_hook
            register(lambda gradient: gradient * self._value)
        return output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backward", [False, True], ids=["loss", "gradient norm"])
@pytest.mark.parametrize("overlap", ["forward", "none"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_not_finite_is_not_applied(value: float, backward: bool, overlap: Any, offload: bool) -> None:
    batches = [make_batch(MODEL, seed=seed) for seed in range(2)]
    expected = outcome(copy.deepcopy(MODEL), batches, AdamWConfig(lr=LR), micro_batch_size=MICRO_ROWS)
    with engine_for(AdamWConfig(lr=LR), optimizer_overlap=overlap, offload_activations=offload) as engine:
        poison = Poison(engine, value, backward=backward)
        what = "gradient norm" if backward else "loss"
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=f"the {what} of step 0 is (nan|inf); nothing was applied"):
                engine.step(BATCH)
        assert differing(engine.state_dict(), MODEL.state_dict()) == []
        poison.on = False
        assert [engine.step(batch).loss for batch in batches] == expected.losses
        assert differing(engine.state_dict(), expected.state) == []


def test_updates_that_follow_each_gradient_say_what_was_applied() -> None:
    adamw = AdamWConfig(lr=LR, max_grad_norm=None)
    engine = engine_for(adamw, optimizer_overlap="backward")
    Poison(engine, float("nan"), backward=True)
    with pytest.raises(NonFiniteError, match=r"some updates may already have been applied.*go back to a saved model"):
        engine.step(BATCH)
    with pytest.raises(LaneError, match=r"layers\.2\..* is not finite in step 0: it was not applied"):
        engine.flush()
    engine.close()
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())


def test_embeddings_wait_for_the_norm_also_where_layers_do_not() -> None:
    def spoil(module: Any, args: Any) -> Any:
        hidden = args[0].clone()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        return (hidden, *args[1:])

    with engine_for(AdamWConfig(lr=LR, max_grad_norm=None), optimizer_overlap="backward") as engine:
        engine._anatomy.layers[0].register_forward_pre_hook(spoil)
        with pytest.raises(NonFiniteError, match="some updates may already have been applied"):
            engine.step(BATCH)
        changed = differing(engine.state_dict(), MODEL.state_dict())
    assert changed
    assert all(".layers." in name for name in changed)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-3, "1e-3"])
def test_a_learning_rate_that_is_none_is_refused(lr: Any, engine: StreamingEngine) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number ≥ 0; got"):
        engine.lr = lr
    assert engine.lr == LR
    assert engine.step(BATCH).skipped is None


# ---- configuration ----


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*; got 'float16'"):
        EngineConfig(dtype="float16")  # type: ignore[arg-type]


def test_updates_in_backward_cannot_clip() -> None:
    model = copy.deepcopy(MODEL)
    with pytest.raises(
        ValueError, match=r'optimizer_overlap="backward" applies a gradient before .* max_grad_norm=None'
    ):
        StreamingEngine(model, engine_config(optimizer_overlap="backward"), AdamWConfig(max_grad_norm=1.0))
    assert differing(model.state_dict(), MODEL.state_dict()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match='device="cuda", but torch finds no CUDA device; use "auto" or "cpu"'):
        StreamingEngine(copy.deepcopy(MODEL), engine_config(device="cuda"))


ROOM = 900_000  # bytes: enough for two slots, two gradient buffers and the activations of BATCH


@pytest.mark.parametrize("knob", ["prefetch_depth", "grad_buffers", "resident_layers"])
def test_buffers_that_do_not_fit_are_refused_at_construction(knob: str) -> None:
    model = copy.deepcopy(MODEL)
    with pytest.raises(ValueError, match=rf"{knob}=40.* need .* MB on the device .* which has 0.2 MB; lower them"):
        StreamingEngine(model, engine_config(device_memory_bytes=200_000, **{knob: 40}))
    assert differing(model.state_dict(), MODEL.state_dict()) == []


def test_knobs_that_do_not_fit_are_refused_later_and_the_old_stay() -> None:
    with engine_for(device_memory_bytes=ROOM) as engine:
        engine.step(BATCH)
        for turn in (engine.control.set_grad_buffers, engine.control.set_resident_layers):
            with pytest.raises(ValueError, match=r"MB on the device .* which has 0.9 MB"):
                turn(40)
        with pytest.raises(ValueError, match=r"prefetch_depth=3, .* need"):
            engine.set_prefetch_depth(3)
        assert engine.control.knobs.prefetch_depth == 1
        assert engine.step(BATCH).skipped is None
        assert engine.device_peak_bytes <= ROOM


@pytest.mark.parametrize("depth", [-1, 1.5, "2", True, None])
def test_a_depth_that_is_no_depth_is_refused(depth: Any, engine: StreamingEngine) -> None:
    with pytest.raises(ValueError, match="prefetch_depth must be a whole number ≥ 0"):
        engine.set_prefetch_depth(depth)
    assert engine.control.knobs.prefetch_depth == 1


def test_a_batch_that_does_not_fit_is_refused_every_time() -> None:
    large = make_batch(MODEL, 60)
    with engine_for(device_memory_bytes=ROOM, offload_activations=False) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"for saved inputs.* lower them, or the batch"):
                engine.step(large)
        assert engine.step(BATCH).skipped is None


# ---- lanes ----


class BrokenError(RuntimeError):
    """What a broken piece of hardware or code would raise."""


def break_copies(monkeypatch: pytest.MonkeyPatch, lane: str, after: int) -> None:
    """Let the copies of one lane fail, after some that worked."""
    copies = 0
    whole = CpuStream.copy

    def copy_or_fail(stream: CpuStream, target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal copies
        if threading.current_thread().name == f"megatrain-{lane}":
            copies += 1
            if copies > after:
                raise BrokenError("cable unplugged")
        whole(stream, target, source)

    monkeypatch.setattr(CpuStream, "copy", copy_or_fail)


def break_compute(engine: StreamingEngine) -> None:
    def fail(*_: Any) -> None:
        raise BrokenError("kernel crashed")

    engine._anatomy.layers[1].register_forward_pre_hook(fail)


def break_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BrokenError("bad memory")

    monkeypatch.setattr(megatrain.executor, "update_layer", fail)


FAILURES = {
    "h2d": (r"the h2d lane failed in load of layer 1 in step 0: BrokenError: cable unplugged", 2),
    "h2d fetch": (r"the h2d lane failed in (load|fetch) of layer \d.* in step 0: BrokenError: cable unplugged", 6),
    "d2h": (r"the d2h lane failed in (offload|unload) of layer \d.* in step 0: BrokenError: cable unplugged", 3),
    "d2h at the end": (r"the d2h lane failed in unload of (layer \d|the shell).* in step 0: BrokenError", 12),
    "compute": (
        r"the compute lane failed in forward of layer 1, micro-batch 0 in step 0: BrokenError: kernel crashed",
        0,
    ),
    "host": (r"the host lane failed in update of the shell in step 0: BrokenError: bad memory", 0),
}


@pytest.mark.parametrize("overlap", ["forward", "none"])
@pytest.mark.parametrize("where", FAILURES)
def test_a_lane_that_dies_is_named_and_nothing_hangs(where: str, overlap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message, after = FAILURES[where]
    lane = where.split()[0]
    others = lane_threads()
    engine = engine_for(optimizer_overlap=overlap, offload_activations=True)
    if lane in ("h2d", "d2h"):
        break_copies(monkeypatch, lane, after)
    elif lane == "compute":
        break_compute(engine)
    else:
        break_updates(monkeypatch)
    with pytest.raises(LaneError, match=message) as caught:
        within_time(lambda: step_and_flush(engine))
    assert isinstance(caught.value.__cause__, BrokenError)
    for call in (
        lambda: engine.step(BATCH),
        engine.flush,
        engine.state_dict,
        lambda: engine.save_pretrained("nowhere"),
    ):
        with pytest.raises(RuntimeError, match=r"the engine failed earlier.*make a new one from a saved model"):
            within_time(call)
    within_time(engine.close)
    assert lane_threads() == others
    engine.model.model.layers[1]._forward_pre_hooks.clear()
    assert engine.model(**BATCH).logits.shape == (ROWS, TOKENS, 101)


def test_a_failure_that_nobody_waited_for_is_told_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for()
    break_updates(monkeypatch)
    assert engine.step(BATCH).skipped is None
    with pytest.raises(LaneError, match="the host lane failed in update of the shell in step 0"):
        within_time(engine.close)
    within_time(engine.close)
    assert engine.model(**BATCH).logits.shape == (ROWS, TOKENS, 101)


def test_a_failure_while_paused_is_told_after_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for()
    break_copies(monkeypatch, "h2d", after=1)
    engine.control.pause()
    threading.Timer(0.2, engine.control.resume).start()
    with pytest.raises(LaneError, match="cable unplugged"):
        within_time(lambda: engine.step(BATCH))
    within_time(engine.close)


def test_a_closed_engine_refuses_work_and_closes_again() -> None:
    engine = engine_for()
    engine.close()
    engine.close()
    for call in (lambda: engine.step(BATCH), engine.flush, engine.state_dict):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()


# ---- several threads, and other misuse ----


def test_two_threads_cannot_step_or_read_at_once(tmp_path: Path) -> None:
    engine = engine_for(AdamWConfig(lr=LR))
    engine.control.pause()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.step(BATCH)))
    thread.start()
    while engine.control.state is not State.PAUSED:
        pass
    for call in (lambda: engine.step(BATCH), engine.flush, engine.state_dict, lambda: engine.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match="another thread is in the middle of a step"):
            call()
    engine.control.resume()
    thread.join(TIMEOUT_S)
    expected = outcome(copy.deepcopy(MODEL), [BATCH], AdamWConfig(lr=LR), micro_batch_size=MICRO_ROWS)
    assert differing(engine.state_dict(), expected.state) == []
    assert [result.loss for result in results] == expected.losses
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_closing_in_the_middle_of_a_step_ends_it() -> None:
    others = lane_threads()
    engine = engine_for()
    engine.control.pause()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            engine.step(BATCH)
        except LaneError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    while engine.control.state is not State.PAUSED:
        pass
    within_time(engine.close)
    engine.control.resume()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert "the engine was closed" in str(errors[0])
    assert lane_threads() == others
    assert differing(engine.model.state_dict(), MODEL.state_dict()) == []


def test_a_streamed_model_cannot_be_called_or_streamed_twice(engine: StreamingEngine) -> None:
    with pytest.raises(RuntimeError, match="layers of this model are streamed by an engine; close the engine before"):
        engine.model(**BATCH)
    with pytest.raises(ValueError, match="layers of this model are streamed by an engine"):
        StreamingEngine(engine.model, engine_config())
    assert engine.step(BATCH).loss == pytest.approx(float(MODEL(**BATCH).loss.detach()), rel=1e-6)


def test_no_grad_around_the_engine_does_not_matter() -> None:
    with torch.no_grad():
        found = outcome(copy.deepcopy(MODEL), [BATCH], AdamWConfig(lr=LR))
    require_same(found, outcome(copy.deepcopy(MODEL), [BATCH], AdamWConfig(lr=LR)))


def test_an_engine_that_is_dropped_ends_its_threads() -> None:
    others = lane_threads()
    engine = engine_for()
    step_and_flush(engine)  # work that is still queued would keep it alive
    del engine
    gc.collect()
    assert lane_threads() == others


ENDS_IN_A_STEP = """
import threading
from tiny_models import tiny
from reference import make_batch
from megatrain import EngineConfig, StreamingEngine
model = tiny(layers=6)
engine = StreamingEngine(model, EngineConfig(device="cpu", dtype="float32"))
batch, begun = make_batch(tiny(), 64, 200), threading.Event()
def steps():
    while True:
        engine.step(batch)
        begun.set()
threading.Thread(target=steps, daemon=True).start()
begun.wait()
"""


def test_a_process_may_end_in_the_middle_of_a_step() -> None:
    """A thread that the interpreter stops inside torch would abort the process."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_STEP], env=environment, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]


def test_an_error_inside_a_with_block_is_not_hidden() -> None:
    def fail() -> None:
        with engine_for() as engine:
            engine.step(BATCH)
            raise KeyError("mine")

    others = lane_threads()
    with pytest.raises(KeyError, match="mine"):
        fail()
    assert lane_threads() == others


def test_the_same_engine_after_many_errors_still_trains_the_same_bits() -> None:
    batches = [make_batch(MODEL, seed=seed) for seed in range(3)]
    adamw = AdamWConfig(lr=LR)

    def disturb(engine: StreamingEngine, number: int) -> None:
        for change, _ in BAD_BATCHES.values():
            with pytest.raises(ValueError, match=r"."):
                engine.step({**BATCH, **change})
        engine.step(nothing_to_predict())
        with pytest.raises(ValueError, match="prefetch_depth"):
            engine.set_prefetch_depth(-1)

    expected = outcome(copy.deepcopy(MODEL), batches, adamw, micro_batch_size=MICRO_ROWS)
    found = outcome(copy.deepcopy(MODEL), batches, adamw, before_step=disturb, micro_batch_size=MICRO_ROWS)
    require_same(found, expected)


def test_a_step_record_is_written_for_applied_and_skipped_steps_only(engine: StreamingEngine) -> None:
    poison = Poison(engine, float("nan"), backward=False)
    with pytest.raises(NonFiniteError):
        engine.step(BATCH)
    poison.on = False
    engine.step(BATCH)
    engine.step(nothing_to_predict())
    engine.step(BATCH)
    records: list[StepRecord] = engine.recorder.steps()
    assert [(record.step, record.skipped is None) for record in records] == [(0, True), (1, False), (1, True)]
