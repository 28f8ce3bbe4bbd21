"""Attention by a kernel of choice: the bits of plain Hugging Face with the same kernel, wherever layers run."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import build
from pairs import MICRO_ROWS, Pair, batches_for, differing, engine_config, gap, outcome, require_same
from reference import Batch, make_batch, plain_step
from test_engine_bfloat16 import ByHand
from tiny_models import SharedBiasForCausalLM, tiny
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy import kernels
from megatrain.anatomy.kernels import BACKENDS, FUSED_CALLS, MOST_KINDS, Kernels, attention_by
from megatrain.engine import DeviceMemoryError
from megatrain.plan import plan

ADAMW = AdamWConfig(lr=1e-3, max_grad_norm=0.5)
NAMES = list(BACKENDS)
attend = functional.scaled_dot_product_attention


class Running(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which fused kernels run in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += [FUSED_CALLS[func]] if func in FUSED_CALLS else []
        return func(*args, **(kwargs or {}))


def parts(tokens: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, 4, tokens, 16).requires_grad_() for _ in range(3)]


def flags() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled())
    return (*enabled, cuda.math_sdp_enabled(), torch._C._get_sdp_priority_order())


@pytest.fixture(autouse=True)
def nothing_stays_chosen() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


# ---- one call ----


@pytest.mark.parametrize(
    ("name", "runs"),
    [("torch", ["flash"]), ("flash", ["flash"]), ("math", []), ("cudnn", ["flash"]), ("efficient", ["flash"])],
)
def test_a_kernel_that_a_cpu_lacks_leaves_the_choice_to_torch(name: str, runs: list[str]) -> None:
    with attention_by(name), Running() as running:
        attend(*parts(), is_causal=True).sum().backward()
    assert running.kernels == runs


def test_what_flash_attention_cannot_do_is_done_without_a_word() -> None:
    """On a CPU it draws no dropout. That a fused kernel was asked for is no warning, and no error."""
    with attention_by("flash"), Running() as running:
        attend(*parts(), dropout_p=0.5)
    assert running.kernels == []


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_are_those_of_before_also_after_an_error(name: str) -> None:
    before = flags()

    def fail() -> None:
        with attention_by(name):
            raise KeyError("of the layer")

    with pytest.raises(KeyError, match="of the layer"):
        fail()
    assert flags() == before


def test_behind_a_kernel_comes_what_the_user_left_enabled() -> None:
    with sdpa_kernel(SDPBackend.MATH), attention_by("cudnn"), Running() as running:
        attend(*parts())
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert running.kernels == []


def test_two_threads_take_turns() -> None:
    """Else the one that ends first would put back what it found in the middle of the other."""
    order: list[str] = []
    inside, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with attention_by("math"):
            inside.set()
            assert may_end.wait(10)
            order.append("first")

    def second() -> None:
        assert inside.wait(10)
        may_end.set()
        with attention_by("flash"):
            order.append("second")

    threads = [threading.Thread(target=run) for run in (second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert order == ["first", "second"]


# ---- the bits of plain Hugging Face with the same kernel ----


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "math"), ("gemma3_text", "math"), ("gpt2", "math"), ("qwen3_moe", "math"), ("llama", "flash")],
)
def test_one_micro_batch_has_the_bits_of_plain_training_by_that_kernel(family: str, name: str) -> None:
    pair = Pair.of(build(family), ADAMW, attention=name)
    with pair.engine:
        for batch in batches_for(pair.plain):
            with sdpa_kernel(BACKENDS[name]):
                expected = plain_step(pair.plain, pair.optimizer, batch, micro_batches=1, max_grad_norm=0.5)
            result = pair.engine.step(batch)
            assert (result.loss, result.grad_norm) == expected
            assert differing(pair.engine.state_dict(), pair.plain.state_dict()) == []


@pytest.mark.parametrize(("family", "name"), [("llama", "math"), ("phi3", "math"), ("llama", "flash")])
def test_bfloat16_follows_a_master_that_is_trained_by_that_kernel(family: str, name: str) -> None:
    by_hand = ByHand.of(family, ADAMW)
    with StreamingEngine(build(family), engine_config(dtype="bfloat16", attention=name), ADAMW) as engine:
        for batch in batches_for(by_hand.model):
            with sdpa_kernel(BACKENDS[name]):
                expected = by_hand.step(batch)
            result = engine.step(batch)
            assert (result.loss, result.grad_norm) == expected
            assert differing(engine.state_dict(), by_hand.state()) == []


@pytest.mark.parametrize("name", ["math", "flash"])
def test_several_micro_batches_equal_plain_training_by_that_kernel_up_to_rounding(name: str) -> None:
    pair = Pair.of(build("llama"), ADAMW, attention=name, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        for batch in batches_for(pair.plain):
            with sdpa_kernel(BACKENDS[name]):
                loss, _ = plain_step(pair.plain, pair.optimizer, batch, micro_batches=3, max_grad_norm=0.5)
            assert pair.engine.step(batch).loss == pytest.approx(loss, rel=1e-6)
            pair.require_close_weights(1e-6, "after a step")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_it_is_what_the_engine_computes_where_the_whole_process_runs_that_kernel(family: str, dtype: str) -> None:
    batches, config = batches_for(build(family)), {"dtype": dtype, "micro_batch_size": MICRO_ROWS}
    with sdpa_kernel(SDPBackend.MATH):
        expected = outcome(build(family), batches, ADAMW, **config)
    require_same(outcome(build(family), batches, ADAMW, attention="math", **config), expected)
    by_torch = outcome(build(family), batches, ADAMW, **config)
    assert gap(by_torch.state, expected.state) > 0  # the two kernels do round in their own ways


@pytest.mark.parametrize(
    "changes",
    [{"kept_graphs": 1}, {"keep_attention": True}, {"offload_activations": True, "prefetch_depth": 0}],
    ids=str,
)
@pytest.mark.parametrize("name", ["math", "measured"])
def test_beside_other_settings(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, "math")
    batches = batches_for(build("llama"))
    plain = outcome(build("llama"), batches, ADAMW, attention=name, micro_batch_size=MICRO_ROWS)
    found = outcome(build("llama"), batches, ADAMW, attention=name, micro_batch_size=MICRO_ROWS, **changes)
    require_same(found, plain)


# ---- wherever layers run ----


@pytest.fixture
def flash_enabled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether flash attention was enabled, for each call of attention in any thread."""
    found: list[bool] = []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    return found


