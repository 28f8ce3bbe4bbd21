import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from looking_run import step_record
from traced_run import TracedRun, memory_sample

from dashboard import panels
from dashboard.history import History
from dashboard.layers import LayerRow
from megatrain.report import Inspection, RunInfo, RunState, Status, TensorStats
from megatrain.steering import Knobs, Position
from megatrain.trace import HELD, EvaluationRecord, Marker, Records, SlotChange, StepMetrics

INFO = RunInfo("m", 6, 100, 1, 0.0, "cpu", 1, 1, 1, {"weights": 2 * 10**9, "moments": 10**12}, 64 * 10**9, 8 * 10**9)
HISTORY = History(TracedRun().steps(3).snapshot())
RUNNING = Status(RunState.RUNNING, 3, Knobs(1, 2, 0), 2, Position(3, "backward", 4))
ROWS = [
    LayerRow(0, 2.0, 9.0, 436.0, math.nan, 40.0, 1.0),
    LayerRow(1, 5.0, 1.0, 436.0, 0.5, 40.0, 1.0),
    LayerRow(2, 3.0, 4.0, 436.0, 0.2, 40.0, 1.0),
]


class Balance(HTMLParser):
    """Raises if a tag is closed that is not the one open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text(html: str) -> str:
    """What a reader sees; fails for HTML that is not whole or that loads something."""
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert not re.search(r"(src|href)=|url\(", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


def metrics() -> StepMetrics:
    return HISTORY.metrics[-1]


def test_headline() -> None:
    words = text(panels.headline(RUNNING, INFO, HISTORY.steps, memory_sample(0.0)))
    assert words.startswith("state running steps done 3 of 100 at backward of layer 4 loss 8.9615")
    assert "tokens per second 24,976" in words
    assert "time left 32 s device arena 3.6 GB host process 30 GB" in words


def test_headline_of_a_run_that_has_not_begun_and_of_one_that_is_over() -> None:
    assert text(panels.headline(Status(RunState.NEW), None, [])) == "state new steps done 0"
    over = Status(RunState.FINISHED, 100)
    assert "state finished steps done 100 of 100" in text(panels.headline(over, INFO, HISTORY.steps))
    assert panels.time_left(over, INFO, HISTORY.steps) == "–"
    assert panels.time_left(replace(RUNNING, state=RunState.PAUSED), INFO, HISTORY.steps) == "32 s, once it runs on"


def test_headline_shows_memory_of_a_card_a_step_that_was_skipped_and_an_error() -> None:
    on_card = replace(memory_sample(0.0), device_used_bytes=5 * 10**9, device_total_bytes=80 * 10**9)
    failed = Status(RunState.FAILED, 2, error="layer 3: <out of memory>")
    steps = [replace(HISTORY.steps[-1], skipped="loss <nan>")]
    html = panels.headline(failed, INFO, steps, on_card)
    assert "device 5 GB of 80 GB" in text(html)
    assert "(not applied: loss &lt;nan&gt;)" in html
    assert '<p class="error" role="alert">layer 3: &lt;out of memory&gt;</p>' in html


def test_headline_tells_of_held_out_data_and_of_what_is_no_step() -> None:
    seen = EvaluationRecord(1.0, 3, 2.0, 90)
    words = text(panels.headline(RUNNING, INFO, HISTORY.steps, None, seen, beside="evaluation"))
    assert "at evaluation, backward of layer 4" in words
    assert "held-out loss 2.0000, perplexity 7.389 (after 3 steps)" in words
    nothing = EvaluationRecord(1.0, 3, math.nan, 90, {"reward/mean": 1.0})
    assert "held-out" not in panels.headline(RUNNING, INFO, HISTORY.steps, None, nothing)


def test_time_left_counts_what_lies_between_steps() -> None:
    steps = [step_record(0, 0), step_record(1, 10), step_record(2, 25)]
    history = History(Records(steps=steps, markers=[Marker(24.0, HELD, 20.0, 24.0, 2, None)]))
    assert history.between_s == (5 + 10 - 4) / 2
    assert panels.time_left(replace(RUNNING, steps_done=90), INFO, steps, history.between_s) == "1 min 45 s"
    assert History(Records(steps=steps[:1])).between_s == 0
    earlier = [replace(step_record(0, 0), start_s=-9000.0, end_s=-8000.0), step_record(1, 10), step_record(2, 25)]
    assert History(Records(steps=earlier)).between_s == 10  # not the time in which there was no run


def test_time_left_is_the_median_of_the_last_steps() -> None:
    steps = [replace(HISTORY.steps[0], start_s=0.0, end_s=seconds) for seconds in (50.0, *[2.0] * 15, *[9.0] * 5)]
    assert panels.time_left(replace(RUNNING, steps_done=95), INFO, steps) == "10 s"


def test_buffers_have_colour_word_and_layer() -> None:
    changes = [
        SlotChange(0, "weights", 0, "in_use", 3, 0),
        SlotChange(0, "weights", 1, "free", None, 0),
        SlotChange(0, "gradients", 0, "draining", 4, 0),
    ]
    history = History(replace(TracedRun().steps(1).snapshot(), slots=changes))
    html = panels.buffer_strip(history, INFO)
    words = text(html)
    assert "weights 0 layer 3 in use weights 1 – free gradients 0 layer 4 leaving for the host" in words
    assert "Host memory by role weights 2 GB moments 1 TB" in words
    assert 'title="layer 4: arriving" aria-label="layer 4: arriving">4</li>' in html
    assert html.count("<li style=") == 6


def test_buffers_of_a_run_that_has_none_yet() -> None:
    assert text(panels.buffer_strip(History(), None)) == "On the device No device buffers yet."


def test_summary_of_a_step() -> None:
    words = text(panels.step_summary(metrics(), replace(INFO, h2d_bytes_per_s=60e9)))
    assert words.startswith("Step 2 took 328 ms compute busy 85%")
    assert "GB/s in 48.4 of 60 (81%) GB/s out 43.6 compute waited optimizer 40 ms, weights 9 ms" in words
    assert "MFU 12%" in text(panels.step_summary(replace(metrics(), mfu=0.12), None))


def test_waits_in_words() -> None:
    assert panels.waits_in_words(replace(metrics(), waits_s=dict.fromkeys(metrics().waits_s, 1e-4))) == "nothing"


def test_what_is_held() -> None:
    stats = TensorStats(0.01, 1.25, 8.0, 3)
    held = Inspection(["forward 4 <mb0>", "load 5"], 3, "backward", stats, None)
    lanes = {"h2d": ["load of layer 5"], "compute": [], "d2h": ["unload 2", "unload 1"]}
    status = replace(RUNNING, state=RunState.PAUSED, lanes=lanes, held=held)
    html = panels.held_panel(status, [SlotChange(0, "weights", 0, "ready", 4, 3)])
    words = text(html)
    assert words.startswith("Held before step 3, backward of layer 4 weights 0 layer 4 loaded, not in use")
    assert "Lanes weights in: load of layer 5 compute: idle gradients out: unload 2" in words
    assert "then unload 1" in words
    assert "weights 0 layer 4 loaded, not in use" in words
    assert "gradient of its output 0.01 1.25 8 3 of its input – – – –" in words
    assert "What comes next forward 4 &lt;mb0&gt; load 5" in words
    assert panels.held_panel(RUNNING) == ""


def test_before_the_first_layer_nothing_has_come_or_gone() -> None:
    html = panels.held_panel(replace(RUNNING, held=Inspection(["record"], None)))
    assert "<table" not in html
    text(html)


def layers_of(html: str) -> list[int]:
    return [int(number) for number in re.findall(r'<th scope="row">(\d+)</th>', html)]


@pytest.mark.parametrize(
    ("field", "descending", "layers"),
    [
        ("layer", False, [0, 1, 2]),
        ("layer", True, [2, 1, 0]),
        ("forward_ms", True, [1, 2, 0]),
        ("grad_norm", False, [2, 1, 0]),  # what is not known comes last
        ("grad_norm", True, [1, 2, 0]),
    ],
)
def test_layers_are_sorted(field: str, descending: bool, layers: list[int]) -> None:
    html = panels.layer_table(ROWS, field, descending)
    text(html)
    assert layers_of(html) == layers
    assert html.count("aria-sort") == 1


def test_what_is_not_known_of_a_layer_is_a_dash() -> None:
    assert (
        '<th scope="row">0</th><td>2</td><td>9</td><td>436</td><td>–</td><td>40</td><td>1</td>'
        in panels.layer_table(ROWS)
    )
    assert "No step has ended yet." in panels.layer_table([])


def test_a_sentence_is_escaped() -> None:
    assert panels.sentence("a < b") == '<p class="mt" role="status">a &lt; b</p>'


def test_the_style_names_no_colour_of_text() -> None:
    assert not re.search(r"[;{]color:(?!inherit|var)", panels.STYLE)
