"""What can go wrong in the control plane besides the runtime's errors."""

from __future__ import annotations


class RunFailedError(RuntimeError):
    """A run that ended before its time; the text is its first cause, `code` what the command ends with."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
