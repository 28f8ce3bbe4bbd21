"""The ordered operations of a training step, as data.

`Schedule.step` yields what happens in a step and in which order it is issued; each operation names the lane
it runs on (lanes run in order) and the earlier operations it waits for. The engine executes them on a device,
a simulator can execute the same ones on a clock, and `hazards.check` proves them safe. No torch here.

Note: which slot is evicted
    The order in which layers are visited is known, so the slot whose layer is needed last is the one to reuse
    (Belady 1966). When forward turns into backward this keeps the last layers where they are: with a prefetch
    depth d and r resident layers, the last d + 1 + r layers are loaded once per step, all others twice.

Note: what of a trained layer stays
    Its trained weights are out of date once its gradient is known, its frozen ones (under adapters: nearly all) are
    not. Its slot counts as theirs from then on, and the layer comes back to it: that load brings the trained ones only.
    Where AdamW runs on the device it changes them in the slot, which so stays the newest and serves the next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from megatrain.steering import Knobs
from megatrain.trace import SlotKind


class Kind(Enum):
    """What an operation does."""

    ADD = "add"  # a device buffer comes into being
    REMOVE = "remove"  # a device buffer is given back
    LOAD = "load"  # weights of a layer, host → slot
    RECORD = "record"  # one call of the shell up to layer 0 (embeddings, masks, rotary tables)
    FORWARD = "forward"
    OFFLOAD = "offload"  # a layer's saved input, device → host
    FETCH = "fetch"  # ... and back
    SCORE = "score"  # final norm and head: the log-probability of every label, in chunks of tokens
    HEAD = "head"  # final norm, head and loss, forward and backward, in chunks of tokens
    BACKWARD = "backward"  # recompute under autograd, then its gradients
    NORM = "norm"  # global gradient norm and loss, read by the host
    UNLOAD = "unload"  # gradients of a layer, device → host
    UPDATE = "update"  # AdamW
    LOAD_STATE = "load state"  # optimizer state of a layer, host → device
    ADAMW = "adamw"  # AdamW on the device, where the gradient lies
    STORE = "store"  # what it changed, device → host: trained weights and optimizer state of a layer


LANE_OF = {
    Kind.LOAD: "h2d",
    Kind.FETCH: "h2d",
    Kind.LOAD_STATE: "h2d",
    Kind.RECORD: "compute",
    Kind.FORWARD: "compute",
    Kind.SCORE: "compute",
    Kind.HEAD: "compute",
    Kind.BACKWARD: "compute",
    Kind.NORM: "compute",
    Kind.ADAMW: "compute",
    Kind.OFFLOAD: "d2h",
    Kind.UNLOAD: "d2h",
    Kind.STORE: "d2h",
    Kind.UPDATE: "host",
    Kind.ADD: "engine",
    Kind.REMOVE: "engine",
}

SHELL = None  # the `layer` of operations on what is not a layer


@dataclass(frozen=True)
class Op:
    """One operation. `waits` are numbers of earlier operations that must be complete first.

    slot: the weights buffer read or filled; buffer: the device gradient buffer; slab: the host gradient slab;
    state: the device buffer for optimizer state.
    graph: a forward whose autograd graph is kept, or a backward that uses it.
    """

    number: int
    kind: Kind
    layer: int | None = None
    micro_batch: int | None = None
    slot: int | None = None
    buffer: int | None = None
    slab: int | None = None
    state: int | None = None
    waits: tuple[int, ...] = ()
    graph: bool = False

    @property
    def lane(self) -> str:
        return LANE_OF[self.kind]

    @property
    def place(self) -> int | None:
        """The device buffer that people are told, where there are several."""
        return next((number for number in (self.slot, self.buffer, self.state) if number is not None), None)

    @property
    def resized(self) -> tuple[SlotKind, int]:
        """Kind and number of the buffer that comes or goes."""
        named: dict[SlotKind, int | None] = {"weights": self.slot, "gradients": self.buffer, "optimizer": self.state}
        return next((kind, number) for kind, number in named.items() if number is not None)

    @property
    def words(self) -> str:
        """For people: "load layer 3 into slot 1"."""
        what = "the shell" if self.layer is None else f"layer {self.layer}"
        words = self.kind.value if self.lane == "engine" else f"{self.kind.value} {what}"
        words += f", micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        words += f", weights slot {self.slot}" if self.slot is not None else ""
        words += f", gradient buffer {self.buffer}" if self.buffer is not None else ""
        words += f", optimizer buffer {self.state}" if self.state is not None else ""
        words += ", with a graph that is kept" if self.graph else ""
        return words.replace("add,", "add").replace("remove,", "remove")

    def __str__(self) -> str:
        """Short and complete, for reading and for literal lists in tests: "forward 3 mb0 slot1 after 7"."""
        parts = [self.kind.value, "shell" if self.layer is None else str(self.layer)]
        named = {"mb": self.micro_batch, "slot": self.slot, "grad": self.buffer, "slab": self.slab, "state": self.state}
        parts += [f"{name}{value}" for name, value in named.items() if value is not None]
        if self.graph:
            parts.append("graph")
        if self.waits:
            parts.append("after " + ",".join(map(str, self.waits)))
        return " ".join(parts)


@dataclass(frozen=True)
class StepShape:
    """What a step must do, apart from the knobs.

    backward_from: the lowest layer that backward must reach (above it nothing needs a gradient).
    kept_graphs: layers, from the top, whose autograd graph is kept from forward to backward.
    shell_backward: the recorded shell call needs a backward pass (its embeddings are trained).
    head: what follows the last layer, each for all micro-batches in turn. Without a HEAD nothing is trained.
    """

    micro_batches: int
    offload: bool = False
    backward_from: int = 0
    kept_graphs: int = 0
    shell_backward: bool = True
    head: tuple[Kind, ...] = (Kind.HEAD,)

    @property
    def trains(self) -> bool:
        return Kind.HEAD in self.head

    def keeps_graph(self, layer: int, layers: int) -> bool:
        """Whether `layer`, of so many, is not computed again in backward."""
        return layer >= max(self.backward_from, layers - self.kept_graphs)

    def offloads(self, layer: int, layers: int) -> bool:
        """Whether the input of `layer` goes to the host; the last one is needed again at once."""
        between = self.backward_from <= layer < layers - 1
        return self.offload and between and not self.keeps_graph(layer, layers)


@dataclass(frozen=True)
class Visit:
    """All micro-batches through one layer in one direction."""

    phase: str  # "forward" | "backward"
    layer: int


@dataclass
class _Inputs:
    """Numbers of the operations that handled the saved input of (layer, micro-batch) in this step."""

    produced: dict[tuple[int, int], int] = field(default_factory=dict)
    offloaded: dict[tuple[int, int], int] = field(default_factory=dict)
    fetched: dict[tuple[int, int], int] = field(default_factory=dict)
    consumed: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class _Slot:
    layer: int | None = None  # whose weights are valid here
    frozen_of: int | None = None  # whose frozen weights still are, once the trained ones are out of date
    loaded: int | None = None  # the load that put them here
    last_use: int | None = None  # the last operation of the compute lane that reads them
    stored: int | None = None  # the store that brings them to the host once AdamW has changed them here


def _missing(held: Collection[int], wanted: int) -> list[int]:
    """The lowest free numbers with which `held` grows to `wanted` members."""
    free = (number for number in range(wanted + len(held)) if number not in held)
    return list(islice(free, max(0, wanted - len(held))))


def _oldest(buffers: dict[int, int | None]) -> int:
    """Of buffers with the last operation that used each, the one that was used longest ago."""
    return min(buffers, key=lambda buffer: (buffers[buffer] or -1, buffer))


def _present(*numbers: int | None) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number is not None}))


@dataclass
class Schedule:
    """Yields the operations of one step after another and remembers what lies where in between.

    layers: how many; trained: those with a trained parameter; shell_trained likewise.
    partly_frozen: those of the trained that have frozen weights besides.
    update_in_backward: AdamW follows each gradient at once, through `slabs` host gradient slabs; otherwise
        every layer keeps a host gradient of its own until `updates`.
    update_on_device: it follows each gradient of a layer on the device; only the shell's leaves.
    """

    layers: int
    trained: frozenset[int]
    shell_trained: bool = True
    update_in_backward: bool = False
    slabs: int = 3
    partly_frozen: frozenset[int] = frozenset()
    update_on_device: bool = False
    _next_number: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _buffers: dict[int, int | None] = field(default_factory=dict)  # gradient buffer → its last unload
    _states: dict[int, int | None] = field(default_factory=dict)  # optimizer buffer → its last store
    _slab_uses: list[int | None] = field(default_factory=list)
    _updated: dict[int | None, int] = field(default_factory=dict)
    _unloaded: dict[int | None, int] = field(default_factory=dict)
    _slab_turn: int = 0
    _shell_use: int | None = None
    _shell_version: int | None = None  # the update whose result lies on the device; -1 = the weights before any
    _inputs: _Inputs = field(default_factory=_Inputs)

    def __post_init__(self) -> None:
        self._slab_uses = [None] * self.slabs

    # ---- one step ----

    def step(self, shape: StepShape, knobs_at: Callable[[Visit], Knobs]) -> Iterator[Op]:
        """The operations of a step up to its norm. `knobs_at` is asked before every visit and may block."""
        visits = self.visits(shape)
        load = yield from self.load_shell()
        recorded = yield from self._record(shape, load)
        self._inputs = _Inputs({(0, mb): number for mb, number in enumerate(recorded)})
        for at, visit in enumerate(visits):
            yield from self.visit(visits, at, knobs_at(visit), shape)
        yield from self._finish(shape)

    def preview(self, shape: StepShape, visit: Visit, knobs: Knobs, count: int = 2) -> list[Op]:
        """The operations of `visit`, which is next, and those after it up to `count` visits; nothing changes."""
        later = copy.deepcopy(self)
        visits = later.visits(shape)
        at = visits.index(visit)
        ahead = range(at, min(at + count, len(visits)))
        return [op for number in ahead for op in later.visit(visits, number, knobs, shape)]

    def visit(self, visits: list[Visit], at: int, knobs: Knobs, shape: StepShape) -> Iterator[Op]:
        """One layer in one direction, and the loads that run beside it."""
        visit, window = visits[at], visits[at : at + 1 + knobs.prefetch_depth]
        yield from self._resize(knobs, visits, at, window)
        yield from self._ensure_loaded(visits, at, 0)
        if visit.phase == "forward":
            yield from self._forward(visit.layer, shape)
        else:
            yield from self._backward(visit.layer, shape)
        for ahead in range(1, len(window)):
            yield from self._ensure_loaded(visits, at, ahead)
            if ahead == 1:
                yield from self._fetch(window[1], shape)
        if visit == Visit("forward", self.layers - 1):
            yield from self._head(shape)

    def updates(self) -> Iterator[Op]:
        """AdamW for the shell and then for every trained layer from 0 up, save those that backward has updated.

        Only after `step` ran to its end, and the host has seen that loss and norm are finite.
        """
        if self.shell_trained:
            yield self._update(SHELL, None)
        if self.update_in_backward:
            return
        for layer in sorted(self.trained):
            if layer in self._unloaded:
                yield self._update(layer, None)

    def visits(self, shape: StepShape) -> list[Visit]:
        """Every visit of a step, in order."""
        up = [Visit("forward", layer) for layer in range(self.layers)]
        return up + [Visit("backward", layer) for layer in range(self.layers - 1, shape.backward_from - 1, -1)]

    def _op(self, kind: Kind, layer: int | None = None, **fields: object) -> Op:
        op = Op(self._next_number, kind, layer, **fields)  # type: ignore[arg-type]
        self._next_number += 1
        return op

    # ---- the shell ----

    def load_shell(self) -> Generator[Op, None, int | None]:
        """A shell that lies on the device as it is on the host is not loaded again."""
        version = self._updated.get(SHELL, -1)
        if self._shell_version == version:
            return None
        op = self._op(Kind.LOAD, SHELL, waits=_present(self._shell_use, self._updated.get(SHELL)))
        yield op
        self._shell_version, self._shell_use = version, op.number
        return op.number

    @property
    def last_updates(self) -> dict[int | None, int]:
        """By layer (None: the shell), the number of its last update."""
        return dict(self._updated)

    def forget_weights(self) -> None:
        """The next pass reads other weights than those that lie on the device; nothing may be running."""
        self._shell_version = None
        for slot in self._slots.values():
            self._outdate(slot)

    def _record(self, shape: StepShape, load: int | None) -> Generator[Op, None, list[int]]:
        numbers = []
        for mb in range(shape.micro_batches):
            op = self._op(Kind.RECORD, SHELL, micro_batch=mb, waits=_present(load) if mb == 0 else ())
            yield op
            numbers.append(op.number)
        return numbers

    def _head(self, shape: StepShape) -> Iterator[Op]:
        for kind in shape.head:
            for mb in range(shape.micro_batches):
                op = self._op(kind, SHELL, micro_batch=mb)
                yield op
                self._shell_use = op.number

    def _finish(self, shape: StepShape) -> Iterator[Op]:
        if not shape.trains:
            return
        for mb in range(shape.micro_batches) if shape.shell_backward else ():
            yield self._op(Kind.BACKWARD, SHELL, micro_batch=mb)
        norm = self._op(Kind.NORM)
        yield norm
        self._shell_use = norm.number
        if self.shell_trained:
            unload = self._op(Kind.UNLOAD, SHELL, waits=_present(norm.number, self._updated.get(SHELL)))
            yield unload
            self._unloaded[SHELL] = self._shell_use = unload.number

    # ---- layers ----

    def _forward(self, layer: int, shape: StepShape) -> Iterator[Op]:
        slot_id, slot = self._slot_of(layer)
        graph = shape.keeps_graph(layer, self.layers)
        for mb in range(shape.micro_batches):
            if shape.offloads(layer, self.layers):
                yield from self._offload(layer, mb)
            first = slot.loaded if mb == 0 else None
            drained = self._inputs.offloaded.get((layer - 1, mb))  # bounds the inputs alive on the device
            waits = _present(first, drained)
            op = self._op(Kind.FORWARD, layer, micro_batch=mb, slot=slot_id, waits=waits, graph=graph)
            yield op
            self._inputs.produced[(layer + 1, mb)] = slot.last_use = op.number

    def _offload(self, layer: int, mb: int) -> Iterator[Op]:
        op = self._op(Kind.OFFLOAD, layer, micro_batch=mb, waits=(self._inputs.produced[(layer, mb)],))
        yield op
        self._inputs.offloaded[(layer, mb)] = op.number

    def _fetch(self, visit: Visit, shape: StepShape) -> Iterator[Op]:
        """Bring the saved inputs of the next layer down; at most two layers' inputs are on the device."""
        if visit.phase != "backward":
            return
        for mb in range(shape.micro_batches):
            key = (visit.layer, mb)
            if key in self._inputs.offloaded and key not in self._inputs.fetched:
                room = self._inputs.consumed.get((visit.layer + 2, mb), self._inputs.produced[(visit.layer + 1, mb)])
                op = self._op(
                    Kind.FETCH, visit.layer, micro_batch=mb, waits=_present(self._inputs.offloaded[key], room)
                )
                yield op
                self._inputs.fetched[key] = op.number

    def _backward(self, layer: int, shape: StepShape) -> Iterator[Op]:
        yield from self._fetch(Visit("backward", layer), shape)
        slot_id, slot = self._slot_of(layer)
        buffer = _oldest(self._buffers) if layer in self.trained else None
        state = (yield from self._load_state(layer)) if layer in self.trained and self.update_on_device else None
        graph = shape.keeps_graph(layer, self.layers)
        for mb in range(shape.micro_batches):
            first = (slot.loaded, self._buffers[buffer] if buffer is not None else None) if mb == 0 else ()
            waits = _present(*first, self._inputs.fetched.get((layer, mb)))
            op = self._op(Kind.BACKWARD, layer, micro_batch=mb, slot=slot_id, buffer=buffer, waits=waits, graph=graph)
            yield op
            self._inputs.consumed[(layer, mb)] = slot.last_use = op.number
        if buffer is not None and state is not None:
            yield from self._update_here(layer, slot_id, buffer, state)
        elif buffer is not None:
            self._outdate(slot)
            yield from self._unload(layer, buffer, op.number)

    def _load_state(self, layer: int) -> Generator[Op, None, Op]:
        state = _oldest(self._states)
        waits = _present(self._states[state], self._updated.get(layer))
        op = self._op(Kind.LOAD_STATE, layer, state=state, waits=waits)
        yield op
        return op

    def _update_here(self, layer: int, slot_id: int, buffer: int, loaded: Op) -> Iterator[Op]:
        """AdamW in the slot, so that the weights there stay the newest; the next backward follows on the same lane."""
        state, slot = loaded.state, self._slots[slot_id]
        assert state is not None
        update = self._op(Kind.ADAMW, layer, slot=slot_id, buffer=buffer, state=state, waits=(loaded.number,))
        yield update
        store = self._op(Kind.STORE, layer, slot=slot_id, state=state, waits=(update.number,))
        yield store
        slot.last_use = update.number
        slot.stored = self._states[state] = self._updated[layer] = store.number

    def _outdate(self, slot: _Slot) -> None:
        """The trained weights in it are about to change on the host."""
        if slot.layer in self.partly_frozen:
            slot.frozen_of = slot.layer
        slot.layer = None

    def _unload(self, layer: int, buffer: int, computed: int) -> Iterator[Op]:
        slab, room = self._take_slab() if self.update_in_backward else (None, self._updated.get(layer))
        op = self._op(Kind.UNLOAD, layer, buffer=buffer, slab=slab, waits=_present(computed, room))
        yield op
        self._unloaded[layer] = self._buffers[buffer] = op.number
        if self.update_in_backward:
            yield self._update(layer, slab)

    def _update(self, layer: int | None, slab: int | None) -> Op:
        op = self._op(Kind.UPDATE, layer, slab=slab, waits=(self._unloaded[layer],))
        self._updated[layer] = op.number
        if slab is not None:
            self._slab_uses[slab] = op.number
        return op

    def _take_slab(self) -> tuple[int, int | None]:
        slab = self._slab_turn
        self._slab_turn = (slab + 1) % self.slabs
        return slab, self._slab_uses[slab]

    # ---- device buffers ----

    def _slot_of(self, layer: int) -> tuple[int, _Slot]:
        return next((slot_id, slot) for slot_id, slot in self._slots.items() if slot.layer == layer)

    def _holds(self, layer: int) -> bool:
        return any(slot.layer == layer for slot in self._slots.values())

    def _ensure_loaded(self, visits: list[Visit], at: int, ahead: int) -> Iterator[Op]:
        layer = visits[at + ahead].layer
        if self._holds(layer):
            return
        window = visits[at : at + ahead + 1]
        slot_id = self._slot_for(layer, visits, at, window)
        slot = self._slots[slot_id]
        op = self._op(
            Kind.LOAD,
            layer,
            slot=slot_id,
            waits=_present(slot.last_use, slot.loaded, slot.stored, self._updated.get(layer)),
        )
        yield op
        self._slots[slot_id] = _Slot(layer, loaded=op.number)

    def _slot_for(self, layer: int, visits: list[Visit], at: int, window: list[Visit]) -> int:
        """Where the layer's frozen weights still lie, or else the slot that can best be spared."""
        kept = [slot_id for slot_id, slot in self._slots.items() if slot.frozen_of == layer]
        return kept[0] if kept else self._victim(visits, at, window)

    def _victim(self, visits: list[Visit], at: int, window: list[Visit]) -> int:
        """The slot whose weights are needed last (see the Note above), never one the window needs.

        Among several, the one that was used longest ago: the layer now running has just marked its slot as spent.
        """
        needed = {visit.layer for visit in window}
        free = [slot_id for slot_id, slot in self._slots.items() if slot.layer not in needed]

        def preference(slot_id: int) -> tuple[float, int, int]:
            slot = self._slots[slot_id]
            used = max(-1, slot.loaded or -1, slot.last_use or -1)
            return self._next_use(slot, visits, at), -used, -slot_id

        return max(free, key=preference)

    def _next_use(self, slot: _Slot, visits: list[Visit], at: int) -> float:
        layer = slot.frozen_of if slot.layer is None else slot.layer
        if layer is None:
            return float("inf")
        later = (i for i in range(at, len(visits)) if visits[i].layer == layer)
        return next(later, len(visits) + layer)  # kept frozen weights serve the next step's forward

    def _resize(self, knobs: Knobs, visits: list[Visit], at: int, window: list[Visit]) -> Iterator[Op]:
        slots = min(knobs.weight_slots, self.layers)  # more could not be filled
        for slot_id in _missing(self._slots, slots):
            self._slots[slot_id] = _Slot()
            yield self._op(Kind.ADD, slot=slot_id)
        buffers, states = (1, knobs.grad_buffers) if self.update_on_device else (knobs.grad_buffers, 0)
        for buffer in _missing(self._buffers, buffers):
            self._buffers[buffer] = None
            yield self._op(Kind.ADD, buffer=buffer)
        for state in _missing(self._states, states):
            self._states[state] = None
            yield self._op(Kind.ADD, state=state)
        while len(self._slots) > slots:
            slot_id = self._victim(visits, at, window)
            slot = self._slots.pop(slot_id)
            yield self._op(Kind.REMOVE, slot=slot_id, waits=_present(slot.last_use, slot.loaded, slot.stored))
        while len(self._buffers) > buffers:
            buffer = _oldest(self._buffers)
            yield self._op(Kind.REMOVE, buffer=buffer, waits=_present(self._buffers.pop(buffer)))
        while len(self._states) > states:
            state = _oldest(self._states)
            yield self._op(Kind.REMOVE, state=state, waits=_present(self._states.pop(state)))
