"""The exceptions of this package.

Every error is a `PowerInferError` and also an exception of the builtin kind with that meaning, so that both
`except powerinfer.PowerInferError` and `except OSError` work.
"""

from __future__ import annotations


class PowerInferError(Exception):
    """Base of all errors that this package raises for what comes from outside: files, arguments, memory."""


class FileError(PowerInferError, OSError):
    """A file cannot be opened, read or mapped."""


class FormatError(PowerInferError, ValueError):
    """A file's content is not valid. The message says what is wrong."""


class ArgumentError(PowerInferError, ValueError):
    """A value given by the caller is out of range."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A value given by the caller is of a kind that cannot stand there."""


class OutOfMemoryError(PowerInferError, MemoryError):
    """An allocation failed, or a limit on locked memory forbids it."""


class UnsupportedError(PowerInferError, NotImplementedError):
    """The request is valid, but this version or installation cannot do it. The message says what."""


class ContextError(PowerInferError, ValueError):
    """There is no room for more positions; nothing was computed."""


class DeviceError(PowerInferError, RuntimeError):
    """A device or its driver failed, or cannot be used as asked."""


class ClosedError(PowerInferError, ValueError):
    """The object was closed before this call."""


class BusyError(PowerInferError, RuntimeError):
    """Too many requests are waiting already. Nothing was begun; try again later."""


class DeadlineError(PowerInferError, TimeoutError):
    """The time that a request was given is over, and nothing of it was answered."""


class LibraryError(PowerInferError, ImportError):
    """The engine's library is missing, or belongs to another version of the package."""
