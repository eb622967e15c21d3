"""``make run``: ``dvc repro``, then the comparison's table and where to look further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipelines.tracking import ui_command

_COMPARISON = Path("artifacts/comparison")


def main() -> int:
    """Reproduce what is out of date; say so where nothing is."""
    if not Path(".git").exists():  # a downloaded archive: DVC works without git once it is told so
        subprocess.run(["dvc", "config", "--local", "core.no_scm", "true"], check=True)
    status = subprocess.run(["dvc", "status", "--quiet"], check=False)
    if status.returncode == 0:
        print("Everything is up to date: nothing to do.\n")
    else:
        done = subprocess.run(["dvc", "repro"], check=False)
        if done.returncode != 0:
            print("\nStopped. `make run` goes on from here.", file=sys.stderr)
            return done.returncode
    print((_COMPARISON / "comparison.md").read_text())
    print(f"report:       {_COMPARISON / 'report.html'}   (open it in a browser)")
    print(f"runs, MLflow: {ui_command(None)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
