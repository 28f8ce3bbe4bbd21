"""Layers through torch.compile: one function per structure, the same results, and no silent way out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models as tm
import torch
from families import build
from pairs import batches_for, engine_config, outcome, require_same
from tiny_models import tiny
from torch import Tensor

from megatrain import AdamWConfig, StreamingEngine
from megatrain.anatomy import compiled
from megatrain.anatomy.compiled import CompiledLayers, structure_keys

ADAMW = AdamWConfig(lr=1e-3)

pytestmark = pytest.mark.filterwarnings(  # of torch's compiler
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)


@pytest.fixture(autouse=True)
def _fresh_compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="megatrain")
    yield
    torch._dynamo.reset()


def use(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Engines compile with another backend: eager graphs have the bits of the layers that were traced."""
    monkeypatch.setattr(CompiledLayers.__init__, "__defaults__", (backend,))


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.getMessage().startswith("compile:")]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return said(caplog, logging.WARNING)


@pytest.mark.parametrize(("family", "structures", "rows", "shapes"), [("llama", 1, 4, 2), ("gemma3_text", 2, None, 1)])
def test_layers_of_equal_structure_are_compiled_once_and_forward_and_backward_are_theirs(
    family: str,
    structures: int,
    rows: int | None,
    shapes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """aot_eager: backward is compiled, too. Of six rows, the second micro-batch of four is smaller."""
    use(monkeypatch, "aot_eager")
    model = build(family)
    batches = batches_for(model, steps=2)
    found = outcome(model, batches, ADAMW, micro_batch_size=rows, compile=True)
    require_same(found, outcome(build(family), batches, ADAMW, micro_batch_size=rows))
    told = said(caplog, logging.INFO)
    assert told[0] == f"compile: 4 layers, {structures} different structures"
    assert len([text for text in told if "1 graphs" in text]) == 2 * structures * shapes  # without and with backward
    assert len(told) == 1 + 2 * structures * shapes
    assert warned(caplog) == []


def test_the_model_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "eager")
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    batch = batches_for(model)[0]
    with StreamingEngine(model, engine_config(compile=True), ADAMW) as engine:
        engine.step(batch)
        with engine.inference() as streamed:
            streamed.generate(batch["input_ids"][:1, :3], max_new_tokens=2, do_sample=False)
        engine.evaluate(batch)
    assert [type(module) for module in model.modules()] == kinds


def require_fallback(model: Any, plain: Any, caplog: pytest.LogCaptureFixture, reason: str, **config: Any) -> None:
    """It trains as without compile, and says once why."""
    batches = batches_for(plain, steps=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = outcome(model, batches, ADAMW, compile=True, **config)
        torch.manual_seed(0)
        require_same(found, outcome(plain, batches, ADAMW, **config))
    assert len(warned(caplog)) == 1
    assert reason in warned(caplog)[0]


def test_a_compiler_that_fails_is_named_once_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nand a long story")

    use(monkeypatch, fails)
    require_fallback(build("llama"), build("llama"), caplog, "no C++ compiler was found")
    assert warned(caplog)[0].startswith("compile: 4 layers (LlamaDecoderLayer) run uncompiled: ")
    assert "long story" not in warned(caplog)[0]


def test_a_compiler_that_is_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(tensor * 1.01 for tensor in graph(*args))

    use(monkeypatch, wrong)
    require_fallback(build("llama"), build("llama"), caplog, "compiled it gives another result (relative difference")


def test_dropout_falls_back_and_draws_what_it_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "eager")
    models = [build("gpt2", resid_pdrop=0.2) for _ in range(2)]
    require_fallback(*models, caplog, "it draws random numbers (dropout)", micro_batch_size=2)


def test_router_logits_fall_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    use(monkeypatch, "eager")
    models = [build("mixtral", output_router_logits=True) for _ in range(2)]
    require_fallback(*models, caplog, "hooks collect from it (router logits)")


class BrokenLayer(tm.TinyLayer):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return super().forward(hidden)


class BrokenForCausalLM(tm.TinyForCausalLM):
    layer_class = BrokenLayer


