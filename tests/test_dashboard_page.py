import re
from dataclasses import replace
from pathlib import Path

import pytest
from traced_run import TracedRun

from dashboard.page import write_page
from dashboard.words import advice, milliseconds, percent, size
from megatrain.trace import Recorder, Records, StepMetrics, step_metrics


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
    assert "weights 28 ms, optimizer 21 ms" in text
    assert "Compute was busy for 85% of step 11" in text


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


def metrics() -> StepMetrics:
    run = TracedRun().steps(2)
    return step_metrics(run.spans(), run.steps()[1])


@pytest.mark.parametrize("cause", ["weights", "gradient buffer", "saved inputs", "optimizer", "other"])
def test_advice_names_the_longest_wait(cause: str) -> None:
    waits = dict.fromkeys(metrics().waits_s, 0.0) | {cause: 0.5 * metrics().duration_s}
    words = advice(replace(metrics(), waits_s=waits))
    assert words.startswith("Compute was busy for 85% of step 1; 50% of it")
    assert ("went to other things" if cause == "other" else f"waited for the {cause}:") in words


def test_no_advice_where_nothing_waits() -> None:
    words = advice(replace(metrics(), waits_s=dict.fromkeys(metrics().waits_s, 0.001)))
    assert words == "Compute was busy for 85% of step 1 and waited for nothing worth mentioning."


def test_numbers_as_people_say_them() -> None:
    assert [size(n) for n in (12, 4_360, 436_000_000, 2_700_000_000, 1_500_000_000_000)] == [
        "12 bytes",
        "4.36 kB",
        "436 MB",
        "2.7 GB",
        "1.5 TB",
    ]
    assert [milliseconds(s) for s in (0.00871, 0.328, 2.5)] == ["8.71 ms", "328 ms", "2.50 s"]
    assert [percent(share) for share in (None, 0.0, 0.694)] == ["–", "0%", "69%"]
