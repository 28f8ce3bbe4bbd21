"""One connection of a viewer to a run's server."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

from zmq.constants import Event, Flag, PollEvent, SocketOption, SocketType
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.utils.monitor import recv_monitor_message

from megatrain.remote.protocol import Door, Message

NEVER_MS = 2**31 - 1
NEWS = Event.HANDSHAKE_SUCCEEDED | Event.CONNECT_RETRIED | Event.DISCONNECTED


class NobodyThereError(Exception):
    """There is no server, or it died."""


class Link:
    """Sends requests and receives messages, in one thread at a time; made anew when the server died.

    Note: why it never connects a second time. A request that outlived its run would be met by the next one. (Sockets
    that queue nothing for an absent server, IMMEDIATE, also throw away what a server said before it went.)
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """Raises NobodyThereError, or TimeoutError if the server's process is there but does nothing."""
        try:
            self._door = Door(folder)
        except (FileNotFoundError, NotADirectoryError):
            raise NobodyThereError from None
        self._context = Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.setsockopt(SocketOption.RECONNECT_IVL, NEVER_MS)
        self._news = self._socket.get_monitor_socket(NEWS)
        # Also where nobody closes it: a context that is collected with open sockets waits for them for ever.
        self._closing = weakref.finalize(self, _close, self._socket, self._news, self._context, self._door)
        self._poller = Poller()
        self._poller.register(self._socket, PollEvent.POLLIN)
        self._poller.register(self._news, PollEvent.POLLIN)
        self._socket.connect(self._door.address)
        try:
            self._shake_hands(timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the server is still there; once it is not, all that it ever said can be received."""
        return not self._news.poll(0)

    def send(self, data: bytes) -> None:
        try:
            self._socket.send(data, Flag.NOBLOCK)
        except Again:  # it has not taken anything for a long time
            raise TimeoutError from None

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none came in time, or the server died."""
        if self.alive:
            self._poller.poll(timeout_s * 1e3)
        try:
            message: Message = json.loads(self._socket.recv(Flag.NOBLOCK))
        except Again:
            return None
        return message

    def close(self) -> None:
        self._closing()

    def _shake_hands(self, timeout_s: float) -> None:
        """A socket file alone says nothing: a process that was killed leaves its own."""
        if not self._news.poll(timeout_s * 1e3):
            raise TimeoutError
        if recv_monitor_message(self._news)["event"] != Event.HANDSHAKE_SUCCEEDED:
            raise NobodyThereError


def _close(socket: Any, news: Any, context: Any, door: Door) -> None:
    socket.disable_monitor()
    news.close(0)
    socket.close(0)
    context.term()
    door.close()
