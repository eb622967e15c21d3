"""One-line messages for system errors: limits on files and memory, and a removed folder."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "failed to map segment", "can't start new thread")


def has_working_folder() -> bool:
    """Return whether the working folder of this process exists."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def system_error(error: Exception, had_folder: bool) -> str | None:
    """Return the message of an error that a limit or a removed folder has caused; None for other errors.

    ``had_folder`` says whether the working folder existed when the command began.
    """
    if had_folder and isinstance(error, OSError) and not has_working_folder():
        return "the working folder was removed while the command ran; create it and run the same command to resume"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = "the file system allows" if allowed == resource.RLIM_INFINITY else f"{allowed} bytes (ulimit -f)"
        return f"{error.filename or 'a file'}: larger than {limit}; raise the limit and run the same command to resume"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        folder = Path(os.fsdecode(error.filename)).parent
        if had_folder and not folder.exists():
            return f"{folder}: was removed while the command worked there; start the command again"
    if _is_of_memory(error):
        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
        limit = "" if allowed == resource.RLIM_INFINITY else f": a process may have {allowed >> 20} MB (ulimit -v)"
        return f"not enough memory for this{limit}; use fewer workers, clients, or a smaller model"
    return None


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    told = str(error).lower()
    return isinstance(error, ImportError | RuntimeError) and any(words in told for words in _OF_MEMORY)


def set_home() -> None:
    """Set a home folder below the working folder for a user without one, as in a container: libraries need it."""
    try:
        Path.home()
    except RuntimeError:
        if has_working_folder():
            os.environ["HOME"] = str(Path(".protofl", "home").absolute())
            os.environ.setdefault("LOGNAME", str(os.getuid()))  # such a user may have no name either
