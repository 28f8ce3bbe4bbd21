"""What the browser makes of it is tested in tests/browser."""

from dashboard.names import Names


def test_it_takes_no_room_and_brings_its_script() -> None:
    names = Names()
    assert names.layout.display == "none"
    assert "aria-label" in names._esm
