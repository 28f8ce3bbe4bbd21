"""The same parity on a CUDA device; skipped where there is none.

Kernels of a GPU sum in no fixed order, so results agree up to rounding here. AdamW's eps is larger than by
default: where a gradient is nothing but rounding, AdamW would otherwise make it as large as the learning rate.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import build
from pairs import LR, MICRO_ROWS, ROWS, Outcome, Pair, batches_for, engine_config, gap, outcome
from reference import Batch, make_batch, plain_step
from test_engine_bfloat16 import ByHand
from tiny_models import tiny
from transformers import PreTrainedModel

from megatrain import AdamWConfig, EngineConfig, StreamingEngine, optim
from megatrain.anatomy.kernels import BACKENDS, attention_by, rehearsed
from megatrain.engine import DeviceMemoryError
from megatrain.optim import DEVICE_CHUNK, AdamWStep

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none here"),
]

FAMILIES = ["llama", "qwen3_moe", "gpt_oss", "gemma3_text", "gpt2", "mixtral", "phi3"]
ADAMW = AdamWConfig(lr=LR, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """No TF32: float32 products are float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(model: PreTrainedModel, batches: list[Batch], **config: Any) -> Outcome:
    return outcome(model, batches, ADAMW, **{"device": DEVICE, **config})


def config_for(**changes: Any) -> EngineConfig:
    return engine_config(**{"device": DEVICE, **changes})


def require_near(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert gap(found.state, expected.state) <= tolerance


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return batches_for(build("llama"))


@pytest.fixture(scope="module")
def default(batches: list[Batch]) -> Outcome:
    return on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS)


# ---- float32 ----


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_plain_training(family: str, micro_rows: int | None, padding: Any) -> None:
    pair = Pair.of(build(family), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, padding=padding), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_trains_as_a_cpu_does(family: str) -> None:
    batches = batches_for(build(family))
    cpu = outcome(build(family), batches, ADAMW, micro_batch_size=MICRO_ROWS)
    require_near(on_device(build(family), batches, micro_batch_size=MICRO_ROWS), cpu, 1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, ROWS])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_depths_and_micro_batches(depth: int, rows: int, batches: list[Batch], default: Outcome) -> None:
    require_near(on_device(build("llama"), batches, prefetch_depth=depth, micro_batch_size=rows), default)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("resident", [0, 2, "auto"])
def test_buffers_residents_and_offloading(
    count: int, offload: bool, resident: Any, batches: list[Batch], default: Outcome
) -> None:
    config = {"grad_buffers": count, "offload_activations": offload, "resident_layers": resident}
    require_near(on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS, **config), default)


