"""Contenders in processes of their own: what they answer, and that no failure of one is silent or stops the others."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from fresh_work import openmp_threads

from benchmarks.apart import Apart, ContenderError
from benchmarks.field import Field
from benchmarks.fresh import in_fresh_process
from benchmarks.peers.contender import Task
from benchmarks.shapes import TINY

TASK = Task(TINY, rows=2, tokens=8, dtype="float32")


def test_those_that_fail_are_named_and_the_others_go_on() -> None:
    entries = {name: f"contenders:{name}" for name in ("idle", "raises", "dies", "cannot_be_built")}
    turns: list[str] = []
    with Field(entries, TASK, threads=1, patience_s=120) as field:
        field.build(1, turns.append)
        assert [*field.apart] == ["idle", "raises"]
        field.take_turns(2, turns.append)
        field.take_turns(2, turns.append)
        assert [*field.apart] == ["idle"]
        idle = field.apart["idle"]
        assert idle.gives_up == "all work"
        figures = idle.figures([2])
        assert figures["process"] != os.getpid()
        assert (figures["timed"], figures["openmp"]) == ([2], "1")
    assert turns == ["idle", "raises", "dies", "cannot_be_built", "idle", "raises", "idle"]
    assert field.timings["idle"].timed == [2, 3, 5, 6]
    assert field.rss_growth_bytes["idle"].keys() == {"building", "training"}
    reasons = {name: error.reason for name, error in field.failures.items()}
    assert reasons == {
        "raises": "RuntimeError: the third step is too much",
        "dies": "its process ended with exit code 9",
        "cannot_be_built": "ImportError: no float32 today",
    }
    assert "contenders.py" in str(field.failures["raises"])  # the traceback of the process
    assert "out of memory" in str(field.failures["dies"])
    assert not psutil.pid_exists(figures["process"])


def test_one_that_does_not_answer_is_ended() -> None:
    apart = Apart("contenders:hangs", TASK, threads=1, patience_s=120)
    apart.wait_until_built()
    apart.patience_s, began = 0.2, time.monotonic()
    with pytest.raises(ContenderError, match=r"waiting for Godot\nno answer within 0\.2 s, so its process was ended"):
        apart.step()
    with pytest.raises(ContenderError, match="its process ended with exit code -9"):
        apart.step()
    apart.close()
    assert time.monotonic() - began < 60


def test_a_fresh_process_starts_with_its_threads_and_its_errors_come_back() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    assert in_fresh_process(3, openmp_threads, limit=3) == 3
    with pytest.raises(ValueError, match="3 threads are too many"):
        in_fresh_process(3, openmp_threads, 2)
    assert os.environ.get("OMP_NUM_THREADS") == before
