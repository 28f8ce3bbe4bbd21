"""Does it fit, and if not, what to change: every piece of advice is tried out and comes with its figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config import EngineConfig
from megatrain.machine import Machine
from megatrain.plan.needs import Needs, Subject, needs_of, one_tier

# What saves memory, most harmless first.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("resident_layers", 0),
    ("kept_graphs", 0),
    ("keep_attention", False),
    ("loss_chunk_tokens", 128),
    ("micro_batch_size", 1),
    ("grad_buffers", 1),
    ("prefetch_depth", 0),
    ("offload_activations", True),
    ("optimizer_device", "host"),
    ("optimizer_overlap", "backward"),
    ("moments_dtype", "bfloat16"),
)


@dataclass(frozen=True)
class Limit:
    """Something that can run out. of: its bytes in a run's needs. more: the way out when no setting helps."""

    what: str
    of: Callable[[Needs], int]
    free_bytes: int
    more: str


@dataclass(frozen=True)
class Advice:
    """Settings that lower a need, each with the bytes it saves alone, and what all of them together leave."""

    savings: dict[str, int]
    least_bytes: int


def problems(subject: Subject, config: EngineConfig, machine: Machine | None, needs: Needs) -> list[str]:
    """One sentence for everything that runs out: how much is needed, how much there is, and what to change."""
    found = []
    if machine is not None and _lacks_gpu(config, machine):
        found.append(f'device="cuda", but {machine.name} has no GPU that torch can use; choose "auto" or "cpu"')
    for limit in exceeded(config, machine, needs):
        found.append(_sentence(limit, limit.of(needs), advice(subject, config, machine, needs, limit.of)))
    return found


def fits(config: EngineConfig, machine: Machine | None, needs: Needs) -> bool:
    """Whether there are no `problems`, without looking for a way out of them, which takes a dozen further plans."""
    return not (_lacks_gpu(config, machine) or exceeded(config, machine, needs))


def exceeded(config: EngineConfig, machine: Machine | None, needs: Needs) -> list[Limit]:
    """What runs out of bytes."""
    return [limit for limit in limits(config, machine) if limit.of(needs) > limit.free_bytes]


def _lacks_gpu(config: EngineConfig, machine: Machine | None) -> bool:
    return config.device == "cuda" and machine is not None and machine.gpu is None


def tiers(config: EngineConfig, machine: Machine | None) -> dict[str, Callable[[Needs], int]]:
    """What is needed of each tier. Where the device works in the host's memory, its bytes are RAM."""
    if one_tier(config, machine):
        return {"RAM": lambda needs: needs.host_bytes + needs.device_bytes}
    return {"RAM": lambda needs: needs.host_bytes, "device memory": lambda needs: needs.device_bytes}


def limits(config: EngineConfig, machine: Machine | None) -> list[Limit]:
    """What a run must stay below."""
    needed, found = tiers(config, machine), []
    if machine is not None:
        free = {"RAM": machine.host_available_bytes, "device memory": machine.device_free_bytes}
        found = [Limit(tier, of, free[tier], f"more {tier}") for tier, of in needed.items()]
    if config.device_memory_bytes is not None:
        of = needed.get("device memory", lambda needs: needs.held_bytes)  # on a CPU kernels work outside the arena
        found.append(Limit("device_memory_bytes", of, config.device_memory_bytes, "a larger device_memory_bytes"))
    return found


def advice(
    subject: Subject, config: EngineConfig, machine: Machine | None, needs: Needs, of: Callable[[Needs], int]
) -> Advice:
    """Try every change, alone and together; what the configuration left to "auto" stays as it was settled."""
    settled = replace(
        config,
        offload_activations=needs.offload,
        resident_layers=needs.knobs.resident_layers,
        kept_graphs=needs.kept_graphs,
        keep_attention=needs.choice.keep_attention,
    )

    def needed(changes: dict[str, Any]) -> int:
        return of(needs_of(subject, replace(settled, **changes), machine))

    alone = {name: of(needs) - needed({name: value}) for name, value in CHANGES}
    useful = {name: value for name, value in CHANGES if alone[name] > 0}
    return Advice({_setting(name, value): alone[name] for name, value in useful.items()}, needed(useful))


def _setting(name: str, value: Any) -> str:
    setting = f"{name}={value!r}".replace("'", '"')
    return f"{setting} (and max_grad_norm=None)" if name == "optimizer_overlap" else setting


def _sentence(limit: Limit, needed: int, found: Advice) -> str:
    text = f"{limit.what}: {gb(needed)} needed, {gb(limit.free_bytes)} free"
    otherwise = f"a smaller model, a smaller or shorter batch, or {limit.more}"
    if not found.savings:
        return f"{text}; take {otherwise}"
    changes = ", ".join(f"{setting} saves {gb(saved)}" for setting, saved in found.savings.items())
    enough = found.least_bytes <= limit.free_bytes
    return f"{text}; {changes}; all of it leaves {gb(found.least_bytes)}" + ("" if enough else f": take {otherwise}")


def gb(nbytes: int) -> str:
    """Decimal gigabytes; what is small keeps its digits."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
