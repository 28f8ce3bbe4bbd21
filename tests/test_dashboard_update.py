"""That the benchmark of an update runs, and that a message stays small."""

import pytest

from benchmarks import dashboard_update


def test_the_benchmark_draws_about_as_many_bars_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_update, "UPDATES", 16)
    monkeypatch.setattr(dashboard_update, "WARM_UP", 4)
    bars, drawn, *milliseconds, kilobytes = dashboard_update.measure(200)
    assert bars == "200"
    assert isinstance(drawn, int)
    assert 100 < drawn <= 200 + dashboard_update.LIVE_SEGMENTS
    assert all(isinstance(value, float) and value > 0 for value in milliseconds)
    assert isinstance(kilobytes, float)
    assert 5 < kilobytes < 100
