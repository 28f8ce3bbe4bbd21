"""Proves that a list of operations is safe, from the operations and their waits alone.

What is known to have happened before an operation is: everything earlier on its own lane, everything it
waits for, and whatever happened before those (vector clocks, Fidge 1988 and Mattern 1989). An operation
list is safe if every read happens after the write it means, and every write after the last write and after
all reads of what it overwrites. What was used up (a gradient applied, an input consumed) or has changed elsewhere
(weights and optimizer state, on the host or on the device) must be put there again before it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatrain.schedule import SHELL, Kind, Op

Resource = tuple[object, ...]

SPENT = "what is spent"  # content that no read expects


class HazardError(AssertionError):
    """An operation may read too early, overwrite too early, or read what was never put there."""


@dataclass(frozen=True)
class Access:
    """One read or write of a resource; `content` is what a read must find or what a write leaves."""

    resource: Resource
    content: object
    write: bool = False


@dataclass
class _Resource:
    content: object = None
    writer: Op | None = None
    readers: list[Op] = field(default_factory=list)


def _gradient_on_host(op: Op) -> Resource:
    return ("slab", op.slab) if op.slab is not None else ("host gradient", op.layer)


def accesses(op: Op) -> Iterator[Access]:
    """What an operation reads and writes, reads first."""
    layer, mb, weights = op.layer, op.micro_batch, ("weights", op.layer)
    slot, buffer, state = ("slot", op.slot), ("gradient buffer", op.buffer), ("optimizer buffer", op.state)
    saved, kept, graph = ("input", layer, mb), ("host input", layer, mb), ("graph", layer, mb)
    match op.kind:
        case Kind.ADD | Kind.REMOVE:
            made = slot if op.slot is not None else buffer if op.buffer is not None else state
            yield Access(made, op.kind, write=True)
        case Kind.LOAD if layer is SHELL:
            yield Access(("host weights", SHELL), None)
            yield Access(("shell",), weights, write=True)
        case Kind.LOAD:
            yield Access(("host weights", layer), None)
            yield Access(slot, weights, write=True)
        case Kind.RECORD:
            yield Access(("shell",), weights)
            yield Access(("input", 0, mb), "device", write=True)
        case Kind.FORWARD:
            yield Access(slot, weights)
            yield Access(saved, "device")
            if op.graph:
                yield Access(saved, SPENT, write=True)
                yield Access(graph, "kept", write=True)
            yield Access(("input", (layer or 0) + 1, mb), "device", write=True)
        case Kind.OFFLOAD:
            yield Access(saved, "device")
            yield Access(kept, "host", write=True)
        case Kind.FETCH:
            yield Access(kept, "host")
            yield Access(kept, SPENT, write=True)
            yield Access(saved, "device", write=True)
        case Kind.SCORE:
            yield Access(("shell",), weights)
        case Kind.HEAD:
            yield Access(("shell",), weights)
            yield Access(("shell gradient",), "parts", write=True)
        case Kind.BACKWARD if layer is SHELL:
            yield Access(("shell",), weights)
            yield Access(("shell gradient",), "parts", write=True)
        case Kind.BACKWARD:
            yield Access(slot, weights)
            used, as_kept = (graph, "kept") if op.graph else (saved, "device")
            yield Access(used, as_kept)
            yield Access(used, SPENT, write=True)
            if op.buffer is not None:
                yield Access(buffer, layer, write=True)
        case Kind.NORM:
            yield Access(("shell gradient",), SHELL, write=True)
        case Kind.UNLOAD:
            gradient = ("shell gradient",) if layer is SHELL else buffer
            yield Access(gradient, layer)
            yield Access(gradient, SPENT, write=True)
            yield Access(_gradient_on_host(op), layer, write=True)
        case Kind.UPDATE:
            yield Access(_gradient_on_host(op), layer)
            yield Access(_gradient_on_host(op), SPENT, write=True)
            yield Access(("host weights", layer), None, write=True)
        case Kind.LOAD_STATE:
            yield Access(("host state", layer), None)
            yield Access(state, ("state", layer), write=True)
        case Kind.ADAMW:
            yield Access(buffer, layer)
            yield Access(buffer, SPENT, write=True)
            yield Access(slot, weights)
            yield Access(slot, weights, write=True)
            yield Access(state, ("state", layer))
            yield Access(state, ("new state", layer), write=True)
        case Kind.STORE:
            yield Access(slot, weights)
            yield Access(state, ("new state", layer))
            yield Access(state, SPENT, write=True)
            yield Access(("host weights", layer), None, write=True)
            yield Access(("host state", layer), None, write=True)


def check(ops: Iterable[Op]) -> int:
    """Raise HazardError at the first unsafe operation; return how many were checked."""
    clocks: dict[int, dict[str, int]] = {}
    lanes: dict[str, dict[str, int]] = {}
    resources: dict[Resource, _Resource] = {}
    for op in ops:
        clock = _clock(op, clocks, lanes)
        for access in accesses(op):
            apply = _write if access.write else _read
            apply(op, access, resources.setdefault(access.resource, _Resource()), clock)
        if op.kind is Kind.ADAMW:
            _outdate_host(op, resources)
        if op.kind is Kind.UPDATE:
            _outdate(("weights", op.layer), resources.values())
    return len(clocks)


def _outdate(weights: object, resources: Iterable[_Resource]) -> None:
    """Weights have changed on the host: copies of them on the device are of no more use."""
    for resource in resources:
        if resource.content == weights:
            resource.content = SPENT


def _outdate_host(op: Op, resources: dict[Resource, _Resource]) -> None:
    """The device holds newer weights and state of a layer than the host, until they are stored there."""
    for role in ("host weights", "host state"):
        resources.setdefault((role, op.layer), _Resource()).content = SPENT


def _clock(op: Op, clocks: dict[int, dict[str, int]], lanes: dict[str, dict[str, int]]) -> dict[str, int]:
    """The latest operation of every lane that is known to be complete when `op` begins, `op` included."""
    clock = dict(lanes.get(op.lane, {}))
    for number in op.waits:
        if number not in clocks:
            raise HazardError(f"{op} waits for operation {number}, which was not issued before it: deadlock")
    # The engine makes and gives back buffers itself, between issuing what comes before and after.
    for known in (lanes.get("engine", {}), *(clocks[number] for number in op.waits)):
        for lane, latest in known.items():
            clock[lane] = max(clock.get(lane, -1), latest)
    clock[op.lane] = op.number
    clocks[op.number] = lanes[op.lane] = clock
    return clock


def _read(op: Op, access: Access, resource: _Resource, clock: dict[str, int]) -> None:
    if resource.writer is not None:
        _require_before(op, resource.writer, clock, f"its read of {access.resource}")
    if resource.content != access.content:
        raise HazardError(f"{op}: {access.resource} holds {resource.content!r}, not {access.content!r}")
    resource.readers.append(op)


def _write(op: Op, access: Access, resource: _Resource, clock: dict[str, int]) -> None:
    comes_and_goes = access.resource[0] in ("slot", "gradient buffer", "optimizer buffer")
    if comes_and_goes and op.kind is not Kind.ADD and resource.content in (None, Kind.REMOVE):
        raise HazardError(f"{op}: there is no {access.resource}")
    for other in (resource.writer, *resource.readers):
        if other is not None:
            _require_before(op, other, clock, f"its write to {access.resource}")
    resource.content, resource.writer, resource.readers = access.content, op, []


def _require_before(op: Op, other: Op, clock: dict[str, int], what: str) -> None:
    if other is not op and clock.get(other.lane, -1) < other.number:
        raise HazardError(f"{op}: {what} may run before «{other}» is complete")
