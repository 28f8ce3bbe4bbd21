"""A configuration's model at some depth, really or virtually that deep: its plan, its engine and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peers.contender import MAX_GRAD_NORM
from benchmarks.shapes import Batch, batches
from benchmarks.table import Cell, table
from benchmarks.virtual import VirtualEngine, label, random_model, virtual_model
from megatrain import AdamWConfig, EngineConfig, StreamingEngine
from megatrain.anatomy.meta import meta_model
from megatrain.host import role_bytes
from megatrain.machine import Machine
from megatrain.plan import Plan, planned
from megatrain.plan.needs import Subject
from megatrain.shapes import host_shape

LR = 1e-4
STORED = (8, 4, 2, 1)  # layers whose storage a virtual depth is tried in; more would only take longer to fill


@dataclass(frozen=True)
class Deep:
    """What is trained. stored: the layers that share the host's memory among all; None = each has its own."""

    config: Any
    engine: EngineConfig
    rows: int
    sequence: int
    stored: int | None = None

    @property
    def layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    def __str__(self) -> str:
        return f"{self.layers} layers" if self.stored is None else label(self.layers, self.stored)

    def subject(self) -> Subject:
        """What the plan has to know of the model; takes a second or two."""
        return Subject.of(meta_model(self.config), self.engine, batch=self.rows, sequence=self.sequence)

    def open(self) -> StreamingEngine:
        dtype, made_on = getattr(torch, self.engine.dtype), "cpu" if self.engine.device == "cpu" else "cuda"
        if self.stored is not None:
            model = virtual_model(self.config, self.stored, dtype, made_on)
            return VirtualEngine(model, self.engine, self.stored)
        model = random_model(self.config, dtype, made_on)
        return StreamingEngine(model, self.engine, AdamWConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM))

    def data(self) -> Iterator[Batch]:
        """Without padding: its embedding is zero, which a random gpt-oss cannot stand."""
        inner = self.config.get_text_config()
        for batch in batches(int(inner.vocab_size), self.rows, self.sequence):
            ids = batch["input_ids"]
            if (padding := inner.pad_token_id) is not None:
                ids = ids.masked_fill(ids == padding, padding - 1 if padding else 1)
            yield {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class DeepPlan:
    """The engine's own plan at full depth, on a machine with as much more RAM as virtual depth saves.

    saved_bytes: the host memory of the layers that have none of their own. built_bytes: of the model that the engine
    takes its weights from, which lies there besides for a moment.
    """

    plan: Plan
    saved_bytes: int
    built_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.plan.host_bytes - self.saved_bytes + self.built_bytes

    def left_of(self, machine: Machine) -> Machine:
        """What this leaves to another engine beside it."""
        held, on_card = self.plan.held_bytes, machine.gpu is not None
        return replace(
            machine,
            host_available_bytes=machine.host_available_bytes - self.host_bytes - (0 if on_card else held),
            device_free_bytes=machine.device_free_bytes - held,
        )


def plan_of(subject: Subject, engine: EngineConfig, stored: int | None, machine: Machine) -> DeepPlan:
    """What the model takes with `stored` layers' storage, and whether this machine has it."""
    layouts, shell, shape = subject.layouts, subject.shell, host_shape(engine)
    kept = layouts if stored is None else layouts[:stored]
    saved = sum(role_bytes(layouts, shell, shape).values()) - sum(role_bytes(kept, shell, shape).values())
    built = shell.nbytes + sum(layout.nbytes for layout in kept)
    available = machine.host_available_bytes + saved - built
    return DeepPlan(planned(subject, engine, replace(machine, host_available_bytes=available)), saved, built)


def lacking(cases: Sequence[tuple[Deep, Subject]], machine: Machine) -> list[str]:
    """What there is too little of for engines of all cases at one time, in words."""
    found = []
    for case, subject in cases:
        plan = plan_of(subject, case.engine, case.stored, machine)
        found += [f"{case}: {problem}" for problem in plan.plan.problems]
        machine = plan.left_of(machine)
    return found


def made_virtual(cases: Sequence[Deep], machine: Machine) -> list[Deep]:
    """The cases in the storage of as many layers as fit, all at one time; ValueError if not even one layer's does."""
    subjects = [case.subject() for case in cases]
    problems: list[str] = []
    for stored in (stored for stored in STORED if stored < min(case.layers for case in cases)):
        virtual = [replace(case, stored=stored) for case in cases]
        problems = lacking(list(zip(virtual, subjects, strict=True)), machine)
        if not problems:
            return virtual
    raise ValueError("; ".join(problems) or "a model of one layer has no virtual depth")


def fitting_table(cases: Mapping[str, Deep], machine: Machine) -> str:
    """Every case, really and virtually as deep as it is, beside what is free."""
    rows: list[list[Cell]] = []
    for name, case in cases.items():
        subject = case.subject()
        for stored in (None, *STORED):
            found = plan_of(subject, case.engine, stored, machine)
            memory = [found.host_bytes / 1e9, found.plan.device_bytes / 1e9]
            verdict = "fits" if found.plan.fits else "does not fit"
            rows.append([name, str(replace(case, stored=stored)), *memory, verdict])
    free = f"{machine.host_available_bytes / 1e9:.1f} GB of RAM are free"
    return table(["", "", "RAM, GB", "device, GB", ""], rows) + f"\n{free}"
