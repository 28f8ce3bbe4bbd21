"""Host memory and threads on made-up machines: what is read from /sys, what is chosen, and what is touched."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain import placement
from megatrain.activations import OffloadedInputs, offloaded_bytes
from megatrain.host import Arena, HostShape, HostStore
from megatrain.layout import Layout, TensorSpec
from megatrain.placement import Node, Placement, Topology, bind, choose, placement_for

GPU = "0000:3b:00.0"
GB = 10**9


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def made_up(root: Path, nodes: dict[int, tuple[str, int]], gpu_node: int | None = None) -> Path:
    """nodes: number → CPUs as Linux lists them, and free kB."""
    for number, (cpus, free_kb) in nodes.items():
        folder = root / f"devices/system/node/node{number}"
        write(folder / "cpulist", cpus + "\n")
        write(folder / "meminfo", f"Node {number} MemTotal:  999999999 kB\nNode {number} MemFree:   {free_kb} kB\n")
    if gpu_node is not None:
        write(root / f"bus/pci/devices/{GPU}/numa_node", f"{gpu_node}\n")
    return root


def cpus(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


TWO = {0: ("0-3,8-11", 100), 1: ("4-7,12-15", 50)}
ALL = cpus(*range(16))


def test_nodes_cpus_and_free_memory_are_read(tmp_path: Path) -> None:
    found = Topology.read(ALL, GPU, made_up(tmp_path, {**TWO, 10: ("16", 7)}, gpu_node=1))
    first, second = cpus(0, 1, 2, 3, 8, 9, 10, 11), cpus(4, 5, 6, 7, 12, 13, 14, 15)
    assert found == Topology((Node(0, first, 102_400), Node(1, second, 51_200)), 1)  # nobody may use CPU 16
    assert found.near_device == found.nodes[1]
    assert found.cpus == ALL


def test_a_job_sees_the_cpus_that_it_owns(tmp_path: Path) -> None:
    found = Topology.read(cpus(2, 4), None, made_up(tmp_path, TWO))
    assert [node.cpus for node in found.nodes] == [cpus(2), cpus(4)]


@pytest.mark.parametrize(("written", "address"), [(-1, GPU), (1, "0000:00:00.0"), (None, GPU), (1, None)])
def test_a_card_of_which_nobody_says_where_it_is(tmp_path: Path, written: int | None, address: str | None) -> None:
    found = Topology.read(ALL, address, made_up(tmp_path, TWO, gpu_node=written))
    assert (found.device_node, found.near_device) == (None, None)


def test_a_system_without_sys(tmp_path: Path) -> None:
    assert Topology.read(ALL, GPU, tmp_path) == Topology(())
    assert choose(Topology(()), GB, cuda=True) == Placement()


NEAR = Topology((Node(0, cpus(0, 1, 2, 3), 10 * GB), Node(1, cpus(4, 5, 6, 7), 20 * GB)), 1)


def test_memory_lies_on_the_cards_node_if_it_fits() -> None:
    assert choose(NEAR, 18 * GB, cuda=True).memory == (cpus(4, 5, 6, 7),)
    assert choose(NEAR, 20 * GB, cuda=True).memory == (cpus(0, 1, 2, 3), cpus(4, 5, 6, 7))


def test_memory_lies_on_all_nodes_where_no_card_is_known() -> None:
    assert choose(Topology(NEAR.nodes), GB, cuda=False).memory == (cpus(0, 1, 2, 3), cpus(4, 5, 6, 7))


def test_one_node_is_left_as_it_is() -> None:
    assert choose(Topology(NEAR.nodes[:1], 0), GB, cuda=False) == Placement()


def test_the_optimizer_leaves_a_core_near_the_card(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/cpu4/topology/thread_siblings_list", "4,6\n")
    assert choose(NEAR, GB, cuda=True, sys=tmp_path).host_cpus == cpus(0, 1, 2, 3, 5, 7)
    assert choose(Topology(NEAR.nodes[:1]), GB, cuda=True, sys=tmp_path).host_cpus == cpus(1, 2, 3)


def test_the_optimizer_keeps_all_cores_without_a_card_or_with_few() -> None:
    assert choose(NEAR, GB, cuda=False).host_cpus is None
    assert choose(Topology((Node(0, cpus(0, 1, 2), GB),)), GB, cuda=True).host_cpus is None


def test_this_machine_is_read_without_an_error() -> None:
    found = placement_for(GB, torch.device("cpu"))
    assert found.host_cpus is None


# ---- touching ----


@given(nbytes=st.integers(0, 5000), nodes=st.integers(1, 3), per_node=st.integers(1, 3), stripe=st.integers(1, 900))
def test_every_byte_is_touched_once_by_a_thread_of_its_node(
    nbytes: int, nodes: int, per_node: int, stripe: int
) -> None:
    memory = torch.full((nbytes,), 7, dtype=torch.uint8)
    where = threading.local()
    touched: list[tuple[int, int, int]] = []
    begin = memory.data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "STRIPE_BYTES", stripe)
        patch.setattr(placement, "bind", lambda cpus: setattr(where, "node", min(cpus) // 10))

        def clear(address: int, value: int, length: int) -> None:
            touched.append((address - begin, length, where.node))

        patch.setattr(placement.ctypes, "memset", clear)
        on_nodes = tuple(frozenset(range(10 * node, 10 * node + per_node)) for node in range(nodes))
        Placement(on_nodes).touch(memory)
    assert [start for start, _, _ in sorted(touched)] == list(range(0, nbytes, stripe))
    assert sum(length for _, length, _ in touched) == nbytes
    assert all(start // stripe % nodes == node for start, _, node in touched)


def test_touched_memory_is_zero() -> None:
    memory = torch.full((1000,), 7, dtype=torch.uint8)
    Placement().touch(memory)
    assert memory.eq(7).all()  # nothing to place
    Placement((cpus(*range(4)),)).touch(memory)
    assert memory.eq(0).all()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_a_thread_is_bound_and_no_other_is() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def work() -> None:
        bind(frozenset({min(before)}))
        seen.append(os.sched_getaffinity(0))
        bind(frozenset({1 << 14}))  # there is no such CPU
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before


def test_every_arena_is_touched_before_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(Arena, "_register", lambda arena: order.append((arena.role, "registered")))
    layout = Layout.of([TensorSpec("w", (300,), torch.float32, trained=True)])
    shape = HostShape(split=False, moment_bytes=4, keep_gradients=True, slabs=3)
    store = HostStore([layout], layout, shape, pin=True, touch=lambda memory: order.append(memory.nbytes))
    sizes = [arena.nbytes for arena in store.arenas.values()]
    assert [each for each in order if isinstance(each, int)] == sizes
    assert order.index(("weights", "registered")) == 1
    order.clear()
    OffloadedInputs(2, 3, 64, pin=True, touch=lambda memory: order.append(memory.nbytes)).close()
    assert order == [offloaded_bytes(2, 3, 64), ("offloaded layer inputs", "registered")]
