"""Steering from other processes: every request is answered, nobody can hold up the run, and nothing acts too late."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from test_control import BOUND_S, LAYERS, Engine, eventually
from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context

from megatrain.control import Checks, Control
from megatrain.folder import RunFolder
from megatrain.remote import ControlServer, RemoteControl, RunUnreachableError
from megatrain.remote.protocol import WISHES, Door
from megatrain.report import Inspection, RunState, Status, TensorStats
from megatrain.steering import Knobs, Position, Steering, Wish

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets"),
]

STATUS = Status(
    RunState.PAUSED,
    3,
    Knobs(1, 2, 0),
    4,
    Position(3, "backward", 2),
    {"h2d": ["load 1"]},
    12345,
    Inspection(["backward 2"], 3, "backward", TensorStats(0.0, 1.0, 2.0, 0), None),
)


class LeisurelyControl(Control):
    """Layers take their time, as they do on a device: the interpreter is free for others meanwhile."""

    def at_layer(self, position: Position, *on_hold: Any) -> Knobs:
        time.sleep(0.0002)
        return super().at_layer(position, *on_hold)


def fresh_control() -> Control:
    visits = [(phase, layer) for phase in ("forward", "backward") for layer in range(LAYERS)]
    return LeisurelyControl(Knobs(1, 2, 0), Checks(knobs=at_most_nine, visits=visits))


def at_most_nine(knobs: Knobs) -> None:
    if knobs.weight_slots > 9:
        raise ValueError(f"{knobs.weight_slots} slots do not fit; at most 9 do")


@pytest.fixture
def control() -> Control:
    return fresh_control()


@pytest.fixture
def server(tmp_path: Path, control: Control) -> Iterator[ControlServer]:
    with closing(ControlServer(tmp_path, control, lambda: STATUS)) as opened:
        yield opened


@pytest.fixture
def remote(tmp_path: Path, server: ControlServer) -> Iterator[RemoteControl]:
    with closing(RemoteControl(tmp_path)) as opened:
        yield opened


@contextmanager
def held(control: Control, steps: int = 1) -> Iterator[Engine]:
    """An engine that is held before its first layer, and runs to its end afterwards."""
    control.pause()
    engine = Engine(control, steps).start()
    eventually(lambda: engine.held_before(0))
    yield engine
    control.resume()
    engine.join()


# ---- wishes and what becomes of them ----


def test_wishes_travel_and_say_where_they_took_effect(control: Control, remote: RemoteControl) -> None:
    with held(control) as engine:
        depth = remote.set_prefetch_depth(3)
        assert (depth.pending, str(depth)) == (True, "prefetch depth 3: takes effect at the next layer")
        step = remote.step_layer()
        assert step.wait(BOUND_S)
        assert step.effect == Position(0, "forward", 0)
        assert depth.effect == Position(0, "forward", 0)  # heard on the way
        eventually(lambda: engine.held_before(1))
        assert remote.run_to_layer(3).wait(BOUND_S)
        assert engine.held_before(3)
    assert [knobs.prefetch_depth for _, _, knobs in engine.ran] == [3] * LAYERS


def test_each_wish_reaches_the_method_of_its_name(tmp_path: Path) -> None:
    called: list[tuple[str, dict[str, Any]]] = []

    class Everything:
        def __getattr__(self, name: str) -> Callable[..., Wish]:
            def wish(**arguments: Any) -> Wish:
                called.append((name, arguments))
                return Wish(name)

            return wish

    steering: Any = Everything()
    with closing(ControlServer(tmp_path, steering, lambda: STATUS)), closing(RemoteControl(tmp_path)) as remote:
        as_steering: Steering = remote
        wishes = [
            as_steering.pause(),
            as_steering.resume(),
            as_steering.step_layer(),
            as_steering.finish_step(),
            as_steering.run_to_layer(3, "backward"),
            as_steering.run_to_layer(3),
            as_steering.set_prefetch_depth(4),
            as_steering.set_grad_buffers(5),
            as_steering.set_resident_layers(6),
            as_steering.set_micro_batch_size(7),
            as_steering.checkpoint(),
            as_steering.stop(),
            as_steering.stop(save=True),
        ]
    assert [wish.text for wish in wishes] == [name for name, _ in called]
    assert [arguments for _, arguments in called] == [
        *[{}] * 4,
        {"layer": 3, "phase": "backward"},
        {"layer": 3, "phase": None},
        *[{"depth": 4}, {"count": 5}, {"count": 6}, {"rows": 7}],
        *[{}, {"save": False}, {"save": True}],
    ]
    assert {name for name, _ in called} == set(WISHES)


def test_the_status_arrives_as_it_was_said(remote: RemoteControl) -> None:
    assert remote.status() == STATUS


def test_a_refusal_comes_with_the_runs_own_reason(control: Control, remote: RemoteControl) -> None:
    with pytest.raises(ValueError, match=r"^10 slots do not fit; at most 9 do$"):
        remote.set_prefetch_depth(9)
    for depth in (-1, 1.5, True, "2", None, float("nan"), [1], object()):
        with pytest.raises(ValueError, match=r"^prefetch_depth must be a whole number ≥ 0"):
            remote.set_prefetch_depth(depth)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^run to the forward of layer 9: no step comes by.*; layers are 0 to 3"):
        remote.run_to_layer(9, "forward")
    assert control.knobs == Knobs(1, 2, 0)


def test_a_later_wish_overtakes_an_earlier_one(control: Control, remote: RemoteControl) -> None:
    first = remote.pause()
    second = remote.run_to_layer(2)
    assert first.wait(BOUND_S)
    assert first.overtaken
    assert second.pending
    assert not second.wait(0.05)


def test_a_wish_between_two_steps_has_no_position(remote: RemoteControl) -> None:
    wish = remote.stop()
    assert wish.wait(BOUND_S)
    assert (wish.effect, wish.overtaken) == (None, False)
    with pytest.raises(ValueError, match="the run is stopped, or finishing its last step; start another run"):
        remote.pause()


def test_polling_hears_without_waiting(control: Control, remote: RemoteControl) -> None:
    remote.poll()  # nothing was asked yet
    wish = remote.pause()
    remote.poll()
    assert wish.pending
    control.resume()
    eventually(lambda: remote.poll() or not wish.pending)
    assert wish.overtaken


def test_closing_the_server_tells_who_waits(control: Control, server: ControlServer, remote: RemoteControl) -> None:
    wish, depth = remote.pause(), remote.set_prefetch_depth(2)
    server.close()
    assert wish.wait(BOUND_S)
    assert wish.overtaken
    assert depth.overtaken
    assert not server_file(server).exists()
    server.close()


def test_what_took_effect_last_is_heard_after_the_end(
    control: Control, server: ControlServer, remote: RemoteControl
) -> None:
    with held(control):
        wish = remote.set_prefetch_depth(2)
    server.close()  # looks once more before it goes
    with pytest.raises(RunUnreachableError):
        remote.status()
    assert (wish.effect, wish.overtaken) == (Position(0, "forward", 0), False)


def server_file(server: ControlServer) -> Path:
    return Path(server._door.path)


# ---- runs that do not answer ----


def test_nobody_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with (
            closing(RemoteControl(folder)) as remote,
            pytest.raises(
                RunUnreachableError, match=rf"nobody answers at {folder}/control.sock: .*RunFolder\('{folder}'"
            ),
        ):
            remote.status()


def test_a_server_that_comes_later_and_one_that_replaces_it(tmp_path: Path, control: Control) -> None:
    """The same object steers whichever run is there; a wish that the first did not meet is not met by the second."""
    with closing(RemoteControl(tmp_path)) as remote:
        with pytest.raises(RunUnreachableError):
            remote.stop()
        with closing(ControlServer(tmp_path, control, lambda: STATUS)):
            pause = remote.pause()
        second = fresh_control()
        with closing(ControlServer(tmp_path, second, lambda: replace(STATUS, steps_done=9))):
            assert remote.status().steps_done == 9
            assert pause.overtaken
            assert not second.stopping
            assert not second.paused


def test_a_server_that_is_too_busy(tmp_path: Path, control: Control) -> None:
    asked, answer = threading.Event(), threading.Event()

    def status() -> Status:
        asked.set()
        assert answer.wait(BOUND_S)
        return STATUS

    with (
        closing(ControlServer(tmp_path, control, status)),
        closing(RemoteControl(tmp_path, timeout_s=0.05)) as remote,
    ):
        with pytest.raises(RunUnreachableError, match=r"did not answer 'status' within 0.05 s.*Ask again later"):
            remote.status()
        with pytest.raises(RunUnreachableError, match=r"did not answer 'pause'"):
            remote.pause()
        answer.set()
        eventually(lambda: control.paused)  # it heard, late; that answer is not taken for another one's
        remote._timeout_s = BOUND_S
        assert remote.status() == STATUS
        assert remote.resume().text == "resume"


SERVE = """
import sys, time
from megatrain.control import Control
from megatrain.remote import ControlServer
from megatrain.report import RunState, Status
from megatrain.steering import Knobs
server = ControlServer(sys.argv[1], Control(Knobs(1, 2, 0)), lambda: Status(RunState.RUNNING))
print("ready", flush=True)
time.sleep(100)
"""


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another Python, which must not load torch."""
    child = subprocess.Popen(
        [sys.executable, "-c", code + "\nassert 'torch' not in sys.modules", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        yield child
        if child.poll() is None:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_server_whose_process_dies_is_noticed_at_once_and_replaced(tmp_path: Path, control: Control) -> None:
    with closing(RemoteControl(tmp_path, timeout_s=1000)) as remote:
        with process(SERVE, tmp_path) as run:
            assert said(run) == "ready"
            assert remote.status().state is RunState.RUNNING
            wish = remote.pause()
            run.kill()
            assert wish.wait(BOUND_S)
            assert wish.overtaken
        assert RunFolder(tmp_path).socket.exists()  # a killed process cannot clean up
        with pytest.raises(RunUnreachableError, match="nobody answers"):
            remote.status()
        with closing(ControlServer(tmp_path, control, lambda: STATUS)):
            assert remote.status() == STATUS


def test_a_server_that_dies_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    with process(SERVE, tmp_path) as run, closing(RemoteControl(tmp_path, timeout_s=1000)) as remote:
        assert said(run) == "ready"
        remote.status()
        run.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(run.pid).status() == psutil.STATUS_STOPPED)
        killer = threading.Timer(0.1, run.kill)
        killer.start()
        with pytest.raises(RunUnreachableError, match="nobody answers"):
            remote.pause()
        killer.join()


# ---- viewers of every kind ----


def test_a_second_process_steers(tmp_path: Path, control: Control, server: ControlServer) -> None:
    code = """
import sys
from megatrain.remote import RemoteControl
remote = RemoteControl(sys.argv[1])
wish = remote.run_to_layer(2, "forward")
assert wish.wait(20)
print(wish, flush=True)
print(remote.set_prefetch_depth(2), remote.status().steps_done, flush=True)
input()
remote.close()
"""
    with held(control) as engine, process(code, tmp_path) as viewer:
        assert said(viewer) == "run to the forward of layer 2: since step 0, forward of layer 2"
        assert engine.held_before(2)
        assert said(viewer) == "prefetch depth 2: takes effect at the next layer 3"
        viewer.communicate("\n")
        assert viewer.returncode == 0


def test_a_viewer_that_is_killed_does_not_matter(tmp_path: Path, control: Control, remote: RemoteControl) -> None:
    code = """
import sys
from megatrain.remote import RemoteControl
remote = RemoteControl(sys.argv[1])
remote.pause()
print("asked", flush=True)
while True:
    remote.status()
"""
    with process(code, tmp_path) as viewer:
        assert said(viewer) == "asked"
        viewer.kill()
        viewer.wait()
    wish = remote.resume()  # and the pause of the dead is told to nobody
    engine = Engine(control).start()
    assert wish.wait(BOUND_S)
    engine.join()
    assert remote.status() == STATUS


def raw_viewer(folder: Path, *, unread: int = 1000) -> Any:
    """A socket that sends whatever a program gone wrong may send."""
    context = Context()
    socket = context.socket(SocketType.DEALER)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.setsockopt(SocketOption.RCVHWM, unread)
    door = Door(folder)
    socket.connect(door.address)

    @contextmanager
    def opened() -> Iterator[Any]:
        yield socket
        socket.close()
        context.term()
        door.close()

    return opened()


def test_a_viewer_that_never_reads_is_dropped(tmp_path: Path, remote: RemoteControl) -> None:
    request = json.dumps({"id": "x" * 10_000, "do": "status"}).encode()
    with raw_viewer(tmp_path, unread=1) as deaf:
        for _ in range(3000):  # 30 MB of answers: more than fit into any buffer between
            deaf.send(request)
        assert remote.status() == STATUS


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"pause"], "a request must be JSON: Expecting value"),
        ([b"\xff\xfe\x00"], "a request must be JSON"),
        ([b"[" * 60_000], "a request must be JSON"),
        ([b"[]"], "a request must be a JSON object; got a list"),
        ([b""], "a request must be JSON"),
        ([b"{}", b"{}"], "a request must be one frame of JSON; got 2"),
        ([b"{}"], "a run can be asked for status, pause, .*; got None"),
        ([b'{"do": ["pause"]}'], r"a run can be asked for status, .*; got \['pause'\]"),
        ([b'{"do": "close"}'], "a run can be asked for .*; got 'close'"),
        ([b'{"do": "begin_step"}'], "a run can be asked for .*; got 'begin_step'"),
        ([b'{"do": "__class__"}'], "a run can be asked for .*; got '__class__'"),
        ([b'{"do": "pause", "with": {"layer": 1}}'], r"pause takes the arguments \[\]; got {'layer': 1}"),
        ([b'{"do": "run_to_layer", "with": {"layer": 1}}'], r"run_to_layer takes the arguments \['layer', 'phase'\]"),
        ([b'{"do": "stop", "with": 3}'], r"stop takes the arguments \['save'\]; got 3"),
    ],
)
def test_a_malformed_message_is_answered(
    frames: list[bytes], reason: str, tmp_path: Path, remote: RemoteControl
) -> None:
    with raw_viewer(tmp_path) as odd:
        odd.send_multipart(frames)
        assert odd.poll(BOUND_S * 1e3)
        answer = json.loads(odd.recv())
        with pytest.raises(ValueError, match=reason):
            raise ValueError(answer["refused"])
    assert remote.status() == STATUS


