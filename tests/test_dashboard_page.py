import re
from dataclasses import replace
from pathlib import Path

from looking_run import looking_run
from traced_run import TracedRun

from dashboard.history import History
from dashboard.page import write_page
from megatrain.report import RunInfo
from megatrain.trace import Recorder, Records


def page(path: Path, source: Recorder | Records, title: str = "a run") -> str:
    write_page(path / "run.html", source, title)
    return (path / "run.html").read_text()


def test_the_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    text = page(tmp_path, TracedRun().steps(2))
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?http", text)
    assert "plotly.js v" in text
    assert "prefers-color-scheme: dark" in text
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]


def test_the_table_has_the_last_steps_in_plain_words(tmp_path: Path) -> None:
    text = page(tmp_path, TracedRun().steps(12))
    rows = re.findall(r"<tr><td>(\d+)</td><td>([^<]+)</td><td>([^<]+)</td>", text)
    assert [int(step) for step, _, _ in rows] == list(range(2, 12))
    assert rows[-1][1:] == ("328 ms", "6.4884")
    assert "optimizer 40 ms, weights 9 ms" in text
    assert "The optimizer binds: compute waited 12% of step 11 for AdamW." in text


def test_a_run_without_a_step_still_has_a_page(tmp_path: Path) -> None:
    assert "No step has ended yet." in page(tmp_path, Recorder())


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    records = TracedRun().steps(1).snapshot()
    skipped = [replace(step, skipped="loss <nan>") for step in records.steps]
    text = page(tmp_path, replace(records, steps=skipped), title="a & <b>")
    assert "<h1>a &amp; &lt;b&gt;</h1>" in text
    assert "(not applied: loss &lt;nan&gt;)" in text


def test_dropped_records_are_told(tmp_path: Path) -> None:
    assert "; 1,234 older records were dropped" in page(tmp_path, Records(lost=1234))


def test_the_page_has_buffers_and_layers(tmp_path: Path) -> None:
    text = page(tmp_path, TracedRun(layers=3).steps(2))
    assert 'aria-label="device buffers"' in text
    assert 'aria-label="layer 2: empty"' in text
    assert '<tr><th scope="row">2</th><td>12</td><td>32</td><td>436</td>' in text


def test_what_a_viewer_remembers_can_be_written_too(tmp_path: Path) -> None:
    info = RunInfo("m", 6, 9, 1, 0.0, "cpu", 1, 1, 1, {"moments": 10**9}, 64 * 10**9, 8 * 10**9)
    write_page(tmp_path / "run.html", History(TracedRun().steps(2).snapshot()), "a run", info=info)
    text = (tmp_path / "run.html").read_text()
    assert "<span>moments</span><b>1 GB</b>" in text


def test_the_page_has_what_the_model_answered(tmp_path: Path) -> None:
    records = looking_run()
    told = [replace(step, metrics={"rewards/margins": 0.5}) for step in records.steps]
    text = page(tmp_path, replace(records, steps=told))
    assert '<details class="mt" open><summary>What the model answers</summary>' in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert(1)" not in text
    assert "rewards/margins" in text
    plain = page(tmp_path, TracedRun().steps(1))
    assert "What the model answers" not in plain
    assert "What the recipe measures" not in plain