def everywhere(engine: StreamingEngine, batch: Batch) -> Iterator[str]:
    """All that makes layers run."""
    engine.step(batch)
    yield "forward and recompute"
    engine.evaluate(batch)
    yield "evaluation"
    engine.scores(batch)
    yield "scores"
    with engine.reference():
        engine.scores(batch)
    yield "the reference"
    with engine.inference() as model:
        model.generate(batch["input_ids"][:, :4], max_new_tokens=3, pad_token_id=0)
    yield "generation"
    engine.step(batch, lambda scores: scores.mean())
    yield "an objective of one's own"


@pytest.mark.parametrize("changes", [{}, {"kept_graphs": 99}, {"keep_attention": True}], ids=str)
def test_the_choice_holds_wherever_layers_run(changes: dict[str, Any], flash_enabled: list[bool]) -> None:
    model = build("llama")
    batch = make_batch(model)
    with StreamingEngine(model, engine_config(attention="math", keep_reference=True, **changes), ADAMW) as engine:
        flash_enabled.clear()  # of the check of the whole model
        for place in everywhere(engine, batch):
            assert flash_enabled, place
            assert not any(flash_enabled), place
            flash_enabled.clear()
    attend_as_torch_chooses(flash_enabled)


def attend_as_torch_chooses(flash_enabled: list[bool]) -> None:
    functional.scaled_dot_product_attention(*parts())
    assert flash_enabled == [True]


# ---- chosen by measuring ----


def take(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    """Let every run of a kernel take a second, and of one half of that."""

    def seconds(self: Kernels, name: str, run: Callable[[], None]) -> float:
        run()
        return 0.5 if name == fastest else 1.0

    monkeypatch.setattr(Kernels, "_seconds", seconds)


DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.05}


