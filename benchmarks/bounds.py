"""Which resource a step's length follows from: the arithmetic of streaming, without running it.

Note: the model of a step
    Forward needs 2·N·T FLOP (and attention's), 2·N bytes of weights in, and the host's AdamW of the step before.
    Backward needs three times the FLOP (recompute included), 2·N bytes in and 2·N bytes of gradients out. All of a
    pass overlaps, so a pass takes as long as its slowest resource; a step takes both passes. N are the parameters
    of layers and shell, T the tokens of an optimizer step. The last few layers' second load is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = 2  # bfloat16 is what streams


@dataclass(frozen=True)
class Rates:
    """What the machine was measured to do: flops and the two directions while all are busy, AdamW alone."""

    flops_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    adamw_parameters_per_s: float


@dataclass(frozen=True)
class Prediction:
    """forward and backward: seconds that each resource needs in that pass."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def step_s(self) -> float:
        return max(self.forward.values()) + max(self.backward.values())

    @property
    def bound(self) -> str:
        """The resource, or one for each pass where they differ."""
        names = {"forward": _slowest(self.forward), "backward": _slowest(self.backward)}
        if names["forward"] == names["backward"]:
            return names["forward"]
        return ", ".join(f"{name} in {phase}" for phase, name in names.items())


def _slowest(seconds: dict[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name])


def predict(parameters: int, model_flops: float, rates: Rates, *, weight_bytes: int = WEIGHT_BYTES) -> Prediction:
    """The step of a model whose arithmetic needs `model_flops` (recompute not counted) per step."""
    forward_flops = model_flops / 3
    return Prediction(
        forward={
            "compute": forward_flops / rates.flops_per_s,
            "weights in": weight_bytes * parameters / rates.h2d_bytes_per_s,
            "optimizer": parameters / rates.adamw_parameters_per_s,
        },
        backward={
            "compute": 3 * forward_flops / rates.flops_per_s,
            "weights in": weight_bytes * parameters / rates.h2d_bytes_per_s,
            "gradients out": weight_bytes * parameters / rates.d2h_bytes_per_s,
        },
    )
