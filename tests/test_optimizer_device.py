"""AdamW on the device gives the bits of AdamW on the host; its state streams beside the weights and comes back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import build
from pairs import LR, MICRO_ROWS, Outcome, batches_for, differing, engine_config, outcome, require_same
from peft import LoraConfig, get_peft_model
from reference import Batch, make_batch
from test_engine_errors import Poison, break_copies
from tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megatrain import AdamWConfig, StreamingEngine
from megatrain.checkpoint import Checkpoints, CheckpointWriter, restore
from megatrain.lanes import LaneError
from megatrain.optim import DEVICE_CHUNK, DEVICE_TRAFFIC_BYTES, AdamWStep, update, update_on_device
from megatrain.trace import Span, compute_waits

ADAMW = AdamWConfig(lr=LR, weight_decay=0.1, max_grad_norm=None)
ON_HOST: dict[str, Any] = {"optimizer_overlap": "backward"}
HERE: dict[str, Any] = {"optimizer_overlap": "backward", "optimizer_device": "device"}
LAYERS = 4


def require_same_as_on_the_host(
    make: Callable[[], Any], adamw: AdamWConfig = ADAMW, steps: int = 3, **config: Any
) -> None:
    batches = batches_for(make(), steps)
    expected = outcome(make(), batches, adamw, **{"micro_batch_size": MICRO_ROWS, **ON_HOST, **config})
    require_same(outcome(make(), batches, adamw, **{"micro_batch_size": MICRO_ROWS, **HERE, **config}), expected)


# ---- the same bits ----

KNOBS: list[dict[str, Any]] = [
    *({"prefetch_depth": depth, "grad_buffers": 1 + depth % 3} for depth in range(5)),
    {"resident_layers": 2},
    {"resident_layers": 9, "grad_buffers": 3},
    {"offload_activations": True},
    {"offload_activations": True, "prefetch_depth": 0, "grad_buffers": 1},
    {"kept_graphs": 2},
    {"kept_graphs": 9, "prefetch_depth": 3},
    {"keep_attention": True},
    {"micro_batch_size": None},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_any_knobs(dtype: str, knobs: dict[str, Any]) -> None:
    config = {"micro_batch_size": MICRO_ROWS, "dtype": dtype, **knobs}
    found = outcome(build("llama"), batches_for(build("llama")), ADAMW, **HERE, **config)
    require_same(found, on_the_host(config["micro_batch_size"], dtype))


@cache
def on_the_host(rows: int | None, dtype: str) -> Outcome:
    """One for all knobs: they do not change a bit."""
    config = {"micro_batch_size": rows, "dtype": dtype}
    return outcome(build("llama"), batches_for(build("llama")), ADAMW, **ON_HOST, **config)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_moments_that_are_rounded_at_random(dtype: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random bits are those of the element and the step, wherever it lies."""
    monkeypatch.setenv("MEGATRAIN_NATIVE", native)
    require_same_as_on_the_host(lambda: build("llama"), dtype=dtype, moments_dtype="bfloat16")


def test_with_fast_rounding() -> None:
    fast = AdamWConfig(lr=LR, max_grad_norm=None, rounding="fast")
    require_same_as_on_the_host(lambda: build("llama"), fast, dtype="bfloat16")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_other_families(family: str, dtype: str) -> None:
    require_same_as_on_the_host(lambda: build(family), steps=2, dtype=dtype)


@pytest.mark.parametrize("kind", [tm.SometimesForCausalLM, tm.OwnBuffersForCausalLM, tm.SharedBiasForCausalLM])
def test_of_models_with_more_than_weights(kind: type[tm.TinyForCausalLM]) -> None:
    """Among them one whose parameters get no gradient in some steps."""
    require_same_as_on_the_host(lambda: tiny(kind), steps=5)


def partly_frozen(*trained: str) -> PreTrainedModel:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


@pytest.mark.parametrize("trained", [("layers.0.", "layers.2."), ("k_proj",), ("norm",), ("layers",), ("lm_head",)])
@pytest.mark.parametrize("depth", [0, 3])
def test_of_models_that_are_partly_frozen(trained: tuple[str, ...], depth: int) -> None:
    require_same_as_on_the_host(lambda: partly_frozen(*trained), prefetch_depth=depth)


@pytest.mark.filterwarnings("ignore:.*padding.*")
@pytest.mark.parametrize("knobs", [{"prefetch_depth": 0}, {"resident_layers": 9}, {"dtype": "bfloat16"}], ids=str)
def test_of_adapters(knobs: dict[str, Any]) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        options: dict[str, Any] = {"init_lora_weights": False, "target_modules": ["q_proj", "down_proj"], "r": 4}
        return get_peft_model(build("llama"), LoraConfig(**options)).train()

    require_same_as_on_the_host(adapted, **knobs)