@pytest.mark.parametrize("overlap", ["forward", "backward", "none"])
def test_where_the_updates_run(overlap: Any) -> None:
    adamw = AdamWConfig(lr=LR, eps=1e-4, max_grad_norm=None)
    pair = Pair.of(build("llama"), adamw, device=DEVICE, optimizer_overlap=overlap, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("grad_buffers", [1, 2, 3])
def test_adamw_on_the_device(depth: int, grad_buffers: int) -> None:
    """Beside torch.optim.AdamW on the same device."""
    adamw = AdamWConfig(lr=LR, eps=1e-4, weight_decay=0.1, max_grad_norm=None)
    here: dict[str, Any] = {"optimizer_overlap": "backward", "optimizer_device": "device"}
    knobs = {"prefetch_depth": depth, "grad_buffers": grad_buffers, "micro_batch_size": MICRO_ROWS}
    pair = Pair.of(build("llama"), adamw, device=DEVICE, **here, **knobs)
    with pair.engine:
        pair.require_close(batches_for(pair.plain, 4), TOLERANCE)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw_of_a_card_is_that_of_the_host(split: bool, moments: torch.dtype) -> None:
    """Over several pieces; random bits are the same, so that rounded moments differ by what the arithmetic does."""
    count, generator = DEVICE_CHUNK + 1000, torch.Generator().manual_seed(0)
    master = torch.randn(count, generator=generator)
    weight, low = master, None
    if split:
        weight, low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        optim.split(master, weight, low)
    arrays = [weight, low, torch.zeros(count, dtype=moments), torch.zeros(count, dtype=moments)]
    there = [None if array is None else array.to(DEVICE) for array in arrays]
    for number in range(1, 4):
        gradient = torch.randn(count, generator=generator).to(weight.dtype)
        step = AdamWStep(1e-3, 0.9, 0.99, 1e-8, 0.1, number)
        squares = optim.update(weight, low, gradient, arrays[2], arrays[3], step)  # type: ignore[arg-type]
        found = optim.update_on_device(there[0], there[1], gradient.to(DEVICE), there[2], there[3], step)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(squares, rel=1e-5)
    on_host, on_card = (each[0].float() if low is None else optim.join(each[0], each[1]) for each in (arrays, there))  # type: ignore[union-attr, arg-type]
    assert gap({"weights": on_card.cpu()}, {"weights": on_host}) <= 1e-6
    for mine, other in zip(there[2:], arrays[2:], strict=True):
        assert gap({"moments": mine.cpu().float()}, {"moments": other.float()}) <= 1e-2  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
def test_a_router_balancing_loss(family: str, micro_rows: int | None) -> None:
    options: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
    pair = Pair.of(build(family, **options), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


@pytest.mark.parametrize("offload", [False, True])
def test_dropout_draws_what_plain_training_draws(offload: bool) -> None:
    model = build("gpt2", **dict[str, Any](attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1))
    pair = Pair.of(model, ADAMW, device=DEVICE, offload_activations=offload)
    batches = batches_for(pair.plain)
    with pair.engine:
        torch.manual_seed(7)
        expected = []
        for batch in batches:
            moved = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
            expected.append(plain_step(pair.plain, pair.optimizer, moved, micro_batches=1, max_grad_norm=0.5))
        torch.manual_seed(7)
        for batch, (loss, norm) in zip(batches, expected, strict=True):
            result = pair.engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=TOLERANCE)
            assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
        pair.require_close_weights(TOLERANCE, "after all steps")


def test_frozen_parts_and_missing_gradients() -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name or "norm" in name)
    pair = Pair.of(model, ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


def test_buffers_and_constants_of_layers_are_on_the_device() -> None:
    pair = Pair.of(build("deepseek_v3"), ADAMW, device=DEVICE, prefetch_depth=0)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


def test_a_random_depth_at_every_moment(batches: list[Batch], default: Outcome) -> None:
    engine = StreamingEngine(build("llama"), config_for(micro_batch_size=MICRO_ROWS), ADAMW)
    over = threading.Event()

    def meddle() -> None:
        choose = random.Random(0)
        while not over.wait(0.0005):
            engine.set_prefetch_depth(choose.randrange(5))
            engine.control.set_grad_buffers(choose.randrange(1, 4))
            engine.control.set_resident_layers(choose.randrange(3))

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        with engine:
            results = [engine.step(batch) for batch in batches]
            found = Outcome([r.loss for r in results], [r.grad_norm for r in results], engine.state_dict())
    finally:
        over.set()
        thread.join()
    require_near(found, default)


# ---- bfloat16 ----


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
def test_bfloat16_follows_a_float32_master(family: str, micro_rows: int | None) -> None:
    """One bit of a bfloat16 gradient is 0.4 % of it, and three steps move weights by some 5 %."""
    by_hand = ByHand.of(family, ADAMW)
    by_hand.model.to(DEVICE)
    by_hand.optimizer.param_groups[0]["eps"] = by_hand.optimizer.param_groups[1]["eps"] = ADAMW.eps
    with StreamingEngine(build(family), config_for(dtype="bfloat16", micro_batch_size=micro_rows), ADAMW) as engine:
        for batch in batches_for(build(family)):
            result, (loss, norm) = engine.step(batch), by_hand.step(batch, micro_rows)
            assert result.loss == pytest.approx(loss, rel=2e-3)
            assert result.grad_norm == pytest.approx(norm, rel=2e-2)
        state = engine.state_dict()
    expected = {name: tensor.cpu() for name, tensor in by_hand.state().items()}
    assert {name: tensor.dtype for name, tensor in state.items()} == {n: t.dtype for n, t in expected.items()}
    assert gap(state, expected) <= 5e-3


@pytest.mark.parametrize("depth", [0, 2])
def test_bfloat16_depths_agree(depth: int, batches: list[Batch]) -> None:
    expected = on_device(build("llama"), batches, dtype="bfloat16", micro_batch_size=MICRO_ROWS)
    config = {"dtype": "bfloat16", "prefetch_depth": depth, "offload_activations": True, "grad_buffers": 1}
    require_near(on_device(build("llama"), batches, micro_batch_size=MICRO_ROWS, **config), expected, 2e-3)


# ---- kernels of attention ----


@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_kernel_of_attention_trains_as_plain_training_by_it(name: str, micro_rows: int | None) -> None:
    """In bfloat16, as flash attention and cuDNN have no other; each runs where it can, torch's choice elsewhere."""
    by_hand = ByHand.of("llama", ADAMW)
    by_hand.model.to(DEVICE)
    by_hand.optimizer.param_groups[0]["eps"] = by_hand.optimizer.param_groups[1]["eps"] = ADAMW.eps
    config = config_for(dtype="bfloat16", micro_batch_size=micro_rows, attention=name)
    with StreamingEngine(build("llama"), config, ADAMW) as engine:
        for batch in batches_for(build("llama")):
            with attention_by(name):
                loss, norm = by_hand.step(batch, micro_rows)
            result = engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=2e-3)
            assert result.grad_norm == pytest.approx(norm, rel=2e-2)
        state = engine.state_dict()
    assert gap(state, {n: tensor.cpu() for n, tensor in by_hand.state().items()}) <= 5e-3


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_is_first_in_order_is_the_one_that_runs(name: str) -> None:
    """Where there is no mask; that cuDNN does not run on an old card is its own affair."""
    parts = [torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

    seen = rehearsed(name, run, "a call")
    if seen is None or (name == "cudnn" and torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip(f"{name} cannot run on this card")
    assert seen.kernels == {name}


def test_the_fastest_kernel_is_measured_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    batches = [make_batch(build("llama", **sizes), 4, 256, padding=False)]
    expected = on_device(build("llama", **sizes), batches, dtype="bfloat16")
    with caplog.at_level("INFO", "megatrain"):
        found = on_device(build("llama", **sizes), batches, dtype="bfloat16", attention="measured")
    [line] = [record.message for record in caplog.records if "is taken" in record.message]
    assert line.count(" ms") >= 2
    assert found.losses == pytest.approx(expected.losses, rel=2e-3)


# ---- what only a device has ----


def test_the_model_comes_back_to_the_host_trained() -> None:
    model = build("gpt2")
    pair = Pair.of(model, ADAMW, device=DEVICE)
    pair.step(make_batch(pair.plain))
    pair.engine.close()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert gap(model.state_dict(), pair.plain.state_dict()) <= TOLERANCE
    assert model(**make_batch(model)).loss.isfinite()


def test_host_memory_is_pinned_while_the_engine_lives() -> None:
    with StreamingEngine(build("llama"), config_for(offload_activations=True), ADAMW) as engine:
        before = engine.pinned_bytes
        engine.step(make_batch(build("llama")))
        assert engine.pinned_bytes > before > 0


def test_the_device_holds_what_memory_arithmetic_says() -> None:
    """The ledger's bytes are torch's, up to rounding of each allocation and kernels' workspace."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    with StreamingEngine(build("llama"), config_for(), ADAMW) as engine:
        engine.step(make_batch(build("llama")))
        engine.flush()
        assert engine.arena_bytes <= torch.cuda.memory_allocated() - held
        assert engine.device_peak_bytes >= engine.arena_bytes
        assert engine.device_index is not None


def test_copies_overlap_compute_on_the_device() -> None:
    model = build("llama", layers=8, hidden_size=1024, intermediate_size=4096, head_dim=64, num_attention_heads=16)
    config = config_for(dtype="bfloat16", prefetch_depth=2)
    with StreamingEngine(model, config, ADAMW) as engine:
        for seed in range(4):
            engine.step(make_batch(tiny(), 8, 128, seed=seed))
        engine.flush()
        spans = engine.recorder.spans()
    loads = [span for span in spans if span.op == "load" and span.step == 3 and span.layer is not None]
    works = [span for span in spans if span.op in ("forward", "backward") and span.step == 3]
    assert any(load.start_s < work.end_s and work.start_s < load.end_s for load in loads for work in works)


@pytest.mark.parametrize("micro_rows", [None, MICRO_ROWS])
@pytest.mark.parametrize("model_class", [tm.SharedBiasForCausalLM, tm.OwnBuffersForCausalLM, tm.TiedForCausalLM])
def test_models_of_our_own(model_class: type[tm.TinyForCausalLM], micro_rows: int | None) -> None:
    pair = Pair.of(tiny(model_class), ADAMW, device=DEVICE, micro_batch_size=micro_rows)
    with pair.engine:
        pair.require_close(batches_for(pair.plain), TOLERANCE)


# ---- passes without training, and losses of one's own ----


def plain_scores(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    inputs = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
    log_probs, labels = logits.float().log_softmax(-1)[:, :-1], inputs["labels"][:, 1:]
    found = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    return torch.cat([torch.zeros(len(labels), 1, device=DEVICE), found], dim=1)


def preference(scores: torch.Tensor) -> torch.Tensor:
    chosen, rejected = scores.sum(1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected)).mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own(family: str) -> None:
    pair = Pair.of(build(family), ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS)
    batch = make_batch(pair.plain)
    with pair.engine, torch.no_grad():
        found, expected = pair.engine.scores(batch), plain_scores(pair.plain.eval(), batch).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_objective_trains_as_in_plain_pytorch(batches: list[Batch]) -> None:
    pair = Pair.of(build("llama"), ADAMW, device=DEVICE, micro_batch_size=MICRO_ROWS, prefetch_depth=2)
    with pair.engine:
        for batch in batches:
            pair.optimizer.zero_grad()
            loss = preference(plain_scores(pair.plain, batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), ADAMW.max_grad_norm or 0.0)
            pair.optimizer.step()
            assert pair.engine.step(batch, preference).loss == pytest.approx(loss.item(), rel=TOLERANCE)
        pair.require_close_weights(TOLERANCE, "after steps with an objective")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_generates_what_the_whole_model_does(family: str, depth: int) -> None:
    """Greedy, in float32: a token would differ only where two are equally likely to seven digits."""
    pair = Pair.of(build(family), ADAMW, device=DEVICE, prefetch_depth=depth)
    batch = make_batch(pair.plain, batch=3, seq=9, padding="left")
    inputs = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    with pair.engine:
        pair.engine.step(batch)
        with pair.engine.inference() as streamed:
            found = streamed.generate(**inputs, **options)
        pair.plain.load_state_dict(pair.engine.state_dict())
    assert torch.equal(found, pair.plain.eval().generate(**inputs, **options))


def test_the_reference_stays_what_it_was(batches: list[Batch]) -> None:
    with StreamingEngine(build("llama"), config_for(keep_reference=True), ADAMW) as engine:
        first = engine.scores(batches[0])
        for batch in batches:
            engine.step(batch)
            with engine.reference():
                assert torch.equal(engine.scores(batches[0]), first)
        assert not torch.equal(engine.scores(batches[0]), first)


def test_running_out_of_memory_is_said_and_survived() -> None:
    """A real one: torch's allocator is capped just above what the engine holds after a small step."""
    model = build("llama", layers=4, hidden_size=1024, intermediate_size=4096, head_dim=64, num_attention_heads=16)
    small, large = make_batch(tiny(), 4, 32), make_batch(tiny(), 64, 512)
    with StreamingEngine(model, config_for(offload_activations=False), ADAMW) as engine:
        engine.step(small)
        engine.flush()
        torch.cuda.empty_cache()
        cap = torch.cuda.memory_reserved() + (8 << 20)
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
        try:
            with pytest.raises(DeviceMemoryError, match="what can be lowered"):
                engine.step(large)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert engine.step(small).loss > 0
