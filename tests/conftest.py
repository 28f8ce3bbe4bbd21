"""For all tests: how long an example takes says how busy the machine is, and nothing of the code.

What a script starts in the background ignores interrupts, and so does all that this starts. Here they are heard.
"""

from __future__ import annotations

import signal

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
