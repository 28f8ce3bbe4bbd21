"""Small decoder-only models of our own: one that can be streamed, and variations that break one rule each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

WIDTH, VOCAB = 16, 31


class TinyConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "tiny_for_tests"

    def __init__(self, num_hidden_layers: int = 3, pad_token_id: int = 0, **kwargs: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = WIDTH
        self.vocab_size = VOCAB
        super().__init__(pad_token_id=pad_token_id, **kwargs)


class TinyLayer(nn.Module):
    """Mixes each position with the mean of those before it (causal), then a small MLP."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        counts = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)[:, None]
        means = self.mix(self.norm(hidden)).cumsum(dim=1) / counts
        return hidden + self.down(torch.tanh(self.up(hidden + means)))


class TinyForCausalLM(PreTrainedModel):  # type: ignore[misc]
    """The model that can be streamed; subclasses change the layers or how they are called."""

    config_class = TinyConfig
    layer_class: type[nn.Module] = TinyLayer
    layers: Any
    norm: Any

    def __init__(self, config: TinyConfig | None = None) -> None:
        super().__init__(config or TinyConfig())
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.layer_class(i) for i in range(self.config.num_hidden_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.add_more()
        self.post_init()

    def add_more(self) -> None:
        """Further modules of a variation."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        labels = kwargs.pop("labels", None)
        logits = self.head(self.norm(self.run_layers(self.embed(input_ids), input_ids)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=VOCAB, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def tiny(model_class: type[TinyForCausalLM] = TinyForCausalLM, layers: int = 3) -> TinyForCausalLM:
    """A seeded model in training mode; every bias and norm away from its initial value."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(TinyConfig(num_hidden_layers=layers))
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.train()
    return model


# ---- streamable, with something special ----


class BiasedLayer(TinyLayer):
    def forward(self, hidden: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, **kwargs: Any) -> Any:
        assert bias is not None
        assert scale is not None
        mixed = torch.softmax(bias[: hidden.shape[1], : hidden.shape[1]], dim=-1) @ hidden
        result: Tensor = super().forward(hidden) + (self.index + 1) * scale * mixed
        return result


class SharedBiasForCausalLM(TinyForCausalLM):
    """The shell computes a learned relative-position bias and hands it to every layer."""

    layer_class = BiasedLayer

    def add_more(self) -> None:
        self.relative = nn.Embedding(8, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        distance = positions[:, None] - positions[None, :]
        bias = self.relative(distance.clamp(0, 7))[..., 0].masked_fill(distance < 0, float("-inf"))
        for layer in self.layers:
            hidden = layer(hidden, bias=bias, scale=self.scale)
        return hidden


class SometimesLayer(TinyLayer):
    """`sometimes` is used in sequences of even length only; `never` is not used at all."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.a_never = nn.Parameter(torch.ones(5))  # the first in the layer: all others follow it
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        result: Tensor = super().forward(hidden)
        return result + self.sometimes(hidden) if hidden.shape[1] % 2 == 0 else result


class SometimesForCausalLM(TinyForCausalLM):
    """Parameters of layers and shell that get a gradient in some steps only."""

    layer_class = SometimesLayer

    def add_more(self) -> None:
        self.even = nn.Parameter(torch.ones(WIDTH))

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return super().run_layers(hidden * self.even if ids.shape[1] % 2 == 0 else hidden, ids)


class OwnBuffersLayer(TinyLayer):
    shift: Tensor
    gate: Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) * (index + 1))
        self.register_buffer("gate", torch.arange(WIDTH) % (index + 2) == 0, persistent=False)
        self.constant = torch.full((WIDTH,), 0.1 * index)  # a plain attribute, which no state_dict holds

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden + torch.where(self.gate, self.shift, self.constant))


class OwnBuffersForCausalLM(TinyForCausalLM):
    """Every layer has buffers and constants of its own."""

    layer_class = OwnBuffersLayer


class TiedForCausalLM(TinyForCausalLM):
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012 - as transformers declares it

    def add_more(self) -> None:
        self.head.weight = self.embed.weight


class DroppingLayer(TinyLayer):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        dropped = nn.functional.dropout(hidden, 0.3, self.training)
        return nn.functional.dropout(super().forward(dropped), 0.2, self.training)


class DroppingForCausalLM(TinyForCausalLM):
    """Dropout on the embeddings and twice in every layer."""

    layer_class = DroppingLayer

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return super().run_layers(nn.functional.dropout(hidden, 0.1, self.training), ids)


class OwnForwardForCausalLM(TinyForCausalLM):
    """Its forward cannot be told how its loss is normalised."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, use_cache: bool = False
    ) -> CausalLMOutput:
        return super().forward(input_ids, attention_mask, labels=labels)


# ---- not streamable ----


class ReadsNeighbourLayer(TinyLayer):
    before: tuple[Any, ...] = ()  # a tuple, so that torch does not register the module in it

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        self.last = super().forward(hidden)
        return self.last + self.before[0].last if self.before else self.last


class ReadsNeighbourForCausalLM(TinyForCausalLM):
    """Each layer reads the output that the layer before it keeps as an attribute."""

    layer_class = ReadsNeighbourLayer

    def add_more(self) -> None:
        for layer, before in zip(self.layers[1:], self.layers[:-1], strict=True):
            layer.before = (before,)


class ReadsNeighbourWithoutGradientLayer(ReadsNeighbourLayer):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        result = super().forward(hidden)
        self.last = self.last.detach()
        return result


class ReadsNeighbourWithoutGradientForCausalLM(ReadsNeighbourForCausalLM):
    layer_class = ReadsNeighbourWithoutGradientLayer


class NotesLayer(TinyLayer):
    def forward(self, hidden: Tensor, notes: dict[int, Tensor] | None = None, **kwargs: Any) -> Any:
        assert notes is not None
        result: Tensor = super().forward(hidden) + notes.get(self.index - 1, torch.zeros(()))
        notes[self.index] = result
        return result


class NotesForCausalLM(TinyForCausalLM):
    """Layers hand results on through a dictionary in their keyword arguments."""

    layer_class = NotesLayer

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        notes: dict[int, Tensor] = {}
        for layer in self.layers:
            hidden = layer(hidden, notes=notes)
        return hidden


class TwoOutputsLayer(TinyLayer):
    def forward(self, hidden: Tensor, more: Tensor | None = None, **kwargs: Any) -> Any:
        result = super().forward(hidden if more is None else hidden + more)
        return result, 2 * hidden


class TwoOutputsForCausalLM(TinyForCausalLM):
    """Layers return a second tensor, which the next layer gets."""

    layer_class = TwoOutputsLayer

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        more = None
        for layer in self.layers:
            hidden, more = layer(hidden, more)
        return hidden


class ChangedBetweenForCausalLM(TinyForCausalLM):
    """The model itself changes the hidden state between two layers."""

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden if index != 1 else 1.5 * hidden)
        return hidden


