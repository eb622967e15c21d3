"""The command ``protofl``, also as ``python -m pipelines.cli``.

Handles what can happen while Python still imports: Ctrl-C, SIGTERM, and the library without the command's packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType

_USAGE = 2
_INTERRUPTED = 130
_SECONDS_TO_STOP = 2.0


def main() -> int:
    """Run the command line of this process; return the exit code of :func:`pipelines.cli.app.main`."""
    interrupts = _Interrupts()
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default:  # otherwise the parent has disabled it
            signal.signal(number, interrupts)
    try:
        from pipelines.cli import app

        code = app.main()
    except ModuleNotFoundError as error:  # only of the import: the command handles its own
        package = str(error.name).partition(".")[0]
        if package in ("flcore", "pipelines"):
            raise
        print(
            f"protofl: the package {package} is not installed, only the library; pip install protofl", file=sys.stderr
        )
        code = _USAGE
    except KeyboardInterrupt:  # later ones are handled by the command, which knows its results
        with contextlib.suppress(OSError):
            print("protofl: interrupted before it had begun", file=sys.stderr)
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # Python's own exit would print a traceback
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return code


class _Interrupts:
    """Stop at the first Ctrl-C or SIGTERM, ignore repeats for two seconds, then exit.

    A second exception while the first one is handled would print a traceback instead of its message.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._first > _SECONDS_TO_STOP:
            with contextlib.suppress(OSError):
                os.write(2, b"protofl: interrupted; run the same command to resume\n")
            os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
