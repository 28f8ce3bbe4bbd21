"""Event files that TensorBoard shows: `tensorboard --logdir RUN`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from megatrain.folder import FILE_MODE, RunFolder, owned_folder


class TensorBoardSink:
    """One new event file in the run's folder; those of the run before a resume stay beside it.

    first_step: what earlier files say of it and later steps is void, as it is trained once more.

    Note: why not SummaryWriter. It writes in a thread of its own, whose failures it cannot be asked for in time, and
    creates files that everyone may read.
    """

    def __init__(self, folder: RunFolder, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        owned_folder(folder.tensorboard)
        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}.megatrain"  # read in the order of their names
        handle = os.open(folder.tensorboard / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        self._file = os.fdopen(handle, "wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=points))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
