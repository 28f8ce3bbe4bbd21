"""Steering from other threads: what the engine does at each layer, and that it never hangs or runs too far."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from megatrain.control import Checks, Control, State, StoppedError
from megatrain.steering import Knobs, Position

pytestmark = pytest.mark.timeout(60)

BOUND_S = 20.0  # far more than anything here takes; a hang ends as a failure
LAYERS = 4


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + BOUND_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < give_up_s, "this never came true"
        tick.wait(0.001)


class Engine:
    """Visits layers in steps on a thread of its own, as the real one does."""

    def __init__(self, control: Control, steps: int = 1) -> None:
        self.control = control
        self.steps = steps
        self.ran: list[tuple[int, int, Knobs]] = []  # step, layer, knobs
        self.refused: StoppedError | None = None
        self.hold = threading.Event()  # cleared: layers take for ever
        self.hold.set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Engine:
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for step in range(self.steps):
            try:
                self.control.begin_step()
            except StoppedError as error:
                self.refused = error
                return
            for layer in range(LAYERS):
                knobs = self.control.at_layer(Position(step, "forward", layer))
                self.ran.append((step, layer, knobs))
                assert self.hold.wait(BOUND_S)
            self.control.end_step()

    @property
    def layers(self) -> list[int]:
        return [layer for _, layer, _ in self.ran]

    def held_before(self, layer: int) -> bool:
        position = self.control.position
        return self.control.state is State.PAUSED and position is not None and position.layer == layer


def control(check: Callable[[Knobs], None] = lambda _: None) -> Control:
    return Control(Knobs(prefetch_depth=1, grad_buffers=2, resident_layers=0), Checks(knobs=check))


def shown(steered: Control) -> State:
    return steered.state


def test_states_of_a_step() -> None:
    steered = control()
    assert shown(steered) is State.IDLE
    steered.begin_step()
    assert shown(steered) is State.RUNNING
    assert steered.at_layer(Position(0, "forward", 0)) == steered.knobs
    position = steered.position
    assert position == Position(0, "forward", 0)
    steered.end_step()
    assert shown(steered) is State.IDLE
    assert steered.position is None
    steered.stop()
    assert shown(steered) is State.STOPPED


def test_pause_holds_before_the_next_layer_and_resume_goes_on() -> None:
    steered = control()
    steered.pause()
    assert steered.paused
    assert shown(steered) is State.IDLE  # nothing to hold yet
    engine = Engine(steered).start()
    eventually(lambda: engine.held_before(0))
    assert engine.ran == []
    steered.resume()
    engine.join()
    assert engine.layers == [0, 1, 2, 3]
    assert steered.knobs == Knobs(1, 2, 0)
    assert shown(steered) is State.IDLE


def test_pause_while_a_layer_runs() -> None:
    steered = control()
    engine = Engine(steered)
    engine.hold.clear()
    engine.start()
    eventually(lambda: engine.layers == [0])
    steered.pause()
    assert shown(steered) is State.RUNNING  # this layer is still to finish
    engine.hold.set()
    eventually(lambda: engine.held_before(1))
    assert engine.layers == [0]
    steered.resume()
    engine.join()


def test_step_layer_lets_exactly_one_run() -> None:
    steered = control()
    steered.pause()
    engine = Engine(steered).start()
    for layer in range(LAYERS - 1):
        eventually(lambda layer=layer: engine.held_before(layer))  # type: ignore[misc]
        assert engine.layers == list(range(layer))
        steered.step_layer()
    eventually(lambda: engine.held_before(LAYERS - 1))
    steered.step_layer()
    engine.join()
    assert engine.layers == [0, 1, 2, 3]


def test_step_layer_while_running_holds_after_one_more() -> None:
    steered = control()
    steered.step_layer()
    engine = Engine(steered).start()
    eventually(lambda: engine.held_before(1))
    assert engine.layers == [0]
    steered.resume()
    engine.join()


def test_steps_asked_for_in_a_row_are_all_granted() -> None:
    steered = control()
    for _ in range(3):
        steered.step_layer()
    engine = Engine(steered).start()
    eventually(lambda: engine.held_before(3))
    assert engine.layers == [0, 1, 2]
    steered.stop()
    engine.join()


@pytest.mark.parametrize("forget", [Control.pause, Control.resume])
def test_layers_granted_before_do_not_count_afterwards(forget: Callable[[Control], None]) -> None:
    steered = control()
    for _ in range(3):
        steered.step_layer()
    forget(steered)
    steered.step_layer()
    engine = Engine(steered).start()
    eventually(lambda: engine.held_before(1))
    assert engine.layers == [0]
    steered.resume()
    engine.join()


def test_stop_lets_the_step_finish_and_no_other_begin() -> None:
    steered = control()
    engine = Engine(steered, steps=3)
    engine.hold.clear()
    engine.start()
    eventually(lambda: engine.layers == [0])
    steered.stop()
    assert steered.stopping
    assert shown(steered) is State.RUNNING
    engine.hold.set()
    engine.join()
    assert [(step, layer) for step, layer, _ in engine.ran] == [(0, layer) for layer in range(LAYERS)]
    assert shown(steered) is State.STOPPED
    assert "make a new engine" in str(engine.refused)


def test_stop_lets_go_of_a_held_step() -> None:
    steered = control()
    steered.pause()
    engine = Engine(steered, steps=2).start()
    eventually(lambda: engine.held_before(0))
    steered.stop()
    engine.join()
    assert engine.layers == [0, 1, 2, 3]
    assert shown(steered) is State.STOPPED


def test_no_step_begins_after_stop() -> None:
    steered = control()
    steered.stop()
    with pytest.raises(StoppedError, match=r"the run was stopped \(control.stop\(\)\); make a new engine"):
        steered.begin_step()
    assert shown(steered) is State.STOPPED


def test_knobs_apply_at_the_next_layer() -> None:
    steered = control()
    steered.pause()
    engine = Engine(steered).start()
    eventually(lambda: engine.held_before(0))
    steered.step_layer()
    eventually(lambda: engine.held_before(1))
    steered.set_prefetch_depth(3)  # while it is held: for the very layer it is held at
    steered.set_grad_buffers(1)
    steered.set_resident_layers(2)
    steered.resume()
    engine.join()
    assert [knobs for _, _, knobs in engine.ran] == [Knobs(1, 2, 0)] + [Knobs(3, 1, 2)] * 3
    assert steered.knobs.weight_slots == 3 + 1 + 2


def test_refused_knobs_leave_the_old_ones() -> None:
    def at_most_three_slots(knobs: Knobs) -> None:
        if knobs.weight_slots > 3:
            raise ValueError(f"{knobs.weight_slots} slots do not fit")

    steered = control(at_most_three_slots)
    steered.set_prefetch_depth(2)
    for turn in (steered.set_prefetch_depth, steered.set_resident_layers):
        with pytest.raises(ValueError, match="slots do not fit"):
            turn(9)
        assert steered.knobs == Knobs(2, 2, 0)
    steered.begin_step()  # and nothing is left locked
    assert steered.at_layer(Position(0, "forward", 0)) == Knobs(2, 2, 0)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None])
def test_knobs_that_are_not_counts_are_refused(value: int) -> None:
    steered = control()
    with pytest.raises(ValueError, match=r"prefetch_depth must be a whole number ≥ 0"):
        steered.set_prefetch_depth(value)
    with pytest.raises(ValueError, match=r"grad_buffers must be a whole number ≥ 1"):
        steered.set_grad_buffers(value)
    with pytest.raises(ValueError, match=r"resident_layers must be a whole number ≥ 0; got"):
        steered.set_resident_layers(value)
    assert steered.knobs == Knobs(1, 2, 0)


def test_knobs_turned_by_many_threads_are_all_whole() -> None:
    """Each thread turns one knob; none of the changes is lost or half seen."""
    seen: list[Knobs] = []
    steered = control(seen.append)

    def turn(setter: Callable[[int], None]) -> None:
        for count in range(1, 101):
            setter(count)

    setters = (steered.set_prefetch_depth, steered.set_grad_buffers, steered.set_resident_layers)
    threads = [threading.Thread(target=turn, args=(setter,)) for setter in setters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert steered.knobs == Knobs(100, 100, 100)
    assert len(seen) == 300


def test_many_threads_steer_one_engine_to_its_end() -> None:
    steered = control()
    engine = Engine(steered, steps=50).start()

    def meddle() -> None:
        for _ in range(50):
            steered.pause()
            steered.step_layer()
            steered.resume()

    threads = [threading.Thread(target=meddle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    steered.resume()
    engine.join()
    assert [(step, layer) for step, layer, _ in engine.ran] == [(s, i) for s in range(50) for i in range(LAYERS)]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signal to one thread on this system")
def test_an_interrupt_while_held_ends_the_step() -> None:
    """Ctrl-C in a notebook whose run is held: the viewer must not see a step that is no more."""
    steered = control()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        eventually(lambda: steered.state is State.PAUSED)
        signal.pthread_kill(main, signal.SIGINT)

    steered.pause()
    steered.begin_step()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            steered.at_layer(Position(0, "forward", 0))
    finally:
        steered.end_step()
        thread.join(BOUND_S)
    assert shown(steered) is State.IDLE


# ---- wishes ----


def test_a_wish_says_where_it_took_effect() -> None:
    steered = control()
    pause, depth = steered.pause(), steered.set_prefetch_depth(3)
    assert (pause.pending, depth.pending) == (True, True)
    engine = Engine(steered).start()
    assert pause.wait(BOUND_S)
    assert pause.effect == Position(0, "forward", 0)
    assert depth.pending  # nothing has passed the gate yet
    step = steered.step_layer()
    assert step.wait(BOUND_S)
    assert (step.effect, depth.effect) == (Position(0, "forward", 0), Position(0, "forward", 0))
    eventually(lambda: engine.held_before(1))
    resumed, stopped = steered.resume(), steered.stop()
    engine.join()
    assert resumed.effect == Position(0, "forward", 1)
    assert str(resumed) == "resume: since step 0, forward of layer 1"
    assert not stopped.pending
    assert not stopped.overtaken


def test_a_wish_may_be_overtaken() -> None:
    steered = control()
    pause = steered.pause()
    steered.resume()
    assert pause.overtaken
    assert str(pause) == "pause: overtaken"
    depth = steered.set_prefetch_depth(2)
    steered.close()
    assert depth.overtaken


def test_run_to_a_layer_holds_when_it_is_next() -> None:
    steered = control()
    steered.pause()
    engine = Engine(steered, steps=3).start()
    eventually(lambda: engine.held_before(0))
    wish = steered.run_to_layer(2)
    eventually(lambda: engine.held_before(2))
    assert engine.layers == [0, 1]
    assert wish.effect == Position(0, "forward", 2)
    again = steered.run_to_layer(2)  # the next time, not here
    assert again.wait(BOUND_S)
    assert again.effect == Position(1, "forward", 2)
    steered.stop()
    engine.join()


def test_finish_step_holds_at_the_first_layer_of_the_next() -> None:
    steered = control()
    steered.pause()
    engine = Engine(steered, steps=3).start()
    eventually(lambda: engine.held_before(0))
    steered.step_layer()
    eventually(lambda: engine.held_before(1))
    wish = steered.finish_step()
    assert wish.wait(BOUND_S)
    assert wish.effect == Position(1, "forward", 0)
    assert len(engine.ran) == LAYERS
    steered.stop()
    engine.join()


def test_a_place_that_no_step_comes_by_is_refused() -> None:
    visits = [("forward", 0), ("forward", 1), ("backward", 1)]
    steered = Control(Knobs(1, 2, 0), Checks(visits=visits))
    with pytest.raises(ValueError, match="run to layer 7: no step comes by there; layers are 0 to 1"):
        steered.run_to_layer(7)
    with pytest.raises(ValueError, match="run to the backward of layer 0: no step comes by there"):
        steered.run_to_layer(0, "backward")
    assert not steered.paused


def test_after_stop_nothing_else_is_accepted() -> None:
    steered = control()
    steered.stop()
    for wish in (steered.pause, steered.step_layer, steered.finish_step, lambda: steered.set_prefetch_depth(2)):
        with pytest.raises(ValueError, match="the run is stopped, or finishing its last step"):
            wish()
    assert steered.knobs == Knobs(1, 2, 0)


def test_the_micro_batch_size_changes_between_steps() -> None:
    def at_most_four(rows: int) -> None:
        if rows > 4:
            raise ValueError(f"{rows} rows do not fit")

    steered = Control(Knobs(1, 2, 0), Checks(micro_batch_size=at_most_four), micro_batch_size=2)
    wish = steered.set_micro_batch_size(4)
    assert wish.pending
    assert steered.begin_step() == 4
    assert not wish.pending
    with pytest.raises(ValueError, match="8 rows do not fit"):
        steered.set_micro_batch_size(8)
    with pytest.raises(ValueError, match="micro_batch_size must be a whole number ≥ 1"):
        steered.set_micro_batch_size(0)
    assert steered.micro_batch_size == 4


def test_a_held_engine_is_described_before_it_waits_and_when_a_knob_is_turned() -> None:
    steered = control()
    described: list[Knobs] = []
    steered.pause()
    steered.begin_step()
    held = threading.Thread(target=steered.at_layer, args=(Position(0, "forward", 0), described.append), daemon=True)
    held.start()
    eventually(lambda: shown(steered) is State.PAUSED)
    assert described == [Knobs(1, 2, 0)]
    steered.set_prefetch_depth(3)
    eventually(lambda: described == [Knobs(1, 2, 0), Knobs(3, 2, 0)])
    steered.resume()
    held.join(BOUND_S)
    assert not held.is_alive()


def test_stop_may_ask_for_the_model_to_be_saved() -> None:
    steered = control()
    steered.stop()
    assert not steered.save_wanted
    steered.stop(save=True)
    assert steered.save_wanted