@pytest.mark.parametrize("fastest", ["flash", "math"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("gpt2", DROPOUT), ("qwen3_moe", ROUTER), ("doge", {}), ("qwen3_next", {})],
    ids=["llama", "dropout", "router logits", "masks with a gradient", "layers without attention"],
)
def test_nothing_but_the_choice_remains_of_measuring(
    family: str, options: dict[str, Any], fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers, gradients and what hooks collect are those of the kernel that was taken, asked for by name.

    With a mask that needs a gradient (doge) no fused kernel runs on a CPU, and torch is left to choose.
    """
    take(monkeypatch, fastest)
    found = []
    for asked in ("measured", "torch" if family == "doge" else fastest):
        torch.manual_seed(0)
        model = build(family, **options)
        found.append(outcome(model, batches_for(model), ADAMW, attention=asked, micro_batch_size=MICRO_ROWS))
        found[-1].norms.append(float(torch.rand(())))
    require_same(*found)


def test_what_the_shell_gets_back_is_not_counted_twice() -> None:
    """Layers that use what the shell computed send its gradient back, in a rehearsal too."""
    found = []
    for asked in ("torch", "measured"):
        model = tiny(SharedBiasForCausalLM)
        model.config._attn_implementation = "sdpa"  # its layers have none, and are rehearsed
        found.append(outcome(model, batches_for(model), ADAMW, attention=asked, micro_batch_size=MICRO_ROWS))
    require_same(*found)


def test_the_log_has_every_kernels_time_and_the_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take(monkeypatch, "math")
    with caplog.at_level(logging.INFO, "megatrain"):
        outcome(build("llama"), batches_for(build("llama"), padding=False), ADAMW, attention="measured")
    [line] = [record.message for record in caplog.records if record.message.startswith("attention: ")]
    assert line == (
        "attention: LlamaDecoderLayer on (6, 24, 64) forward and backward: flash 1e+03 ms, math 500 ms; math is taken"
    )


def test_a_difference_within_noise_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "_seconds", lambda self, name, run: 1.0 if name == "flash" else 0.985)
    assert chosen_by(make_batch(build("llama"), padding=False)) == ["flash"]


def test_times_are_those_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count()
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: float(next(times)))
    assert chosen_by(make_batch(build("llama"), padding=False)) == ["flash"]  # each took one second


def test_a_kind_of_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is alike; with and without a mask, and each length, are kinds of their own."""
    model = build("llama")
    asked: list[str] = []
    fastest = Kernels._fastest
    monkeypatch.setattr(Kernels, "_fastest", lambda *args: asked.append(args[2]) or fastest(*args))
    with StreamingEngine(model, engine_config(attention="measured"), ADAMW) as engine:
        for padding in (False, False, "right", "right"):
            engine.step(make_batch(model, padding=padding))
        assert len(asked) == 2
        engine.evaluate(make_batch(model, seq=7))  # nothing goes backward, and nothing is measured
        assert len(asked) == 2
        for tokens in range(8, 8 + MOST_KINDS):
            engine.step(make_batch(model, seq=tokens, padding=False))
        assert len(asked) == MOST_KINDS
        engine.step(make_batch(model, seq=50, padding=False))
        assert len(asked) == MOST_KINDS


def test_whole_scores_are_not_tried_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, "math")
    model = build("llama")
    width = model.config.hidden_size // model.config.num_attention_heads
    assert chosen_by(make_batch(model, batch=1, seq=8 * width, padding=False)) == ["flash"]


def chosen_by(batch: Batch) -> list[str]:
    """What an engine takes for a batch."""
    with StreamingEngine(build("llama"), engine_config(attention="measured"), ADAMW) as engine:
        engine.step(batch)
        return list(engine._executor._kernels.chosen.values())


# ---- what fails ----


@pytest.fixture
def without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN says that it can, and then fails."""

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION):
            raise RuntimeError("cuDNN Frontend error: no execution plans support the graph\nmore of it")
        return attend(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", failing)


@pytest.mark.usefixtures("without_a_plan")
@pytest.mark.parametrize("asked", ["cudnn", "measured"])
def test_a_kernel_that_fails_is_left_out_with_a_warning(
    asked: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, "cudnn")
    monkeypatch.setitem(kernels.FUSED_ON, "cpu", ("flash", "cudnn"))
    batches = batches_for(build("llama"), padding=False)
    found = outcome(build("llama"), batches, ADAMW, attention=asked)
    require_same(found, outcome(build("llama"), batches, ADAMW, attention="flash"))
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == (
        "attention: cudnn is left out for LlamaDecoderLayer on (6, 24, 64): "
        "cuDNN Frontend error: no execution plans support the graph"
    )


def test_where_memory_runs_out_while_measuring_the_step_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(build("llama"))
    expected = outcome(build("llama"), [batch], ADAMW, attention="flash")
    model = build("llama")
    with StreamingEngine(model, engine_config(attention="flash", offload_activations=False), ADAMW) as engine:
        with monkeypatch.context() as broken:
            broken.setattr("megatrain.anatomy.kernels.attention_by", _out_of_memory)
            with pytest.raises(DeviceMemoryError, match="the device ran out of memory"):
                engine.step(batch)
        assert engine.step(batch).loss == expected.losses[0]


def _out_of_memory(name: str) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


@pytest.mark.parametrize("asked", ["measured", "flash"])
def test_a_model_that_computes_attention_in_another_way_is_refused(asked: Any) -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    said = (
        f"attention={asked!r} chooses among .* attn_implementation='eager'; load it with attn_implementation=\"sdpa\""
    )
    with pytest.raises(ValueError, match=said):
        StreamingEngine(model, engine_config(attention=asked), ADAMW)
    StreamingEngine(model, engine_config(), ADAMW).close()


# ---- in the plan ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_counts_whole_scores_in_float32_and_nothing_that_is_kept(dtype: Any) -> None:
    model, rows, tokens = build("llama"), 3, 128
    configs = [engine_config(dtype=dtype, keep_attention=True, attention=name) for name in ("torch", "math")]
    fused, whole = (plan(model, config, ADAMW, batch=rows, sequence=tokens) for config in configs)
    scores = model.config.num_attention_heads * rows * tokens**2
    assert whole.needs.workspace.scores - fused.needs.workspace.scores == 2 * 4 * scores
    assert whole.needs.workspace.kept_of_a_layer - fused.needs.workspace.kept_of_a_layer == 4 * scores
    assert whole.device["kept attention"] == 0 < fused.device["kept attention"]
