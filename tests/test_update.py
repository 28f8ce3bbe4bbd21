"""AdamW over a layer's flat arrays equals torch.optim.AdamW over its parameters, also where some get no gradient."""

from __future__ import annotations

import pytest
import torch

from megatrain.config import AdamWConfig
from megatrain.host import HostLayer, HostShape, HostStore
from megatrain.layout import Layout, TensorSpec
from megatrain.optim import join, split
from megatrain.update import Hyperparameters, bytes_touched, update_layer

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = AdamWConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
NAN_BYTE = 0xFF

SHAPES: dict[str, tuple[int, ...]] = {"proj": (5, 7), "expert": (3, 11), "up": (130,), "norm": (7,), "bias": (3,)}
DECAYED = {"proj", "expert", "up"}

# Which parameters get a gradient in each of four steps: an expert may be chosen late, or not again.
STEPS = [
    {"proj", "up", "norm", "bias"},
    {"proj", "expert", "up", "norm", "bias"},
    {"proj", "norm"},
    {"proj", "expert", "up", "norm", "bias"},
]


def layout(dtypes: dict[str, torch.dtype]) -> Layout:
    specs = [TensorSpec(name, SHAPES[name], dtypes[name], True, name in DECAYED) for name in SHAPES]
    return Layout.of([*specs, TensorSpec("frozen", (9,), BF16)])


def host_layer(places: Layout, masters: dict[str, torch.Tensor], *, split_master: bool) -> HostLayer:
    shape = HostShape(split=split_master, moment_bytes=4, keep_gradients=True, slabs=1)
    kept = HostStore([places], Layout.of([]), shape, pin=False).layers[0]
    for entry in places.trained:
        target, master = entry.view(kept.weights), masters[entry.name]
        if kept.low is not None and entry.spec.dtype == BF16:
            low = kept.low[entry.element : entry.element + entry.spec.numel]
            split(master.reshape(-1).contiguous(), target.view(-1), low)
        else:
            target.copy_(master)
    return kept


def master(kept: HostLayer, name: str) -> torch.Tensor:
    entry = next(entry for entry in kept.layout.trained if entry.name == name)
    weights = entry.view(kept.weights)
    if kept.low is None or entry.spec.dtype != BF16:
        return weights.clone()
    low = kept.low[entry.element : entry.element + entry.spec.numel]
    return join(weights.reshape(-1), low).view(entry.spec.shape)


def packed(places: Layout, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """NaN wherever no gradient was: reading there would show."""
    flat = torch.full((places.trained_nbytes,), NAN_BYTE, dtype=torch.uint8)
    for name, gradient in gradients.items():
        places.gradient_views(flat)[name].copy_(gradient)
    return flat


def torch_adamw(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": [p for name, p in parameters.items() if name in DECAYED], "weight_decay": CONFIG.weight_decay},
        {"params": [p for name, p in parameters.items() if name not in DECAYED], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, CONFIG.lr, CONFIG.betas, CONFIG.eps, foreach=False, fused=False)


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(dict.fromkeys(SHAPES, F32), id="float32"),
        pytest.param(dict.fromkeys(SHAPES, BF16), id="bfloat16"),
        pytest.param(dict.fromkeys(SHAPES, BF16) | {"norm": F32, "expert": F32}, id="mixed"),
    ],
)
def test_equals_torch_where_some_parameters_get_no_gradient(dtypes: dict[str, torch.dtype], grad_scale: float) -> None:
    """Every bit of the fp32 master over four steps: bias correction counts per parameter, decay waits with it."""
    places = layout(dtypes)
    masters = random_tensors(0)
    kept = host_layer(places, masters, split_master=BF16 in dtypes.values())
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in masters.items()}
    adamw = torch_adamw(parameters)
    for step, present in enumerate(STEPS):
        gradients = {name: g.to(dtypes[name]) for name, g in random_tensors(step + 1).items() if name in present}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].float() * grad_scale if name in present else None
        adamw.step()
        update_layer(kept, packed(places, gradients), present, Hyperparameters(CONFIG, CONFIG.lr, grad_scale))
        for name, parameter in parameters.items():
            assert torch.equal(master(kept, name), parameter.detach()), (step, name)
    assert kept.steps == {"proj": 4, "expert": 2, "up": 3, "norm": 4, "bias": 3}