class TwoHalvesLayer(tm.TinyLayer):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        hidden = hidden * 2
        torch._dynamo.graph_break()
        return super().forward(hidden)


class TwoHalvesForCausalLM(tm.TinyForCausalLM):
    layer_class = TwoHalvesLayer


@pytest.mark.parametrize("model_class", [BrokenForCausalLM, TwoHalvesForCausalLM])
def test_graph_breaks_are_counted(
    model_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "eager")
    batches = batches_for(tiny(model_class), steps=1)
    require_same(outcome(tiny(model_class), batches, ADAMW, compile=True), outcome(tiny(model_class), batches, ADAMW))
    (warning,) = warned(caplog)
    graphs = 2 if model_class is TwoHalvesForCausalLM else 1
    assert warning.startswith(f"compile: {model_class.layer_class.__name__} in {graphs} graphs only, because of ")


def test_more_shapes_than_are_compiled_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "eager")
    monkeypatch.setattr(compiled, "MOST_KINDS", 2)
    model = tiny()
    batches = [batches_for(model, rows=rows)[0] for rows in (2, 3, 4)]
    require_same(outcome(tiny(), batches, ADAMW, compile=True), outcome(tiny(), batches, ADAMW))
    assert warned(caplog) == ["compile: TinyLayer meets more than 2 shapes; new ones run uncompiled"]


class NumberedLayer(tm.TinyLayer):
    """What it computes depends on its place."""

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden * (1 + self.index))


class NumberedForCausalLM(tm.TinyForCausalLM):
    layer_class = NumberedLayer


def test_layers_that_read_their_place_are_compiled_again_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "eager")
    batches = batches_for(tiny(NumberedForCausalLM), steps=1)
    found = outcome(tiny(NumberedForCausalLM), batches, ADAMW, compile=True)
    require_same(found, outcome(tiny(NumberedForCausalLM), batches, ADAMW))
    assert said(caplog, logging.INFO)[-1].endswith("was compiled again, for a layer that differs (4)")


def test_layers_that_differ_too_often_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "eager")
    monkeypatch.setattr(compiled, "MOST_KINDS", 2)
    batches = batches_for(tiny(NumberedForCausalLM), steps=1)
    found = outcome(tiny(NumberedForCausalLM), batches, ADAMW, compile=True)
    require_same(found, outcome(tiny(NumberedForCausalLM), batches, ADAMW))
    assert warned(caplog) == ["compile: 3 layers (NumberedLayer) run uncompiled: its layers differ in more than 2 ways"]


def test_structures_differ_in_attributes_and_shapes_but_not_in_the_place() -> None:
    assert len(set(structure_keys(list(tiny().layers)))) == 1
    layers = list(tiny().layers)
    layers[1].scale = 2.0  # type: ignore[assignment]
    layers[2].up = torch.nn.Linear(tm.WIDTH, 3 * tm.WIDTH)
    assert len(set(structure_keys(layers))) == 3
    frozen = list(tiny().layers)
    frozen[0].up.requires_grad_(False)
    assert len(set(structure_keys(frozen))) == 2


def test_tiles_and_compile_together(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    use(monkeypatch, "eager")
    batches = batches_for(build("llama"), steps=1)
    found = outcome(build("llama", layers=2), batches, ADAMW, compile=True, tile_tokens=48)
    require_same(found, outcome(build("llama", layers=2), batches, ADAMW, tile_tokens=48))
    (warning,) = warned(caplog)
    assert "because of graph breaks" in warning


@pytest.mark.parametrize("depth", [0, 2])
def test_kept_graphs_and_compile_together(
    depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer slots than layers, weights lie in another slot by backward."""
    use(monkeypatch, "aot_eager")
    batches = batches_for(tiny(), steps=2)
    options: dict[str, Any] = {"kept_graphs": 99, "prefetch_depth": depth, "micro_batch_size": 3}
    found = outcome(tiny(), batches, ADAMW, compile=True, **options)
    require_same(found, outcome(tiny(), batches, ADAMW, **options))
    assert warned(caplog) == []
