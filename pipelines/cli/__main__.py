"""The command ``protofl``, also as ``python -m pipelines.cli``: where Ctrl-C may come while Python still imports."""

from __future__ import annotations

import contextlib
import sys


def main() -> int:
    """Carry out the command line of this process; the exit code is that of :func:`pipelines.cli.app.main`."""
    try:
        from pipelines.cli import app

        return app.main()
    except KeyboardInterrupt:  # one that comes later is the command's, which knows what it leaves behind
        with contextlib.suppress(OSError):
            print("protofl: interrupted before it had begun", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
