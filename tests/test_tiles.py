"""MLPs over tiles of tokens: the same training within rounding, in a fraction of the memory, or a refusal by name."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny_models as tm
import torch
from families import build
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from pairs import Outcome, batches_for, engine_config, gap, outcome, require_same
from test_tail import watched_tails, without_tails
from tiny_models import tiny
from torch import Tensor, nn

from megatrain import AdamWConfig, StreamingEngine
from megatrain import anatomy as parts
from megatrain.anatomy import tiles
from megatrain.anatomy.structure import UnsupportedModelError
from megatrain.plan import needs

ADAMW = AdamWConfig(lr=1e-3)
TILE = 20  # of 144 tokens, or of 48 in a micro-batch: the last tile is smaller
LONG = 4096


def require_close(found: Outcome, expected: Outcome, tolerance: float) -> None:
    pairs = [*zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)]
    assert max(abs(a - b) / b for a, b in pairs) < tolerance
    assert gap(found.state, expected.state) < tolerance


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "mixtral", "bamba"])
def test_training_is_the_same_within_rounding(family: str, rows: int | None) -> None:
    model = build(family)
    batches = batches_for(model)
    expected = outcome(build(family), batches, ADAMW, micro_batch_size=rows)
    require_close(outcome(model, batches, ADAMW, micro_batch_size=rows, tile_tokens=TILE), expected, 2e-6)


def test_in_bfloat16_weight_gradients_are_rounded_once() -> None:
    """Tiles of 4 are summed as exactly as whole products are: in float32."""
    model = build("llama")
    batches = batches_for(model)
    expected = outcome(build("llama"), batches, ADAMW, dtype="bfloat16")
    found = outcome(model, batches, ADAMW, dtype="bfloat16", tile_tokens=4)
    require_close(found, expected, 2e-3)


def test_a_tile_that_holds_everything_changes_no_bit() -> None:
    model = build("llama")
    batches = batches_for(model)
    require_same(outcome(model, batches, ADAMW, tile_tokens=10_000), outcome(build("llama"), batches, ADAMW))


def test_what_tiles_give_is_left_out_of_a_recompute_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_for(build("llama"))
    with monkeypatch.context() as watched:
        tails = watched_tails(watched)
        found = outcome(build("llama"), batches, ADAMW, tile_tokens=48)
    assert [tail.left_out for tail in tails] == [["aten.mm.default"] * 3 * 3] * len(tails)  # three tiles
    without_tails(monkeypatch)
    require_same(found, outcome(build("llama"), batches, ADAMW, tile_tokens=48))


@pytest.mark.parametrize("depth", [0, 2])
def test_kept_graphs_find_their_weights_where_they_lie_by_then(depth: int) -> None:
    batches = batches_for(build("llama"))
    options: dict[str, Any] = {"tile_tokens": TILE, "prefetch_depth": depth, "micro_batch_size": 2}
    expected = outcome(build("llama"), batches, ADAMW, **options)
    require_same(outcome(build("llama"), batches, ADAMW, kept_graphs=99, **options), expected)


def test_kept_attention_beside_tiles() -> None:
    batches = batches_for(build("llama"))
    expected = outcome(build("llama"), batches, ADAMW, tile_tokens=TILE)
    require_close(outcome(build("llama"), batches, ADAMW, tile_tokens=TILE, keep_attention=True), expected, 2e-6)


def test_frozen_parts_get_no_gradient() -> None:
    def model() -> Any:
        made = build("llama")
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("up_proj" in name or "layers.2" in name)
        return made

    batches = batches_for(model())
    require_close(outcome(model(), batches, ADAMW, tile_tokens=TILE), outcome(model(), batches, ADAMW), 2e-6)


def test_the_model_is_itself_again() -> None:
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    with StreamingEngine(model, engine_config(tile_tokens=4), ADAMW) as engine:
        engine.step(batches_for(model)[0])
        assert [type(layer.mlp).__name__ for layer in engine._anatomy.layers] == ["TiledLlamaMLP"] * 4
    assert [type(module) for module in model.modules()] == kinds


def test_scores_are_the_same_within_rounding() -> None:
    batch = batches_for(build("llama"))[0]
    found = []
    for tokens in (None, 8):
        with StreamingEngine(build("llama"), engine_config(tile_tokens=tokens), ADAMW) as engine:
            found.append(engine.scores(batch))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@given(tokens=st.integers(1, 40), rows=st.integers(1, 3), length=st.integers(1, 12), trained=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_tile_gives_output_and_gradients_of_the_whole(tokens: int, rows: int, length: int, trained: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 3)).double()

    layer = Layer()
    layer.mlp[0].requires_grad_(trained)
    hidden = torch.randn(rows, length, 3, dtype=torch.float64, requires_grad=True)

    def results() -> list[Tensor]:
        output: Tensor = layer.mlp(hidden)
        wanted = [p for p in layer.parameters() if p.requires_grad]
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [hidden, *wanted])]

    expected = results()
    with tiles.tiled([layer], tokens):
        found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---- memory ----


def wide(dtype: torch.dtype) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 512, "vocab_size": 128, "max_position_embeddings": 2 * LONG}
    return build("llama", layers=2, **sizes, **heads).to(dtype)


def peak_bytes(anatomy: parts.Anatomy, tokens: int) -> int:
    """Of the backward pass of layer 1 over one long sequence; tokens: of a tile."""
    unit = anatomy.units[1]
    tensors = unit.with_aliases({name: t.detach() for name, t in (unit.parameters | unit.buffers).items()})
    with anatomy.hollow(), tiles.tiled(anatomy.layers, tokens):
        tape = anatomy.record({"input_ids": torch.zeros(1, LONG, dtype=torch.int64)})
        hidden = torch.randn_like(tape.hidden)
        with LiveBytes() as count:
            graph = parts.Graph(anatomy.layers[1], tensors, frozenset(unit.parameters), tape, 1, hidden)
            graph.backward(hidden, lambda name, gradient: None)
    return count.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_sequence_takes_a_fraction_of_the_memory_and_the_plan_knows(dtype: torch.dtype) -> None:
    anatomy = parts.Anatomy(wide(dtype))
    parts.check(anatomy)
    peaks, estimates = {}, {}
    for tokens in (LONG, 256):
        config = engine_config(dtype=str(dtype).removeprefix("torch."), tile_tokens=tokens)
        subject = needs.Subject.of(anatomy.model, config, batch=1, sequence=LONG)
        estimates[tokens] = needs.needs_of(subject, config, None).workspace.layer
        peaks[tokens] = peak_bytes(anatomy, tokens)
    assert peaks[256] < 0.35 * peaks[LONG]
    for tokens, peak in peaks.items():
        assert 0.7 < estimates[tokens] / peak < 1.35


# ---- refusals ----


def refused(model: Any) -> pytest.ExceptionInfo[UnsupportedModelError]:
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError) as error:
        StreamingEngine(model, engine_config(tile_tokens=4), ADAMW)
    assert [type(module) for module in model.modules()] == kinds
    return error


def test_a_layer_without_a_known_part_is_refused() -> None:
    assert refused(build("opt")).match(
        r"OPTForCausalLM has no token-wise part by a known name: model.decoder.layers.0 consists of self_attn, .*fc1, "
        r"fc2.*\. Leave tile_tokens out"
    )


def test_a_part_that_returns_more_is_refused() -> None:
    assert refused(build("gpt_oss")).match(r"GptOssForCausalLM cannot run over tiles .*GptOssMLP returns more than a")


def test_router_logits_are_refused() -> None:
    model = build("qwen3_moe", output_router_logits=True)
    assert refused(model).match(r"Qwen3MoeForCausalLM collects router_logits .*output_router_logits=False")


def test_dropout_within_the_part_is_refused() -> None:
    assert refused(build("gpt2", resid_pdrop=0.3)).match(
        r"cannot run over tiles of tokens \(tile_tokens\): the gradient"
    )


class MixingPart(nn.Module):
    """Bears the name and mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(tm.WIDTH, tm.WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.up(hidden).cumsum(dim=1)
        return made


class MixingLayer(tm.TinyLayer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mlp = MixingPart()

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden) + self.mlp(hidden)


class MixingForCausalLM(tm.TinyForCausalLM):
    layer_class = MixingLayer


def test_a_part_that_only_bears_the_name_is_refused() -> None:
    assert refused(tiny(MixingForCausalLM)).match(r"cannot run over tiles of tokens \(tile_tokens\): its loss is")


def test_names_of_tensors_say_whether_they_are_in_it() -> None:
    model = families.build("llama")
    inside = [name for name, _ in model.model.layers[0].named_parameters() if parts.is_tileable(name)]
    assert inside == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