def test_with_knobs_that_are_turned_between_steps_and_within_one() -> None:
    def turn(engine: StreamingEngine, number: int) -> None:
        engine.set_prefetch_depth((3, 0, 2, 1, 4)[number])
        engine.control.set_grad_buffers((1, 3, 2, 1, 4)[number])
        engine.control.set_resident_layers((0, 2, 1, 0, 3)[number])

    batches = batches_for(build("llama"), 5)
    expected = outcome(build("llama"), batches, ADAMW, **ON_HOST)
    require_same(outcome(build("llama"), batches, ADAMW, turn, **HERE), expected)


def test_with_knobs_that_are_turned_at_any_moment() -> None:
    batches = batches_for(build("llama"), 6)
    expected = outcome(build("llama"), batches, ADAMW, **ON_HOST)
    over = threading.Event()
    with StreamingEngine(build("llama"), engine_config(**HERE), ADAMW) as engine:

        def meddle() -> None:
            number = 0
            while not over.wait(0.0005):
                number += 1
                engine.set_prefetch_depth(number * 7 % 5)
                engine.control.set_grad_buffers(1 + number * 5 % 4)
                engine.control.set_resident_layers(number * 3 % 4)

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            results = [engine.step(batch) for batch in batches]
        finally:
            over.set()
            thread.join()
        found = Outcome([r.loss for r in results], [r.grad_norm for r in results], engine.state_dict())
    require_same(found, expected)


def test_between_steps_it_scores_with_the_newest_weights() -> None:
    """What lies in slots after AdamW is what the host has been given."""
    scored = []
    batches = batches_for(build("llama"))
    for config in (ON_HOST, HERE):
        with StreamingEngine(build("llama"), engine_config(**config, keep_reference=True), ADAMW) as engine:
            found = []
            for batch in batches:
                engine.step(batch)
                found.append(engine.scores(batch))
                with engine.reference():
                    found.append(engine.scores(batch))
            scored.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*scored, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norms_of_weights_are_watched_as_ever(dtype: str) -> None:
    norms = []
    for config in (ON_HOST, HERE):
        with StreamingEngine(tiny(tm.SometimesForCausalLM), engine_config(dtype=dtype, **config), ADAMW) as engine:
            for seed, seq in enumerate((15, 16, 15)):
                engine.step(make_batch(engine.model, 4, seq, seed=seed))
            engine.flush()
            norms.append([host.weight_norm for _, host in engine.parts()])
    assert norms[0] == norms[1]


# ---- what is kept where ----


def test_gradients_of_layers_take_no_host_memory() -> None:
    with StreamingEngine(tiny(), engine_config(**HERE), ADAMW) as engine:
        shell = engine._shell_layout.trained_nbytes
        assert engine.sizes.host_arenas["gradients"] == shell
        engine.step(make_batch(engine.model, 4, 12))
        engine.flush()
        assert {span.layer for span in engine.recorder.spans() if span.op in ("unload", "update")} == {None}


def test_the_last_layers_that_backward_met_are_not_loaded_for_the_next_forward() -> None:
    with StreamingEngine(tiny(layers=5), engine_config(**HERE, prefetch_depth=1), ADAMW) as engine:
        for seed in range(3):
            engine.step(make_batch(engine.model, 4, 12, seed=seed))
        engine.flush()
        loads = [s.layer for s in engine.recorder.spans() if (s.op, s.step) == ("load", 2) and s.layer is not None]
    assert loads == [2, 3, 4, 2, 1, 0]


# ---- checkpoints ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(dtype: str, tmp_path: Path) -> None:
    """Written while the next steps train; resumed on the device and on the host."""
    batches = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(5)]

    def engine_for(config: dict[str, Any]) -> StreamingEngine:
        return StreamingEngine(tiny(layers=LAYERS), engine_config(dtype=dtype, **config), ADAMW)

    with engine_for(ON_HOST) as engine:
        straight, weights = [engine.step(batch).loss for batch in batches], engine.state_dict()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with engine_for(HERE) as engine:
        writer = CheckpointWriter(engine, checkpoints)
        begun = [engine.step(batch).loss for batch in batches[:2]]
        writer.write(2, {})
        assert begun + [engine.step(batch).loss for batch in batches[2:]] == straight
        writer.wait()
        assert writer.error is None
        assert restore(engine, checkpoints).step == 2  # into an engine whose slots hold later weights
        assert [engine.step(batch).loss for batch in batches[2:]] == straight[2:]
        assert differing(engine.state_dict(), weights) == []
    for config in (HERE, ON_HOST):
        with engine_for(config) as engine:
            restore(engine, checkpoints)
            assert [engine.step(batch).loss for batch in batches[2:]] == straight[2:]
            assert differing(engine.state_dict(), weights) == []


