"""Steering a run from another process: a server beside the run, and its counterpart in any viewer. No torch."""

from megatrain.remote.client import RemoteControl, RunUnreachableError
from megatrain.remote.run import RemoteRun
from megatrain.remote.server import ControlServer

__all__ = ["ControlServer", "RemoteControl", "RemoteRun", "RunUnreachableError"]
