"""Where host memory and the optimizer's threads lie on a machine of several NUMA nodes, or of many cores.

Linux gives a page to the node of the thread that touches it first. So memory is placed by threads that are bound to
a node and touch what is to lie there; nothing but the standard library is needed. A machine of one node and fewer than
four cores is left as it is. What is computed does not depend on any of this.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pynvml
import torch

SYS = Path("/sys")
STRIPE_BYTES = 64 << 20  # dealt out to the nodes in turn; many huge pages, and far less than a layer
FREE_SHARE = 0.95  # of a node's free memory: the rest of the process needs some, too
TOUCHING_THREADS = 8  # of each node: clearing pages is bound by memory, not by cores
FEWEST_CORES = 4  # with fewer, the optimizer needs them all

Cpus = frozenset[int]


@dataclass(frozen=True)
class Node:
    """A NUMA node with the CPUs of it that this process may use."""

    number: int
    cpus: Cpus
    free_bytes: int


@dataclass(frozen=True)
class Topology:
    """nodes: those that have CPUs for this process. device_node: the number of the one that the GPU is attached to."""

    nodes: tuple[Node, ...]
    device_node: int | None = None

    @classmethod
    def read(cls, usable: Cpus, pci_address: str | None = None, sys: Path = SYS) -> Topology:
        """What Linux says of itself; no nodes elsewhere. pci_address: of the GPU, such as 0000:3b:00.0."""
        folders = sorted((sys / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
        nodes = [_node(folder, usable) for folder in folders]
        return cls(tuple(node for node in nodes if node.cpus), _node_of_device(sys, pci_address))

    @property
    def cpus(self) -> Cpus:
        return frozenset().union(*(node.cpus for node in self.nodes))

    @property
    def near_device(self) -> Node | None:
        """The GPU's node, or None where nobody knows it."""
        return next((node for node in self.nodes if node.number == self.device_node), None)


@dataclass(frozen=True)
class Placement:
    """memory: CPUs of each node that takes part, in turn; empty = each page lies where it is first used.

    host_cpus: where the optimizer's threads run; None = anywhere.
    """

    memory: tuple[Cpus, ...] = ()
    host_cpus: Cpus | None = None

    def touch(self, memory: torch.Tensor) -> None:
        """Let fresh zeroed memory (uint8) come into being on its nodes."""
        if not self.memory:
            return
        address, nbytes = memory.data_ptr(), memory.nbytes

        def clear(turn: int, node: int, threads: int) -> None:
            bind(self.memory[node])
            stripes = range(node * STRIPE_BYTES, nbytes, len(self.memory) * STRIPE_BYTES)
            for start in islice(stripes, turn, None, threads):
                ctypes.memset(address + start, 0, min(STRIPE_BYTES, nbytes - start))  # without the GIL

        work = [
            (turn, node, threads)
            for node, cpus in enumerate(self.memory)
            for threads in [min(TOUCHING_THREADS, len(cpus))]
            for turn in range(threads)
        ]
        with ThreadPoolExecutor(len(work)) as pool:
            for done in [pool.submit(clear, *each) for each in work]:
                done.result()


def bind(cpus: Cpus) -> None:
    """Let this thread, and those it starts, run on `cpus` only; where the system refuses, it runs anywhere."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def choose(topology: Topology, nbytes: int, *, cuda: bool, sys: Path = SYS) -> Placement:
    """Where `nbytes` of host memory are to lie, and where the optimizer is to run.

    All on the GPU's node if it fits there, else on all nodes in turn. With a GPU the optimizer leaves one core, of the
    GPU's node, to the threads that issue work; without one, compute needs all cores.
    """
    memory: tuple[Cpus, ...] = ()
    near = topology.near_device
    if len(topology.nodes) > 1:
        fits = near is not None and nbytes <= FREE_SHARE * near.free_bytes
        memory = (near.cpus,) if fits and near is not None else tuple(node.cpus for node in topology.nodes)
    host_cpus = None
    if cuda and len(topology.cpus) >= FEWEST_CORES:
        host_cpus = topology.cpus - _core_of(min(near.cpus if near else topology.cpus), sys)
    return Placement(memory, host_cpus or None)


def placement_for(nbytes: int, device: torch.device) -> Placement:
    """The placement of `nbytes` of host memory on this machine."""
    usable = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    cuda = device.type == "cuda"
    return choose(Topology.read(usable, _pci_address() if cuda else None), nbytes, cuda=cuda)


def _node(folder: Path, usable: Cpus) -> Node:
    free = re.search(r"MemFree:\s*(\d+) kB", _text(folder / "meminfo"))
    cpus = frozenset(_numbers(_text(folder / "cpulist"))) & usable
    return Node(int(folder.name[4:]), cpus, 1024 * int(free[1]) if free else 0)


def _node_of_device(sys: Path, pci_address: str | None) -> int | None:
    number = _text(sys / "bus/pci/devices" / (pci_address or "none") / "numa_node").strip()
    return int(number) if number.isdigit() else None  # -1 = the firmware does not say


def _core_of(cpu: int, sys: Path) -> Cpus:
    """A CPU with those that share its core."""
    siblings = _text(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return frozenset({cpu, *_numbers(siblings)})


def _numbers(text: str) -> Iterable[int]:
    """The numbers in a list as Linux writes it: 0-3,8,10-11."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _pci_address() -> str | None:
    """Of torch's current CUDA device, as /sys spells it; None where the driver does not say."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    try:
        pynvml.nvmlInit()
        bus: str | bytes = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")).busId
    except pynvml.NVMLError:
        return None
    text = bus.decode() if isinstance(bus, bytes) else bus
    return text.lower()[-len("0000:3b:00.0") :]  # NVML writes eight digits of the domain