def test_a_store_waits_for_a_file_that_is_being_written() -> None:
    """And so do the steps that layer's state was counted by."""
    held, asked = threading.Event(), threading.Event()
    batches = [make_batch(tiny(), 4, 12, seed=seed) for seed in range(2)]
    with StreamingEngine(tiny(), engine_config(**HERE), ADAMW) as engine:
        engine.step(batches[0])
        engine.flush()
        host = engine.parts()[-1][1]
        before = [tensor.clone() for tensor in (host.weights, *host.state)]

        def gate(layer: int | None, step: int) -> None:
            if layer == 2:
                asked.set()
                held.wait()

        engine.before_update = gate
        thread = threading.Thread(target=engine.step, args=(batches[1],))
        thread.start()
        asked.wait()
        assert all(torch.equal(a, b) for a, b in zip(before, (host.weights, *host.state), strict=True))
        assert set(host.steps.values()) == {1}
        held.set()
        thread.join()
        engine.flush()
        assert set(host.steps.values()) == {2}
        assert not torch.equal(before[0], host.weights)


# ---- errors ----


def test_what_is_not_finite_does_not_reach_the_host() -> None:
    model = tiny(layers=LAYERS)
    before = copy.deepcopy(model.state_dict())
    engine = StreamingEngine(model, engine_config(**HERE), ADAMW)
    Poison(engine, float("nan"), backward=True)
    message = r"d2h lane failed in store of layer 2.*layers\.2\..* is not finite in step 0.*go back to a saved model"
    with pytest.raises(LaneError, match=message):
        engine.step(make_batch(model, 4, 12))
    with pytest.raises(RuntimeError, match="failed earlier"):
        engine.flush()
    engine.close()
    after = model.state_dict()
    assert all(tensor.isfinite().all() for tensor in after.values())
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == ("layers.3." not in name)  # which came before it


