"""Whether the stand-in stands in: what it does truly, and that it notices what it should. Not collected by itself:

python tests/standin -- python -m pytest tests/standin/checks.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

LARGE = 256 << 20  # bytes; such a copy takes long enough for the next line to come before its end
ALREADY_REGISTERED, NOT_REGISTERED, INVALID = 712, 713, 1

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "Stand-in for CUDA",
    reason="runs on the stand-in: python tests/standin -- …",
)


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    with suppress(RuntimeError):
        launch()


def launch() -> None:
    torch.zeros(1, device="cuda")


@pytest.fixture
def host() -> Tensor:
    return torch.ones(LARGE, dtype=torch.uint8)


@contextmanager
def pinned(tensor: Tensor) -> Iterator[Tensor]:
    assert register(tensor) == 0
    yield tensor
    torch.cuda.synchronize()
    assert unregister(tensor) == 0


def register(tensor: Tensor) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))


def unregister(tensor: Tensor) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))


def empty(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def test_a_copy_of_pinned_memory_is_asynchronous_and_arrives(host: Tensor) -> None:
    with pinned(host):
        there = empty(LARGE).copy_(host, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        assert not landed.query()
        landed.synchronize()
        assert torch.equal(there.cpu(), host)


def test_a_stream_that_waits_reads_what_another_wrote_and_one_that_does_not_reads_what_was() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    twos, tail = torch.full((LARGE,), 2, dtype=torch.uint8).pin_memory(), torch.zeros(2, dtype=torch.uint8).pin_memory()
    there, landed = empty(LARGE), torch.cuda.Event()
    with torch.cuda.stream(first):
        there.copy_(twos, non_blocking=True)
        landed.record()
    with torch.cuda.stream(second):
        tail[:1].copy_(there[-1:], non_blocking=True)
        second.wait_event(landed)
        tail[1:].copy_(there[-1:], non_blocking=True)
    second.synchronize()
    assert tail[0] != 2
    assert tail[1] == 2


def test_the_time_between_events_is_that_of_the_copy_between_them(host: Tensor) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pinned(host):
        start.record()
        there = empty(LARGE).copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
    assert there.is_cuda
    assert start.elapsed_time(end) > 1


def test_memory_that_is_unpinned_under_a_copy_is_noticed(host: Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    with pinned(host):
        there = empty(LARGE).copy_(host, non_blocking=True)
        assert unregister(host) == INVALID
    assert there.is_cuda
    assert "unpinned under a copy in flight" in capfd.readouterr().err


def test_a_copy_across_two_registrations_is_refused(host: Tensor) -> None:
    with pinned(host[: LARGE // 2]), pinned(host[LARGE // 2 :]), pytest.raises(RuntimeError, match="code 1"):
        empty(LARGE).copy_(host, non_blocking=True)


def test_registrations_are_kept_count_of(host: Tensor) -> None:
    with pinned(host):
        assert host.is_pinned()
        assert register(host) == ALREADY_REGISTERED
    assert not host.is_pinned()
    assert unregister(host) == NOT_REGISTERED


def test_an_error_that_nobody_looked_at_fails_the_next_kernel(host: Tensor) -> None:
    assert unregister(host) == NOT_REGISTERED
    with pytest.raises(RuntimeError, match=f"code {NOT_REGISTERED}"):
        launch()
    launch()


def test_memory_of_the_card_ends() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        empty(total + 1)
    assert empty(total // 2).is_cuda
