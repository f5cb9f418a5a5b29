"""Curves for TensorBoard, written with tensorboard's own writer; torch is not needed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from alpagym_runtime.telemetry.loggers import Row, number_items


class TensorboardLogger:
    """Scalars `stage/name` over the total of training steps; the folder appears with the first row."""

    essential = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._purge_step: int | None = None

    def log(self, row: Row) -> None:
        """Write one event that holds all numbers of the row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{row.stage}/{k}", simple_value=v) for k, v in number_items(row.numbers)]
        self._open().add_event(Event(wall_time=time.time(), step=row.total_steps, summary=Summary(value=values)))

    def rewind(self, rows: int, total_steps: int) -> None:
        """Have TensorBoard hide what came after: it purges steps at and above that of a START event."""
        if self._directory.exists():
            self._purge_step = total_steps + 1

    def close(self) -> None:
        """Write everything out."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            if self._directory.is_symlink():
                raise OSError(f"{self._directory} is a symbolic link; put the real folder there")
            self._writer = EventFileWriter(str(self._directory))
            if self._purge_step is not None:
                started = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=self._purge_step, session_log=started))
        return self._writer