@pytest.mark.parametrize(
    ("lane", "after", "message"),
    [
        ("h2d", 5, r"the h2d lane failed in load state of layer \d in step 0: BrokenError: cable unplugged"),
        ("d2h", 4, r"the d2h lane failed in store of layer \d in step 0: BrokenError: cable unplugged"),
    ],
)
def test_a_lane_that_dies_is_named_and_nothing_hangs(
    lane: str, after: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(tiny(), 4, 12)
    with StreamingEngine(tiny(layers=LAYERS), engine_config(**HERE), ADAMW) as engine:
        break_copies(monkeypatch, lane, after)
        with pytest.raises(LaneError, match=message):
            engine.step(batch)


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grad_buffers=40.* MB on the device .* for optimizer state, .*lower them"):
        StreamingEngine(tiny(), engine_config(**HERE, grad_buffers=40, device_memory_bytes=200_000), ADAMW)


def test_a_pass_that_runs_out_of_memory_leaves_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes begin anew, after all that was under way is stored."""
    batches = batches_for(build("llama"))
    expected = outcome(build("llama"), batches, ADAMW, **ON_HOST)
    with StreamingEngine(build("llama"), engine_config(**HERE), ADAMW) as engine:
        losses = [engine.step(batches[0]).loss]
        with monkeypatch.context() as broken:
            broken.setattr("megatrain.executor.parts.forward", _out_of_memory)
            with pytest.raises(RuntimeError, match="ran out of memory"):
                engine.scores(batches[0])
        losses += [engine.step(batch).loss for batch in batches[1:]]
        assert losses == expected.losses
        assert differing(engine.state_dict(), expected.state) == []


def _out_of_memory(*_args: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


# ---- what runs at the same time ----


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """Of a model whose layers take milliseconds to copy and to compute."""
    model = build("llama", layers=6, hidden_size=512, intermediate_size=1024, head_dim=64, num_attention_heads=8)
    batches: list[Batch] = [make_batch(model, 2, 48, seed=seed) for seed in range(4)]
    with StreamingEngine(model, engine_config(**HERE), ADAMW) as engine:
        for batch in batches:
            engine.step(batch)
        engine.flush()
        return [span for span in engine.recorder.spans() if span.step > 0]


def beside(one: Span, other: Span) -> bool:
    return one.start_s < other.end_s and other.start_s < one.end_s


def test_state_travels_beside_backward(spans: list[Span]) -> None:
    for op in ("load state", "store"):
        travels = [span for span in spans if span.op == op]
        backwards = [span for span in spans if span.op == "backward" and span.layer is not None]
        assert any(beside(one, other) and one.layer != other.layer for one in travels for other in backwards), op


def test_what_must_happen_in_order_does(spans: list[Span]) -> None:
    found = {(span.op, span.layer, span.step): span for span in spans}
    for step in (1, 2, 3):
        for layer in range(6):
            chain = [found[op, layer, step] for op in ("load state", "adamw", "store")]
            assert all(before.end_s <= after.start_s for before, after in pairwise(chain))
            assert found["backward", layer, step].end_s <= chain[1].start_s
            if step < 3:
                assert chain[2].end_s <= found["load state", layer, step + 1].start_s, "stale state"


def test_spans_say_how_many_bytes_moved(spans: list[Span]) -> None:
    parameters = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
    expected = {"load state": 8, "store": 12, "adamw": 28}
    for op, each in expected.items():
        moved = {span.nbytes for span in spans if span.op == op}
        assert len(moved) == 1
        assert moved.pop() == pytest.approx(each * parameters, rel=0.3), op


def test_waiting_for_state_has_a_name() -> None:
    def span(lane: Any, op: Any, layer: int, start_s: float, end_s: float) -> Span:
        return Span(lane, op, 0, layer, None, None, start_s, end_s, 0)

    waits = compute_waits(
        [
            span("compute", "backward", 3, 0, 2),
            span("h2d", "load state", 3, 1, 5),
            span("compute", "adamw", 3, 5, 6),
            span("d2h", "store", 3, 6, 8),
        ],
        0,
        9,
    )
    assert [(wait.cause, wait.start_s, wait.end_s) for wait in waits] == [
        ("optimizer state", 2, 5),
        ("optimizer state", 6, 8),
        ("other", 8, 9),
    ]


# ---- the torch operations that a card runs ----


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operations read and write; views are free."""

    VIEWS = ("view", "slice", "detach", "alias", "lift_fresh", "zeros")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), function._schema.name.partition("::")[2]
        if name not in self.VIEWS:
            touched = [t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(touched[1:] if name == "copy_" else touched)  # a copy does not read its target
        return result


@pytest.mark.parametrize(("split", "moment_bytes"), DEVICE_TRAFFIC_BYTES)
def test_what_torch_operations_read_and_write(split: bool, moment_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_NATIVE", "0")
    count = 1 << 14
    weight, moment = (torch.bfloat16 if few else torch.float32 for few in (split, moment_bytes == 2))
    low = torch.zeros(count, dtype=torch.int16) if split else None
    weights, gradient = torch.ones(count, dtype=weight), torch.ones(count, dtype=weight)
    moments = torch.zeros(count, dtype=moment), torch.zeros(count, dtype=moment)
    with Traffic() as traffic:
        update(weights, low, gradient, *moments, AdamWStep(1e-3, 0.9, 0.99, 1e-8, 0.1, 3))
    assert traffic.nbytes == pytest.approx(count * DEVICE_TRAFFIC_BYTES[split, moment_bytes], rel=0.01)


@pytest.mark.parametrize(("split", "moment_bytes"), DEVICE_TRAFFIC_BYTES)
def test_all_that_they_make_lies_on_the_device(split: bool, moment_bytes: int) -> None:
    """Of several pieces, on a device that no kernel knows: it refuses tensors of another."""
    count, weight = DEVICE_CHUNK + 100, torch.bfloat16 if split else torch.float32
    moment = torch.bfloat16 if moment_bytes == 2 else torch.float32
    dtypes = (weight, torch.int16 if split else None, weight, moment, moment)
    arrays = [None if dtype is None else torch.empty(count, dtype=dtype, device="meta") for dtype in dtypes]
    step = AdamWStep(1e-3, 0.9, 0.99, 1e-8, 0.1, 1, grad_scale=0.5)
    assert update_on_device(*arrays, step).device.type == "meta"  # type: ignore[arg-type]


def test_arrays_of_a_device_are_checked_too() -> None:
    good = torch.zeros(8, device="meta")
    step = AdamWStep(1e-3, 0.9, 0.99, 1e-8, 0.1, 1)
    with pytest.raises(ValueError, match=r"exp_avg must have the length of the other arrays, 8; got 9"):
        update_on_device(good, None, good, torch.zeros(9, device="meta"), good, step)
