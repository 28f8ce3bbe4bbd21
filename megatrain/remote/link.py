"""One connection of a viewer to a run's server."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from zmq.constants import Flag, PollEvent, SocketOption, SocketType
from zmq.error import Again
from zmq.sugar.context import Context

from megatrain.remote.protocol import Door, Message

RECONNECT_MS = 20
LOOK_S = 0.1  # how soon it is noticed that a server died in the middle of an answer


class NobodyThereError(Exception):
    """There is no server, or it died."""


class Link:
    """Sends requests and receives messages, in one thread at a time.

    Note: nothing is queued for a server that is not there. A request that outlived its run would otherwise be met by
    the next one.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._door = Door(folder)
        except (FileNotFoundError, NotADirectoryError):
            raise NobodyThereError from None
        self._context = Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.setsockopt(SocketOption.IMMEDIATE, 1)
        self._socket.setsockopt(SocketOption.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(self._door.address)

    @property
    def connected(self) -> bool:
        """Whether a server is there that would take a message."""
        return bool(self._socket.poll(0, PollEvent.POLLOUT))

    def send(self, data: bytes, timeout_s: float) -> None:
        """Raises NobodyThereError, or TimeoutError if there is somebody who takes nothing."""
        if not self.connected:
            self._require_listener()
        if not self._socket.poll(timeout_s * 1e3, PollEvent.POLLOUT):
            raise TimeoutError
        try:
            self._socket.send(data, Flag.NOBLOCK)
        except Again:  # it died since
            raise NobodyThereError from None

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, None if none came in time; NobodyThereError if none can come."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, give_up_s - time.monotonic())
            if self._socket.poll(min(left_s, LOOK_S) * 1e3, PollEvent.POLLIN):
                message: Message = json.loads(self._socket.recv())
                return message
            if left_s == 0:
                return None
            if not self.connected:
                raise NobodyThereError

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._door.close()

    def _require_listener(self) -> None:
        """A socket file alone says nothing: a process that was killed leaves its own."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._door.path)
            except BlockingIOError:  # it is there, but busy
                return
            except OSError:
                raise NobodyThereError from None