def test_streamed_weights_are_the_rounded_master() -> None:
    places = layout(dict.fromkeys(SHAPES, BF16))
    kept = host_layer(places, random_tensors(0), split_master=True)
    gradients = random_tensors(1)
    update_layer(kept, packed(places, gradients), set(SHAPES), Hyperparameters(CONFIG, CONFIG.lr, 1.0))
    for entry in places.trained:
        streamed, exact = entry.view(kept.weights), master(kept, entry.name)
        assert ((streamed.float() - exact).abs() <= exact.abs() * 2**-8).all()
        assert not torch.equal(streamed.float(), exact)  # or the master would hold no more than the weights


def test_without_gradients_nothing_changes() -> None:
    places = layout(dict.fromkeys(SHAPES, BF16))
    kept = host_layer(places, random_tensors(0), split_master=True)
    arrays = (kept.weights, kept.low, kept.exp_avg, kept.exp_avg_sq)
    before = [array.clone() for array in arrays if array is not None]
    update_layer(kept, packed(places, {}), set(), Hyperparameters(CONFIG, CONFIG.lr, 1.0))
    after = [array for array in arrays if array is not None]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert kept.steps == {}


def test_frozen_tensors_behind_the_trained_are_untouched() -> None:
    places = layout(dict.fromkeys(SHAPES, F32))
    kept = host_layer(places, random_tensors(0), split_master=False)
    frozen = places.views(kept.weights)["frozen"]
    frozen.copy_(torch.arange(9))
    update_layer(kept, packed(places, random_tensors(1)), set(SHAPES), Hyperparameters(CONFIG, CONFIG.lr, 1.0))
    assert frozen.tolist() == list(range(9))


def test_the_numbers_of_a_step() -> None:
    numbers = Hyperparameters(CONFIG, lr=0.5, grad_scale=0.25)
    decayed, other = numbers.at(3, decay=True), numbers.at(1, decay=False)
    assert (decayed.lr, decayed.beta1, decayed.beta2, decayed.eps) == (0.5, 0.9, 0.95, 1e-6)
    assert (decayed.weight_decay, decayed.step, decayed.grad_scale) == (0.1, 3, 0.25)
    assert (other.weight_decay, other.step) == (0.0, 1)


def test_a_schedule_of_learning_rates_is_followed() -> None:
    places = layout(dict.fromkeys(SHAPES, F32))
    masters = random_tensors(0)
    kept = host_layer(places, masters, split_master=False)
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in masters.items()}
    adamw = torch_adamw(parameters)
    for step, lr in enumerate([1e-3, 5e-2, 0.0]):
        gradients = random_tensors(step + 1)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        update_layer(kept, packed(places, gradients), set(SHAPES), Hyperparameters(CONFIG, lr, 1.0))
    assert all(torch.equal(master(kept, name), parameter.detach()) for name, parameter in parameters.items())


@pytest.mark.parametrize(
    ("dtype", "split_master", "moment_bytes", "expected"),
    [
        (BF16, True, 4, 2 + 2 + 2 + 2 + 2 + 8 + 8),  # weight and low half in and out, gradient in, moments in and out
        (BF16, True, 2, 2 + 2 + 2 + 2 + 2 + 4 + 4),
        (F32, True, 4, 4 + 4 + 4 + 8 + 8),  # float32 parameters have no lower half
        (F32, False, 4, 4 + 4 + 4 + 8 + 8),
    ],
)
def test_bytes_touched_per_parameter(dtype: torch.dtype, split_master: bool, moment_bytes: int, expected: int) -> None:
    entries = Layout.of([TensorSpec("w", (1024,), dtype, trained=True)]).entries
    assert bytes_touched(entries, split=split_master, moment_bytes=moment_bytes) == 1024 * expected
