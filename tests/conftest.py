"""For all tests: how long an example takes says how busy the machine is, and nothing of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