class LayerArgumentForCausalLM(TinyForCausalLM):
    """A layer gets what the model computed from an earlier layer's output."""

    layer_class = TwoOutputsLayer

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        more = None
        for layer in self.layers:
            more, hidden = hidden, layer(hidden, more)[0]
            more = more.tanh()
        return hidden


class LoopedForCausalLM(TinyForCausalLM):
    """Every layer is called twice."""

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return super().run_layers(super().run_layers(hidden, ids), ids)


class RepeatedLayerForCausalLM(TinyForCausalLM):
    """One layer is called twice."""

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return _call_all([*self.layers, self.layers[-1]], hidden)


class SkippedLayerForCausalLM(TinyForCausalLM):
    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return _call_all((self.layers[0], self.layers[2]), hidden)


class ReversedForCausalLM(TinyForCausalLM):
    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return _call_all(reversed(self.layers), hidden)


class SharedWeightForCausalLM(TinyForCausalLM):
    def add_more(self) -> None:
        self.layers[2].mix.weight = self.layers[0].mix.weight


class SharedWithShellForCausalLM(TinyForCausalLM):
    def add_more(self) -> None:
        self.norm.weight = self.layers[1].norm.weight


class BorrowsShellLayer(TinyLayer):
    shell: tuple[Any, ...] = ()

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden * self.shell[0].weight) if self.shell else super().forward(hidden)


class BorrowsShellForCausalLM(TinyForCausalLM):
    """A layer uses a parameter of the shell that is not registered in it."""

    layer_class = BorrowsShellLayer

    def add_more(self) -> None:
        self.layers[1].shell = (self.norm,)


class CountingBufferLayer(TinyLayer):
    calls: Any

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(hidden)


class CountingBufferForCausalLM(TinyForCausalLM):
    layer_class = CountingBufferLayer


class RememberingLayer(TinyLayer):
    calls: Any = 0

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(hidden * self.calls)


class RememberingForCausalLM(TinyForCausalLM):
    """A layer's result depends on how often it was called."""

    layer_class = RememberingLayer


class OverwritingLayer(TinyLayer):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden.mul_(1.5))


class OverwritingForCausalLM(TinyForCausalLM):
    """Layers write into the hidden state they are given."""

    layer_class = OverwritingLayer


class QuantizedForCausalLM(TinyForCausalLM):
    def add_more(self) -> None:
        weight = torch.ones(WIDTH, WIDTH, dtype=torch.int8)
        self.layers[1].packed = nn.Parameter(weight, requires_grad=False)


class NoListForCausalLM(TinyForCausalLM):
    def add_more(self) -> None:
        self.layers = nn.Sequential(*self.layers)

    def run_layers(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return _call_all(self.layers, hidden)


def _call_all(layers: Iterable[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden
