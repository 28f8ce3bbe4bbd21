"""One command for a card, tried without one: its stages, their limits, what travels, what it records."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.autograd import DeviceType

from benchmarks import card, carry, profiled, recorded
from benchmarks.budget import Budget
from benchmarks.card import LATE, Command, Options, Outcome
from benchmarks.peers.ours import Ours
from benchmarks.shapes import TINY
from benchmarks.streaming import Workload
from benchmarks.turns import warm_up
from dashboard.sources import FolderSource
from megatrain.report import RunState
from megatrain.trace import Span

OPTIONS: dict[str, Any] = {"device": "cpu", "tiny": True}

# ---- stages ----


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, **OPTIONS)


def stage(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """The stage "tests" runs this program."""
    command = Command([sys.executable, "-c", program], {"SAID": "hello"})
    monkeypatch.setitem(card.STAGES, "tests", lambda options, seconds: command)


def test_a_stage_leaves_what_it_printed(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, "import os, sys; print(os.environ['SAID']); print('and wrong', file=sys.stderr); sys.exit(3)")
    outcome = card.run_stage("tests", options, Budget(None))
    assert outcome.verdict == "FAILED with exit code 3"
    assert card.last_lines(options.out / "tests.log") == "hello\nand wrong"


def test_a_stage_that_takes_too_long_is_ended_with_all_it_started(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "LEAST_S", 0)
    child = "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    stage(monkeypatch, f"{child}; print(c.pid, flush=True); time.sleep(600)")
    assert card.run_stage("tests", options, Budget(2.0)).verdict == LATE
    pid = int((options.out / "tests.log").read_text())
    give_up_s = time.monotonic() + 10
    while alive(pid) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_stage_is_not_begun_without_time_for_it(options: Options) -> None:
    outcome = card.run_stage("figures", options, Budget(card.LEAST_S / 2))
    assert outcome.verdict.startswith("skipped: 10 s of the time limit are left")
    assert not (options.out / "figures.log").exists()


def test_each_stage_s_command_is_understood(options: Options) -> None:
    """By the program that it starts, as far as arguments go."""
    from benchmarks import gpu

    found = card.figures(Options(options.out, "cpu", True, parts=("link", "profile")), 100.0)
    assert isinstance(found, Command)
    assert gpu.parts_of(gpu.parse(found.words[3:])) == ["link", "profile"]
    found = card.recorded(options, 100.0)
    assert isinstance(found, Command)
    assert recorded.parse(found.words[3:]).tiny
    on_a_card = card.sanitizer(Options(options.out, "cuda", False), 100.0)
    assert "compute-sanitizer" in (on_a_card if isinstance(on_a_card, str) else on_a_card.words[0])


def test_the_test_for_the_sanitizer_is_there() -> None:
    path, name = card.SANITIZED.split("::")
    assert f"def {name}(" in (card.ROOT / path).read_text()


def test_without_a_card_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card.torch.cuda, "is_available", lambda: False)
    assert card.main(["--out", str(tmp_path)]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict", "code"), [("passed", 0), ("not installed here", 0), (LATE, 1), ("FAILED", 1)])
def test_the_exit_code_says_how_it_went(
    verdict: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "run_stage", lambda name, *_: Outcome(name, verdict, 1.0))
    assert card.main(["--out", str(tmp_path), "--device", "cpu"]) == code


# ---- what travels ----


class Packages:
    """As importlib.metadata, of packages that need others."""

    def __init__(self, needs: dict[str, list[str]]) -> None:
        self._needs = needs

    def distribution(self, name: str) -> Any:
        if name not in self._needs:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(version="1.0", requires=self._needs[name])


def test_what_is_needed_in_turn_travels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "a": ["B_c>=1", 'd; extra == "more"', 'e; python_version < "3"'],
        "b-c": ["f"],
        "f": ["there"],
        "there": ["g"],
    }
    monkeypatch.setattr(carry.metadata, "distribution", Packages(needs).distribution)
    assert carry.missing(["a", "there"], {"there"}) == {"a": "1.0", "b-c": "1.0", "f": "1.0"}
    with pytest.raises(ValueError, match="g is needed there and is not installed here"):
        carry.missing(["there"], set())


def test_lists_of_packages_are_read_as_pip_prints_them() -> None:
    assert carry.names_in("Jinja2==3.1\n# said\n\nruamel.yaml\nours @ file:///x  # here\n") == {
        "jinja2",
        "ruamel-yaml",
        "ours",
    }


def test_nothing_travels_where_all_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.txt"
    there.write_text("\n".join(name for found in metadata.distributions() if (name := found.metadata["Name"])))
    assert carry.main([str(there)]) == 0
    assert capsys.readouterr().out.strip() == ""
    assert carry.main([str(tmp_path / "nowhere")]) == 2


# ---- the profiler beside the recorder ----


def event(name: str, stream: int, start: float, end: float, **more: Any) -> Any:
    about = {"device_type": DeviceType.CUDA, "is_user_annotation": False, **more}
    return SimpleNamespace(
        name=name, device_resource_id=stream, time_range=SimpleNamespace(start=start, end=end), **about
    )


def span(lane: str, start_s: float, end_s: float) -> Span:
    return Span(lane, "load", 1, 0, None, None, start_s, end_s, 0)  # type: ignore[arg-type]


def test_streams_are_told_apart_by_what_they_copy() -> None:
    events = [
        event("Memcpy HtoD (Pinned -> Device)", 20, 0, 1_000_000),
        event("Memcpy DtoH (Device -> Pinned)", 21, 500_000, 700_000),
        event("gemm", 22, 0, 400_000),
        event("gemm", 22, 300_000, 600_000),
        event("Memcpy HtoD (Pageable -> Device)", 22, 600_000, 600_010),  # a batch, on the stream of the kernels
        event("fill", 7, 0, 10),  # torch's own stream
        event("a step", 22, 0, 9_000_000, is_user_annotation=True),
        event("aten::mm", 22, 0, 9_000_000, device_type=DeviceType.CPU),
    ]
    spans = [span("h2d", 5.0, 6.01), span("d2h", 5.5, 5.7), span("compute", 5.0, 5.4), span("compute", 5.4, 5.6)]
    found = profiled.compared(spans, events)
    assert {lane: its["profiler_s"] for lane, its in found.items()} == pytest.approx(
        {"h2d": 1.0, "d2h": 0.2, "compute": 0.60001}
    )
    assert {lane: its["ratio"] for lane, its in found.items()} == pytest.approx(
        {"h2d": 1.01, "d2h": 1, "compute": 1}, abs=1e-4
    )


def test_a_ratio_that_is_off_is_shouted() -> None:
    lanes = {
        "h2d": {"recorder_s": 1.03, "profiler_s": 1.0, "ratio": 1.03},
        "d2h": {"recorder_s": 1.0, "profiler_s": 1.0, "ratio": 1.0},
    }
    h2d, d2h = profiled.summary({"lanes": lanes, "issuing": {}, "driver": {"cudaMalloc": 2}}).splitlines()[1:3]
    assert h2d.endswith("NO")
    assert d2h.endswith("yes")


def test_a_trace_of_both_on_one_clock(tmp_path: Path) -> None:
    trace, work = tmp_path / "both.trace.json.gz", Workload("cpu", TINY.with_layers(2), 16, 2)
    with work.engine(1, None) as engine:
        streams = {name: engine._executor._lanes[name].stream for name in profiled.STREAMS}
        ours = Ours(engine, work.data(64))
        warm_up(ours, 1)
        found = profiled.measure("cpu", engine, ours, 1, trace)
        assert {name: engine._executor._lanes[name].stream for name in profiled.STREAMS} == streams
    assert found["lanes"] == {}  # a CPU has no streams to profile
    assert found["issuing"]["compute"]["operations"] == 2 * 2 * 2 + 2 * 3 + 1  # layers, shell; norm
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [e for e in events if e["pid"] == profiled.OUR_PROCESS and e.get("cat") == "step"]
    products = [e["ts"] for e in events if e["pid"] != profiled.OUR_PROCESS and e.get("name") == "aten::mm"]
    assert [e["name"] for e in steps] == ["step 2"]
    first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    assert products
    assert all(first - 1000 <= at <= last + 1000 for at in products)  # microseconds


# ---- a run to look at elsewhere ----


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded")
    assert recorded.main(["--device", "cpu", "--tiny", "--steps", "10", "--out", str(out / "card.tar.gz")]) == 0
    with tarfile.open(out / "card.tar.gz") as tar:
        tar.extractall(out, filter="data")
    return out / "card"


def test_a_recorded_run_opens_elsewhere(unpacked: Path) -> None:
    source = FolderSource(unpacked)
    try:
        records, info = source.poll(), source.info()
        assert source.status().state is RunState.FINISHED
    finally:
        source.close()
    assert {step.prefetch_depth for step in records.steps} == {0, 1}
    assert len(records.steps) == 10
    assert records.spans
    assert records.memory
    assert info is not None
    assert info.h2d_bytes_per_s is not None


def test_a_recorded_run_says_nothing_of_where_it_lay(unpacked: Path) -> None:
    text = b"".join(path.read_bytes() for path in unpacked.iterdir())
    assert b"/tmp" not in text
    assert str(Path.home()).encode() not in text
    assert {path.suffix for path in unpacked.iterdir()} == {".json", ".jsonl", ".bin"}


def test_a_name_that_is_no_archive_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded.main(["--out", str(tmp_path / "run.zip")]) == 2
    assert "--out must end in .tar.gz" in capsys.readouterr().err