def test_a_message_without_end_ends_its_viewer_only(tmp_path: Path, remote: RemoteControl) -> None:
    with raw_viewer(tmp_path) as odd:
        odd.send(b"[" * 10_000_000)
        assert remote.status() == STATUS
        assert not odd.poll(50)


def test_a_steering_that_breaks_is_answered_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Status:
        raise KeyError("knobs")

    with closing(ControlServer(tmp_path, fresh_control(), broken)), closing(RemoteControl(tmp_path)) as remote:
        with pytest.raises(ValueError, match="KeyError: 'knobs'"):
            remote.status()
        assert remote.pause().pending
    assert "a viewer's request failed: {'id': 0, 'do': 'status'" in caplog.text


def test_a_thousand_random_wishes_are_all_answered(tmp_path: Path, control: Control, server: ControlServer) -> None:
    """Five threads of two viewers here and one other process, while an engine runs: no deadlock, nothing forgotten."""
    engine = Engine(control, steps=10**9).start()
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from test_remote import meddle
print(len(meddle(sys.argv[1], seed=9, count=250)))
"""
    answered: list[int] = []

    def run(shared: RemoteControl, seed: int) -> None:
        answered.append(len(meddle_with(shared, seed, 150)))

    with process(code, tmp_path, Path(__file__).parent) as other:
        with closing(RemoteControl(tmp_path, BOUND_S)) as first, closing(RemoteControl(tmp_path, BOUND_S)) as second:
            threads = [threading.Thread(target=run, args=((first, second)[seed % 2], seed)) for seed in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_S)
                assert not thread.is_alive()
        assert said(other) == "250"
    assert answered == [150] * 5
    with closing(RemoteControl(tmp_path)) as remote:
        assert remote.stop().wait(BOUND_S)
    engine.join()
    visited = [(step, layer) for step, layer, _ in engine.ran]
    assert visited == [(number // LAYERS, number % LAYERS) for number in range(len(visited))]


def meddle(folder: str, seed: int, count: int) -> list[Wish | str]:
    with closing(RemoteControl(folder, BOUND_S)) as remote:
        return meddle_with(remote, seed, count)


def meddle_with(remote: RemoteControl, seed: int, count: int) -> list[Wish | str]:
    """Ask for anything but the end, run on, and return what was answered; all of it must come to something."""
    chance = random.Random(seed)
    phases: list[Literal["forward", "backward"] | None] = ["forward", "backward", None]
    deeds: list[Callable[[], Wish]] = [
        remote.pause,
        remote.resume,
        remote.step_layer,
        remote.finish_step,
        lambda: remote.run_to_layer(chance.randrange(LAYERS + 1), chance.choice(phases)),
        lambda: remote.set_prefetch_depth(chance.randrange(-1, 10)),
        lambda: remote.set_grad_buffers(chance.randrange(4)),
        lambda: remote.set_resident_layers(chance.randrange(4)),
        lambda: remote.set_micro_batch_size(chance.randrange(3)),
    ]
    answers: list[Wish | str] = []
    for _ in range(count):
        try:
            answers.append(chance.choice(deeds)())
        except ValueError as refusal:
            answers.append(str(refusal))
    give_up_s = time.monotonic() + BOUND_S
    for answer in answers:
        while isinstance(answer, Wish) and not answer.wait(0.05):  # another viewer may have held the run again
            assert time.monotonic() < give_up_s, str(answer)
            remote.resume()
    return answers


# ---- the socket ----


def test_a_folder_with_a_very_long_path(tmp_path: Path, control: Control) -> None:
    folder = tmp_path.joinpath(*["a-rather-long-name-for-a-folder-of-runs"] * 6, "run")
    folder.mkdir(parents=True)
    assert len(str(folder)) > 200
    with closing(ControlServer(folder, control, lambda: STATUS)), closing(RemoteControl(folder)) as remote:
        assert remote.status() == STATUS
    assert list(folder.iterdir()) == []


def test_where_paths_must_be_short_a_long_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Door("/tmp/run").address == "ipc:///tmp/run/control.sock"
    with pytest.raises(ValueError, match=r"at most 100 bytes on this system; .*: choose a folder with a shorter path"):
        Door(tmp_path / ("x" * 100))


def test_the_socket_is_for_its_user_only(tmp_path: Path, server: ControlServer) -> None:
    assert RunFolder(tmp_path).socket.stat().st_mode & 0o777 == 0o600


def test_a_server_does_not_remove_the_next_ones_socket(tmp_path: Path, control: Control) -> None:
    first = ControlServer(tmp_path, control, lambda: STATUS)
    with closing(ControlServer(tmp_path, control, lambda: STATUS)), closing(RemoteControl(tmp_path)) as remote:
        first.close()
        assert remote.status() == STATUS


def test_nothing_stays_open(tmp_path: Path, control: Control) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("descriptors are listed on Linux only")
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with closing(ControlServer(tmp_path, control, lambda: STATUS)), closing(RemoteControl(tmp_path)) as remote:
            remote.status()
        with closing(RemoteControl(tmp_path)) as remote, pytest.raises(RunUnreachableError):
            remote.status()
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_a_closed_remote_control_says_so(remote: RemoteControl) -> None:
    wish = remote.pause()
    remote.close()
    assert wish.overtaken
    remote.poll()
    with pytest.raises(RuntimeError, match="this RemoteControl is closed; make another one"):
        remote.status()


def test_refuses_not_to_wait(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timeout_s must be a number of seconds > 0; got 0"):
        RemoteControl(tmp_path, timeout_s=0)
