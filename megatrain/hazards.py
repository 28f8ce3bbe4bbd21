"""Proves that a list of operations is safe, from the operations and their waits alone.

What is known to have happened before an operation is: everything earlier on its own lane, everything it
waits for, and whatever happened before those (vector clocks, Fidge 1988 and Mattern 1989). An operation
list is safe if every read happens after the write it means, and every write after the last write and after
all reads of what it overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatrain.schedule import SHELL, Kind, Op

Resource = tuple[object, ...]


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
    layer, mb = op.layer, op.micro_batch
    slot, buffer = ("slot", op.slot), ("gradient buffer", op.buffer)
    saved, kept = ("input", layer, mb), ("host input", layer, mb)
    match op.kind:
        case Kind.ADD | Kind.REMOVE:
            yield Access(slot if op.slot is not None else buffer, op.kind, write=True)
        case Kind.LOAD if layer is SHELL:
            yield Access(("host weights", SHELL), None)
            yield Access(("shell",), SHELL, write=True)
        case Kind.LOAD:
            yield Access(("host weights", layer), None)
            yield Access(slot, layer, write=True)
        case Kind.RECORD:
            yield Access(("shell",), SHELL)
            yield Access(("input", 0, mb), "device", write=True)
        case Kind.FORWARD:
            yield Access(slot, layer)
            yield Access(saved, "device")
            yield Access(("input", (layer or 0) + 1, mb), "device", write=True)
        case Kind.OFFLOAD:
            yield Access(saved, "device")
            yield Access(kept, "host", write=True)
        case Kind.FETCH:
            yield Access(kept, "host")
            yield Access(saved, "device", write=True)
        case Kind.HEAD:
            yield Access(("shell",), SHELL)
        case Kind.BACKWARD if layer is SHELL:
            yield Access(("shell",), SHELL)
        case Kind.BACKWARD:
            yield Access(slot, layer)
            yield Access(saved, "device")
            if op.buffer is not None:
                yield Access(buffer, layer, write=True)
        case Kind.NORM:
            yield Access(("shell gradient",), SHELL, write=True)
        case Kind.UNLOAD:
            yield Access(("shell gradient",) if layer is SHELL else buffer, layer)
            yield Access(_gradient_on_host(op), layer, write=True)
        case Kind.UPDATE:
            yield Access(_gradient_on_host(op), layer)
            yield Access(("host weights", layer), None, write=True)


def check(ops: Iterable[Op]) -> int:
    """Raise HazardError at the first unsafe operation; return how many were checked."""
    clocks: dict[int, dict[str, int]] = {}
    lanes: dict[str, dict[str, int]] = {}
    resources: dict[Resource, _Resource] = {}
    for op in ops:
        clock = _clock(op, clocks, lanes)
        for access in accesses(op):
            _apply(op, access, resources.setdefault(access.resource, _Resource()), clock)
    return len(clocks)


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


def _apply(op: Op, access: Access, resource: _Resource, clock: dict[str, int]) -> None:
    def require_before(other: Op, what: str) -> None:
        if other is not op and clock.get(other.lane, -1) < other.number:
            raise HazardError(f"{op}: {what} {access.resource} may run before «{other}» is complete")

    if not access.write:
        if resource.writer is not None:
            require_before(resource.writer, "its read of")
        if resource.content != access.content:
            raise HazardError(f"{op}: {access.resource} holds {resource.content!r}, not {access.content!r}")
        resource.readers.append(op)
        return
    if resource.writer is not None:
        require_before(resource.writer, "its write to")
    for reader in resource.readers:
        require_before(reader, "its write to")
    resource.content, resource.writer, resource.readers = access.content, op, []
