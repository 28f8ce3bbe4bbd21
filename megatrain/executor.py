"""Turns the operations of a schedule into work on lanes: the one place where order meets tensors.

Each kind of operation has one method that runs on its lane's thread. The method reads and writes only what
the operation names, so that the proof in `hazards` is about this code.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megatrain import anatomy as parts
from megatrain.activations import OffloadedInputs, SavedInputs
from megatrain.batch import Batch
from megatrain.config import Throttle
from megatrain.gradients import GradientSum, Norms
from megatrain.host import HostLayer, HostStore
from megatrain.lanes import Done, Label, Lanes, Stream, Work
from megatrain.layout import Layout
from megatrain.loss import Head, backward, scores
from megatrain.memory import gradient_buffer_bytes, slot_bytes, sum_bytes
from megatrain.placement import bind
from megatrain.report import Inspection
from megatrain.scales import Scales, statistics
from megatrain.schedule import SHELL, Kind, Op, StepShape
from megatrain.slots import (
    BufferPool,
    Ledger,
    buffer_states,
    gradient_states,
    is_spent,
    optimizer_states,
    weight_states,
)
from megatrain.trace import Recorder, Span
from megatrain.update import Hyperparameters, bytes_touched, update_layer, update_layer_on_device

BeforeUpdate = Callable[[int | None, int], None]  # of a layer (None: the shell), in a step


class NonFiniteError(ValueError):
    """A loss or gradient norm is infinite or not a number; it was not applied."""


@dataclass
class KeptGraph:
    """A layer's forward that is not computed again, and the weights that autograd will ask for."""

    graph: parts.Graph
    saved: parts.Saved


@dataclass
class Updated:
    """A layer that AdamW has changed on the device; squares: the sum of those of its trained weights, there."""

    layer: HostLayer
    squares: torch.Tensor


@dataclass
class StepState:
    """What the operations of one step hand to each other. Each item is written on one lane, read after a wait."""

    number: int
    batch: Batch
    shape: StepShape
    offloaded: OffloadedInputs | None
    shell_sum: GradientSum
    scales: Scales
    tapes: dict[int, parts.Tape] = field(default_factory=dict)
    output_gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by micro-batch
    random_states: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple[int, int], KeptGraph] = field(default_factory=dict)
    attention: dict[tuple[int, int], parts.KeptAttention] = field(default_factory=dict)
    keep_attention: bool = False
    losses: list[torch.Tensor] = field(default_factory=list)
    balancing: list[torch.Tensor] = field(default_factory=list)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)  # by full parameter name
    present: dict[int | None, set[str]] = field(default_factory=dict)  # parameters that got a gradient
    layer_sum: GradientSum | None = None
    updated: dict[int | None, Updated] = field(default_factory=dict)  # until they are stored
    reference: bool = False  # the weights that are streamed are the frozen ones
    temperature: float = 1.0
    scores: list[torch.Tensor] = field(default_factory=list)  # by micro-batch, on the device
    score_gradients: list[torch.Tensor] | None = None  # by micro-batch: of a loss of the user's own
    result: torch.Tensor | None = None  # float64, on the host: loss, balancing loss, gradient norm, then the scales


