"""Run a command and report its time and memory: ``python launch.py REPORT COMMAND...``.

This is a separate small process because Linux counts the parent's memory as the command's: if started from a benchmark
that has imported torch, every command would seem to need hundreds of megabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main(report: str, command: list[str]) -> int:
    """Run ``command`` and write the seconds from start to end and the memory of its largest process, in MB."""
    begin = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in kilobytes elsewhere
    # Not pathlib, which would be one more import of a process that must stay small.
    with open(report, "w") as file:  # noqa: PTH123
        json.dump({"seconds": seconds, "peak_mb": usage.ru_maxrss / unit}, file)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
