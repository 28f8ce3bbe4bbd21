"""The run's side: a thread that hears viewers' wishes, passes them on, and tells what becomes of them."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from zmq.constants import Flag, PollEvent, SocketOption, SocketType
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller

from megatrain.folder import FILE_MODE
from megatrain.plain import to_plain
from megatrain.remote.protocol import STATUS, WISHES, Door, Message
from megatrain.report import Status
from megatrain.steering import Steering, Wish

logger = logging.getLogger(__name__)

LOOK_MS = 20  # how often wishes that wait are looked at, while there are any
LONGEST_REQUEST_BYTES = 64 * 1024  # a viewer that sends more is disconnected
MOST_UNREAD = 1000  # answers kept for a viewer that does not read them; further ones are dropped
LAST_WORDS_MS = 200  # how long `close` waits for viewers to take their last answers


class _Pending(NamedTuple):
    """A wish that was accepted, and whom to tell."""

    viewer: bytes
    request: object
    wish: Wish


class ControlServer:
    """Answers viewers at the socket in a run's folder, from a daemon thread that starts at once.

    steering: meets the wishes. status: called in this thread for every question. Neither a malformed message nor
    anything that they raise ends the thread; no viewer can hold it up.
    """

    def __init__(self, folder: str | Path, steering: Steering, status: Callable[[], Status]) -> None:
        self._steering = steering
        self._status = status
        self._pending: list[_Pending] = []
        self._door = Door(folder)
        self._context = Context()
        self._socket = self._bound_socket()
        self._socket_file = _identity(self._door.path)
        self._wake_read, self._wake_write = os.pipe()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="megatrain-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell viewers that wait for an effect that none will come any more, and remove the socket."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            os.write(self._wake_write, b"\0")
            self._thread.join()
            if _identity(self._door.path) == self._socket_file:  # and not of the next run's server
                os.unlink(self._door.path)
            self._socket.close(LAST_WORDS_MS)
            self._context.term()
            self._door.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _bound_socket(self) -> Any:
        socket = self._context.socket(SocketType.ROUTER)
        socket.setsockopt(SocketOption.ROUTER_MANDATORY, 0)  # an answer to nobody is dropped
        socket.setsockopt(SocketOption.SNDTIMEO, 0)
        socket.setsockopt(SocketOption.SNDHWM, MOST_UNREAD)
        socket.setsockopt(SocketOption.RCVHWM, MOST_UNREAD)
        socket.setsockopt(SocketOption.MAXMSGSIZE, LONGEST_REQUEST_BYTES)
        socket.bind(self._door.address)  # in place of a file that a dead process left
        os.chmod(self._door.path, FILE_MODE)
        return socket

    # ---- the thread ----

    def _serve(self) -> None:
        poller = Poller()
        poller.register(self._socket, PollEvent.POLLIN)
        poller.register(self._wake_read, PollEvent.POLLIN)
        while True:
            ready = dict(poller.poll(LOOK_MS if self._pending else None))
            if self._wake_read in ready:
                break
            if self._socket in ready:
                self._hear(*self._socket.recv_multipart())
            self._tell_what_is_over()
        self._tell_what_is_over()
        for viewer, request, _ in self._pending:
            self._say(viewer, request, {"overtaken": True})

    def _hear(self, viewer: bytes, *frames: bytes) -> None:
        request: Message = {}
        try:
            request = _parsed(frames)
            answer = self._met(viewer, request)
        except ValueError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # whatever it is, the next viewer must be heard
            logger.exception("a viewer's request failed: %.200r", request)
            answer = {"refused": f"{type(error).__name__}: {error}"}
        self._say(viewer, request.get("id"), answer)

    def _met(self, viewer: bytes, request: Message) -> Message:
        """Do what a request asks for, and return the answer; ValueError with the reason to refuse."""
        name, arguments = request.get("do"), request.get("with", {})
        if name == STATUS:
            return {"status": to_plain(self._status())}
        if not isinstance(name, str) or name not in WISHES:
            raise ValueError(f"a run can be asked for {', '.join([STATUS, *WISHES])}; got {name!r}")
        if not isinstance(arguments, dict) or arguments.keys() != WISHES[name]:
            raise ValueError(f"{name} takes the arguments {sorted(WISHES[name])}; got {arguments!r}")
        wish: Wish = getattr(self._steering, name)(**arguments)
        self._pending.append(_Pending(viewer, request.get("id"), wish))
        return {"accepted": wish.text}

    def _tell_what_is_over(self) -> None:
        waiting = []
        for pending in self._pending:
            wish = pending.wish
            if wish.pending:  # asked once: it may change at any moment
                waiting.append(pending)
            else:
                self._say(pending.viewer, pending.request, _outcome(wish))
        self._pending = waiting

    def _say(self, viewer: bytes, request: object, answer: Message) -> None:
        text = json.dumps({"id": request, **answer}, allow_nan=False)
        with suppress(Again):
            self._socket.send_multipart([viewer, text.encode()], Flag.NOBLOCK)


def _outcome(wish: Wish) -> Message:
    if wish.failed is not None:
        return {"failed": wish.failed}
    return {"overtaken": True} if wish.overtaken else {"effect": to_plain(wish.effect)}


def _parsed(frames: tuple[bytes, ...]) -> Message:
    if len(frames) != 1:
        raise ValueError(f"a request must be one frame of JSON; got {len(frames)}")
    try:
        request = json.loads(frames[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a request must be JSON: {error}") from None
    if not isinstance(request, dict):
        raise ValueError(f"a request must be a JSON object; got a {type(request).__name__}")
    return request


def _identity(path: str) -> tuple[int, int] | None:
    """Of the file at a path, if there is one."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