class Executor:
    """Executes operations for one model on one device."""

    def __init__(
        self,
        anatomy: parts.Anatomy,
        layouts: list[Layout],
        shell: Layout,
        host: HostStore,
        device: torch.device,
        recorder: Recorder,
        loss_chunk_tokens: int,
        throttle: Throttle | None = None,
        compiled: parts.CompiledLayers | None = None,
        host_cpus: frozenset[int] | None = None,
        attention: str = "torch",
        optimizer_bytes: int = 0,
    ) -> None:
        self._anatomy = anatomy
        self._kernels = parts.Kernels(attention, anatomy.layers, device)
        self._layouts = layouts
        self._host = host
        self._device = device
        self._recorder = recorder
        self._loss_chunk_tokens = loss_chunk_tokens
        self._throttle = throttle
        self._host_cpus = host_cpus
        self._compiled = compiled
        self._layers = anatomy.layers if compiled is None else compiled.modules
        self._start_lanes()
        self._dones: dict[int, Done] = {}
        self.before_update: BeforeUpdate = lambda layer, step: None
        self.inspecting = False  # while a user steps layer by layer: look into what goes in and comes out
        self.inspected = Inspection()
        self._random = parts.RandomState(device)
        self.ledger = Ledger()
        self.saved = SavedInputs(self.ledger)
        self.weights = BufferPool("weights", slot_bytes(layouts), device, self.ledger, recorder)
        self.gradients = BufferPool("gradients", gradient_buffer_bytes(layouts), device, self.ledger, recorder)
        self.optimizer = BufferPool("optimizer", optimizer_bytes, device, self.ledger, recorder)
        self._updates_here = optimizer_bytes > 0
        self._pools = {pool.kind: pool for pool in (self.weights, self.gradients, self.optimizer)}
        self._frozen_in: dict[int, int] = {}  # weights slot → the layer whose frozen weights are whole there
        self._shell_layout = shell
        self._shell_weights = self._allocate(shell.nbytes)
        self._shell_gradient = self._allocate(shell.trained_nbytes)
        self._shell_sums = self._sums(sum_bytes(shell, parts=2))
        self._layer_sums: torch.Tensor | None = None
        self._norms = Norms()
        self._tails = [defaultdict[Hashable, parts.Tail](parts.Tail) for _ in layouts]  # by kind of call
        self._trained = [frozenset(entry.name for entry in layout.trained) for layout in layouts]
        self._shell_trained = {e.name: anatomy.shell.parameters[e.name] for e in shell.trained}
        self._parameter_order = [name for name, p in anatomy.model.named_parameters() if p.requires_grad]
        self.prepare_model()
        self._work: dict[Kind, Callable[[StepState, Op, Stream], int]] = {
            Kind.LOAD: self._load,
            Kind.RECORD: self._record,
            Kind.FORWARD: self._forward,
            Kind.OFFLOAD: self._offload,
            Kind.FETCH: self._fetch,
            Kind.SCORE: self._score,
            Kind.HEAD: self._head,
            Kind.BACKWARD: self._backward,
            Kind.NORM: self._norm,
            Kind.UNLOAD: self._unload,
            Kind.LOAD_STATE: self._load_state,
            Kind.STORE: self._store,
        }

    def _start_lanes(self) -> None:
        starts = {} if self._host_cpus is None else {"host": partial(bind, self._host_cpus)}
        self._lanes = Lanes.on(self._device, self._recorder, self._throttle, starts)
        # Also when the interpreter ends first: a thread that is then stopped inside torch takes the process down.
        self._finalizer = weakref.finalize(self, self._lanes.close)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.ledger.hold(nbytes)
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the lanes' streams do not wait for this one
        return zeros

    def _sums(self, nbytes: int) -> torch.Tensor | None:
        return self._allocate(nbytes).view(torch.float32) if nbytes else None

    def prepare_model(self) -> None:
        """Hollow the model out, and let its shell look into the device's copy."""
        self._anatomy.stubbed.hollow_out()
        self._anatomy.shell.bind(self._shell_layout.views(self._shell_weights))
        self._anatomy.model.to(self._device)  # the shell's buffers
        self._anatomy.move_constants(self._device)

    # ---- between steps ----

    def begin(self, number: int, batch: Batch, shape: StepShape, offloaded: OffloadedInputs | None = None) -> StepState:
        """Prepare a step, or another pass; nothing runs yet."""
        widest = max(sum_bytes(layout, shape.micro_batches) for layout in self._layouts)
        if widest and self._layer_sums is None:
            self._layer_sums = self._sums(widest)
        shell_sum = GradientSum(self._shell_layout, self._shell_gradient, self._shell_sums, self._norms)
        return StepState(number, batch, shape, offloaded, shell_sum, Scales(len(self._layouts)))

    def wait(self, number: int) -> None:
        """Block until an operation is complete; LaneError if it failed."""
        done = self._dones.get(number)
        if done is not None:
            done.wait()

    def waiting_for(self, number: int) -> Callable[[], None]:
        """What blocks, now or later and in any thread, until an operation that was issued is complete."""
        done = self._dones.get(number)
        return (lambda: None) if done is None else done.wait

    def wait_issued(self, number: int) -> None:
        """Block until an operation was handed to its stream: what follows there is in order. LaneError if it failed."""
        self._dones[number].wait_issued()

    def wait_all(self) -> None:
        """Block until every operation issued so far is complete; then forget them."""
        for done in list(self._dones.values()):
            done.wait()
        self._dones.clear()
        self._lanes.record_spans()

    def forget_complete(self) -> None:
        """Drop what need not be waited for any more, so that a long run does not grow."""
        self._lanes.record_spans()
        self._dones = {number: done for number, done in self._dones.items() if not done.complete}

    def end(self, state: StepState) -> None:
        """Let go of what a step held, also when it failed half-way."""
        self.saved.clear()
        state.tapes.clear()
        for gradient in state.output_gradients.values():
            self.ledger.release(gradient.nbytes)
        state.output_gradients.clear()
        for kept in state.graphs.values():
            self.ledger.release(kept.saved.nbytes)
        for attention in state.attention.values():
            self.ledger.release(attention.nbytes)
        state.graphs.clear()
        state.attention.clear()
        self.forget_complete()

    def restart(self, step: int) -> None:
        """After a pass failed half-way: new lanes and no buffers. Updates that were issued before are done first."""
        self._end_lanes()
        self._finalizer.detach()
        self._dones.clear()
        for pool in self._pools.values():
            pool.clear(step)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._start_lanes()

    def random_states(self) -> dict[str, torch.Tensor]:
        """States of the generators that a model may draw from, by device."""
        states = {"cpu": torch.get_rng_state()}
        return states if self._device.type == "cpu" else states | {self._device.type: self._random.get().cpu()}

    def set_random_states(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._device.type in states:
            self._random.set(states[self._device.type])

    def at_work(self) -> dict[str, list[str]]:
        """Per lane, what it is at and what waits behind, in words."""
        return self._lanes.at_work()

    def close(self) -> None:
        self._end_lanes()

    def _end_lanes(self) -> None:
        """After this nothing reads or writes memory that is given back, on the card neither."""
        self._lanes.close()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a card that has failed does nothing any more, and says so once more
                torch.cuda.synchronize(self._device)
                _forget_workspaces()

    # ---- issuing ----

    def issue(self, state: StepState, op: Op, numbers: Hyperparameters | None = None, work: Work | None = None) -> None:
        """Hand an operation to its lane, behind the operations it waits for. work: what it does, if not the usual."""
        if op.lane == "engine":
            self._resize(state, op)
            return
        if op.kind in (Kind.UPDATE, Kind.ADAMW):
            assert numbers is not None
            work = partial(self._update if op.kind is Kind.UPDATE else self._adamw, state, op, numbers)
        work = work or partial(self._work[op.kind], state, op)
        waits = [self._dones[number] for number in op.waits if number in self._dones]
        self._dones[op.number] = self._lanes[op.lane].submit(work, waits, self._label(state, op))

    def _label(self, state: StepState, op: Op) -> Label:
        changes = [*buffer_states(op, spent=self._spent(state, op))]

        def tell_buffers(span: Span) -> None:
            for kind, number, states in changes:
                self._pools[kind].tell(number, states, span)

        return Label(op.kind.value, state.number, op.layer, op.micro_batch, op.place, tell_buffers if changes else None)

    def _spent(self, state: StepState, op: Op) -> bool:
        return is_spent(op, state.shape.micro_batches, updated_here=self._updates_here)

    def _resize(self, state: StepState, op: Op) -> None:
        kind, number = op.resized
        pool = self._pools[kind]
        if op.kind is Kind.ADD:
            if op.slot is not None:
                self._frozen_in.pop(op.slot, None)
            pool.add(number, state.number)
            return
        for wait in op.waits:
            self.wait(wait)
        pool.remove(number, state.number)

    # ---- h2d ----

    def _load(self, state: StepState, op: Op, stream: Stream) -> int:
        host = self._host_layer(op.layer)
        source = host.reference if state.reference else host.weights
        assert source is not None
        if op.layer is SHELL:
            stream.copy(self._shell_weights, source)
            return source.nbytes
        assert op.slot is not None
        kept = self._frozen_in.get(op.slot) == op.layer  # frozen weights never change, nor in the reference
        nbytes = host.layout.trained_nbytes if kept else source.nbytes
        self._frozen_in[op.slot] = op.layer
        with self.weights[op.slot].during(weight_states(op, spent=False)) as slot:
            stream.copy(slot[:nbytes], source[:nbytes])
        return nbytes

    def _load_state(self, state: StepState, op: Op, stream: Stream) -> int:
        host = self._host_layer(op.layer)
        assert op.state is not None
        with self.optimizer[op.state].during(optimizer_states(op)) as flat:
            return _copy_all(host.state_in(flat), host.state, stream)

    def _fetch(self, state: StepState, op: Op, stream: Stream) -> int:
        layer, mb = _place(op)
        assert state.offloaded is not None
        like = state.tapes[mb].hidden
        hidden = torch.empty_like(like, requires_grad=False)
        stream.copy(hidden, state.offloaded.place(layer, mb, like))
        self.saved.put(layer, mb, hidden, readers=1)
        return hidden.nbytes

    # ---- compute ----

    def _record(self, state: StepState, op: Op, stream: Stream) -> int:
        mb = op.micro_batch or 0
        inputs = {name: self._sent(tensor) for name, tensor in state.batch.parts[mb].items()}
        tape = state.tapes[mb] = self._anatomy.record(inputs)
        self.saved.put(0, mb, tape.hidden.detach().contiguous(), self._readers(state, 0))
        return 0

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. From memory that is not pinned, its copy would hold the compute lane up."""
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _readers(self, state: StepState, layer: int) -> int:
        """How many operations will read the input of `layer` where it now lies: see `SavedInputs`."""
        return 2 if state.shape.offloads(layer, len(self._layouts)) else 1

    def _forward(self, state: StepState, op: Op, stream: Stream) -> int:
        layer, mb = _place(op)
        assert op.slot is not None
        hidden = self.saved.get(layer, mb)
        with self.weights[op.slot].during(weight_states(op, spent=False)) as slot:
            self._rehearse_attention(state, layer, mb, slot, hidden)
            if op.graph:
                output = self._forward_with_graph(state, layer, mb, slot, hidden)
            else:
                output = self._forward_without_graph(state, layer, mb, slot, hidden)
        state.scales.add_output(layer, output)
        self._inspect(layer, "forward", hidden, output)
        self.saved.put(layer + 1, mb, output.contiguous(), self._readers(state, layer + 1))
        if op.graph or self._readers(state, layer) == 2 or layer < state.shape.backward_from:
            self.saved.release(layer, mb)
        return 0

    def _forward_without_graph(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        if self._anatomy.model.training:
            state.random_states[(layer, mb)] = self._random.get()
        if state.keep_attention and layer >= state.shape.backward_from:
            return self._forward_keeping_attention(state, layer, mb, slot, hidden)
        tape = state.tapes[mb]
        with self._kernels.within(layer, tape.calls[layer], hidden):
            return parts.forward(self._layers[layer], self._tensors(layer, slot), tape, layer, hidden)

    def _rehearse_attention(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Where a layer that is trained meets a call that is new, learn by which kernel to run it."""
        call = state.tapes[mb].calls[layer]
        if layer < state.shape.backward_from or not self._kernels.is_new(layer, call, hidden):
            return
        module, tensors = self._layers[layer], self._tensors(layer, slot)
        tape = replace(state.tapes[mb], extra_gradients={}, collected={}, collected_gradients={})  # that nobody reads

        def run() -> None:
            graph = parts.Graph(module, tensors, self._trained[layer], tape, layer, hidden)
            graph.backward(torch.ones_like(graph.output), lambda name, gradient: None)

        self._kernels.rehearse(layer, call, hidden, run)

    def _forward_with_graph(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        saved = parts.Saved(slot, state.tapes[mb].calls[layer].tensors)
        graph = self._graph(state, layer, mb, slot, hidden, saved.saving())
        state.tapes[mb].collected[layer] = graph.collected
        self.ledger.hold(saved.nbytes)
        state.graphs[(layer, mb)] = KeptGraph(graph, saved)
        return graph.output

    def _forward_keeping_attention(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        attention = state.attention[(layer, mb)] = parts.KeptAttention()
        graph = self._graph(state, layer, mb, slot, hidden, attention.keeping())
        state.tapes[mb].collected[layer] = graph.collected
        self.ledger.hold(attention.nbytes)
        return graph.output

    def _graph(
        self,
        state: StepState,
        layer: int,
        mb: int,
        slot: torch.Tensor,
        hidden: torch.Tensor,
        within: AbstractContextManager[None],
    ) -> parts.Graph:
        module, tensors, tape = self._layers[layer], self._tensors(layer, slot), state.tapes[mb]
        with self._kernels.within(layer, tape.calls[layer], hidden):
            return parts.Graph(module, tensors, self._trained[layer], tape, layer, hidden, within)

    def _tensors(self, layer: int, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._anatomy.units[layer].with_aliases(self._layouts[layer].views(slot))

    def calling(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], answer: list[Any]) -> Work:
        """What FORWARD does where the model itself calls a layer: its output is put into `answer`."""
        layer, number, context = op.layer, op.slot, copy_context()  # transformers' hooks fill a context variable
        assert layer is not None
        assert number is not None

        def work(stream: Stream) -> int:
            state = weight_states(op, spent=False)
            with self.weights[number].during(state) as slot, self._kernels.within_inference():
                tensors = self._tensors(layer, slot)
                answer.append(context.run(parts.call, self._anatomy.layers[layer], tensors, args, kwargs))
            return 0

        return work

    def on_compute_stream(self) -> AbstractContextManager[Any]:
        """Within, what this thread computes is in order with what the layers do."""
        return self._lanes["compute"].stream.active()

    def _head_of(self, state: StepState, mb: int) -> Head:
        return Head(
            self._anatomy,
            state.tapes[mb],
            self.saved.get(len(self._layouts), mb),
            self._sent(state.batch.targets[mb]),
            self._loss_chunk_tokens,
            state.temperature,
        )

    def _score(self, state: StepState, op: Op, stream: Stream) -> int:
        mb = op.micro_batch or 0
        state.scores.append(scores(self._head_of(state, mb)))
        if not state.shape.trains:
            self.saved.release(len(self._layouts), mb)
        return 0

    def _head(self, state: StepState, op: Op, stream: Stream) -> int:
        mb, sent = op.micro_batch or 0, state.score_gradients
        loss, gradient, balancing = backward(
            self._head_of(state, mb),
            tokens=state.batch.tokens,
            share=state.batch.part_tokens[mb] / state.batch.tokens,
            score_gradient=None if sent is None else self._sent(sent[mb]),
            shell=self._shell_trained,
            on_gradient=state.shell_sum.add,
        )
        state.losses.append(loss)
        if balancing is not None:
            state.balancing.append(balancing)
        self._keep_output_gradient(state, mb, gradient)
        self.saved.release(len(self._layouts), mb)
        return 0

    def _keep_output_gradient(self, state: StepState, mb: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.ledger.hold(gradient.nbytes)
        old = state.output_gradients.pop(mb, None)
        if old is not None:
            self.ledger.release(old.nbytes)
        if gradient is not None:
            state.output_gradients[mb] = gradient

    def _backward(self, state: StepState, op: Op, stream: Stream) -> int:
        if op.layer is SHELL:
            return self._shell_backward(state, op.micro_batch or 0)
        layer, mb = _place(op)
        assert op.slot is not None
        with self.weights[op.slot].during(weight_states(op, spent=self._spent(state, op))) as slot:
            run = self._kept_backward if op.graph else self._layer_backward
            if op.buffer is None:
                run(state, layer, mb, slot, stream, None)
                return 0
            with self.gradients[op.buffer].during(gradient_states(op)) as flat:
                if mb == 0:
                    sums = self._layer_sums if state.shape.micro_batches > 1 else None
                    state.layer_sum = GradientSum(self._layouts[layer], flat, sums, self._norms)
                run(state, layer, mb, slot, stream, state.layer_sum)
                if mb == state.shape.micro_batches - 1 and state.layer_sum is not None:
                    self._finish_sum(state, layer, state.layer_sum)
        return 0

    def _layer_backward(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, stream: Stream, total: GradientSum | None
    ) -> None:
        hidden = self.saved.get(layer, mb)
        stream.keep(hidden)
        after = self._random.get()
        graph = self._recompute(state, layer, mb, slot, hidden)
        self._send_back(state, layer, mb, graph, total)
        attention = state.attention.pop((layer, mb), None)
        if attention is not None:
            self.ledger.release(attention.nbytes)
        state.random_states.pop((layer, mb), None)
        self._random.set(after)
        self.saved.release(layer, mb)

    def _kept_backward(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, stream: Stream, total: GradientSum | None
    ) -> None:
        kept = state.graphs.pop((layer, mb))
        kept.saved.slot = slot
        self._send_back(state, layer, mb, kept.graph, total)
        self.ledger.release(kept.saved.nbytes)

    def _recompute(
        self, state: StepState, layer: int, mb: int, slot: torch.Tensor, hidden: torch.Tensor
    ) -> parts.Graph:
        """Run a layer again, now under autograd, without the products that backward does not need."""
        for _ in range(2):
            self._rewind(state, layer, mb)
            try:
                return self._graph(state, layer, mb, slot, hidden, self._recomputing(state, layer, mb))
            except parts.DifferentError:  # the tail is off from now on
                continue
        raise AssertionError("a layer without a tail is computed whole")

    @contextmanager
    def _recomputing(self, state: StepState, layer: int, mb: int) -> Iterator[None]:
        """Within, what was kept is not computed, nor what backward does not need."""
        attention = state.attention.get((layer, mb))
        with nullcontext() if attention is None else attention.reusing(), self._tail(state, layer, mb):
            yield

    def _send_back(self, state: StepState, layer: int, mb: int, graph: parts.Graph, total: GradientSum | None) -> None:
        came = state.output_gradients[mb]
        went = graph.backward(came, _unexpected if total is None else total.add)
        self._inspect(layer, "backward", came, went)
        self._keep_output_gradient(state, mb, went)

    def _tail(self, state: StepState, layer: int, mb: int) -> AbstractContextManager[None]:
        """Nothing is left out where the layer is compiled: a tail watches single operations."""
        if self._compiled is not None and self._compiled.works(layer):
            return nullcontext()
        return self._tails[layer][state.tapes[mb].calls[layer].kind].recompute()

    def _rewind(self, state: StepState, layer: int, mb: int) -> None:
        """Random draws of a recompute are those of the forward that it repeats."""
        if (layer, mb) in state.random_states:
            self._random.set(state.random_states[(layer, mb)])

    def _inspect(self, layer: int, phase: str, came: torch.Tensor, went: torch.Tensor) -> None:
        if self.inspecting:
            self.inspected = Inspection([], layer, phase, statistics(came), statistics(went))

    def _finish_sum(self, state: StepState, layer: int | None, total: GradientSum) -> None:
        prefix = "" if layer is None else self._anatomy.units[layer].prefix
        norms = total.finish()
        state.norms |= {prefix + name: norm for name, norm in norms.items()}
        if layer is not None:
            state.scales.add_gradient(layer, norms.values())
        state.present[layer] = total.present

    def _shell_backward(self, state: StepState, mb: int) -> int:
        found = parts.shell_gradients(state.tapes[mb], state.output_gradients[mb], [*self._shell_trained.values()])
        for name, gradient in zip(self._shell_trained, found, strict=True):
            if gradient is not None:
                state.shell_sum.add(name, gradient)
        return 0

    def _norm(self, state: StepState, op: Op, stream: Stream) -> int:
        """Loss and global norm, copied to the host: the one place where the host needs the device's values."""
        self._finish_sum(state, SHELL, state.shell_sum)
        norms = [state.norms[name] for name in self._parameter_order if name in state.norms]
        zero = torch.zeros((), device=self._device)
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else zero
        loss, balancing = _total(state.losses, zero), _total(state.balancing, zero)
        loss = loss.double()
        result = torch.cat([torch.stack([loss, balancing.double(), norm.double()]), state.scales.on_device(loss)])
        state.result = torch.empty(result.shape, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        stream.copy(state.result, result)
        stream.keep(result)
        return 0

    def _adamw(self, state: StepState, op: Op, numbers: Hyperparameters, stream: Stream) -> int:
        """AdamW of a layer where it lies on the device; the host learns of it when it is stored."""
        host, present = self._host_layer(op.layer), state.present[op.layer]
        assert op.slot is not None
        assert op.buffer is not None
        assert op.state is not None
        with (
            self.weights[op.slot].during(weight_states(op, spent=False)) as weights,
            self.gradients[op.buffer].during(gradient_states(op)) as gradient,
            self.optimizer[op.state].during(optimizer_states(op)) as flat,
        ):
            layer = host.elsewhere(weights, flat)
            squares = update_layer_on_device(layer, gradient, present, numbers)
        state.updated[op.layer] = Updated(layer, squares)
        return _touched(host, present)

    # ---- d2h ----

    def _store(self, state: StepState, op: Op, stream: Stream) -> int:
        """What AdamW has changed on the device becomes the host's, unless the gradient was not finite."""
        host, updated = self._host_layer(op.layer), state.updated.pop(op.layer)
        self._refuse_non_finite(state, op)  # waits for the device, as the copies have to
        self.before_update(op.layer, state.number)
        trained = host.layout.trained_nbytes
        assert op.state is not None
        with self.optimizer[op.state].during(optimizer_states(op)):
            nbytes = _copy_all([host.weights[:trained]], [updated.layer.weights[:trained]], stream)
            nbytes += _copy_all(host.state, updated.layer.state, stream)
        host.steps, host.weight_norm = updated.layer.steps, math.sqrt(float(updated.squares))
        return nbytes

    def _offload(self, state: StepState, op: Op, stream: Stream) -> int:
        layer, mb = _place(op)
        assert state.offloaded is not None
        hidden = self.saved.get(layer, mb)
        stream.copy(state.offloaded.place(layer, mb, hidden), hidden)
        stream.keep(hidden)
        self.saved.release(layer, mb)
        return hidden.nbytes

    def _unload(self, state: StepState, op: Op, stream: Stream) -> int:
        target = self._host_gradient(op)
        if op.buffer is None:
            stream.copy(target, self._shell_gradient)
            return target.nbytes
        with self.gradients[op.buffer].during(gradient_states(op)) as flat:
            stream.copy(target, flat[: target.nbytes])
        return target.nbytes

    # ---- host ----

    def _host_layer(self, layer: int | None) -> HostLayer:
        return self._host.shell if layer is SHELL else self._host.layers[layer]

    def _host_gradient(self, op: Op) -> torch.Tensor:
        host = self._host_layer(op.layer)
        if op.slab is not None:
            return self._host.slabs[op.slab][: host.layout.trained_nbytes]
        assert host.gradient is not None
        return host.gradient

    def _update(self, state: StepState, op: Op, numbers: Hyperparameters, stream: Stream) -> int:
        host, present = self._host_layer(op.layer), state.present[op.layer]
        if op.slab is not None:
            self._refuse_non_finite(state, op)
        self.before_update(op.layer, state.number)
        update_layer(host, self._host_gradient(op), present, numbers)
        return _touched(host, present)

    def _refuse_non_finite(self, state: StepState, op: Op) -> None:
        """Where updates follow each gradient at once, the last chance to refuse one is here."""
        prefix = "" if op.layer is SHELL else self._anatomy.units[op.layer].prefix
        norms = {name: state.norms[prefix + name] for name in state.present[op.layer]}
        if not norms or torch.stack([*norms.values()]).isfinite().all():
            return
        for name, norm in norms.items():
            if not torch.isfinite(norm):
                raise NonFiniteError(
                    f"the gradient of {prefix + name} is not finite in step {state.number}: it was not applied, but "
                    'the layers after it already were (optimizer_overlap="backward"); go back to a saved model, or '
                    'train with optimizer_overlap="forward" and max_grad_norm, which applies all or nothing'
                )


def _forget_workspaces() -> None:
    """cuBLAS keeps up to 32 MiB for each stream that ever was; torch has no public way to let go of them."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _place(op: Op) -> tuple[int, int]:
    assert op.layer is not None
    assert op.micro_batch is not None
    return op.layer, op.micro_batch


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], stream: Stream) -> int:
    for target, source in zip(targets, sources, strict=True):
        stream.copy(target, source)
    return sum(target.nbytes for target in targets)


def _touched(host: HostLayer, present: set[str]) -> int:
    used = [entry for entry in host.layout.trained if entry.name in present]
    return bytes_touched(used, split=host.low is not None, moment_bytes=host.exp_avg.itemsize)


def _total(values: list[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack([value.double() for value in values]).sum() if values else zero


def _unexpected(name: str, _: torch.Tensor) -> None:
    raise AssertionError(f"{name} is frozen, but got a gradient")
