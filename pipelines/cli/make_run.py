"""``make run``: ``dvc repro``, then the comparison's table and where to look further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from pipelines import stages
from pipelines.config.params import load_config
from pipelines.reporting.comparison_tables import print_table
from pipelines.tracking.sync import ui_command

_ARTIFACTS = Path("artifacts")


def main() -> int:
    """Reproduce what is out of date; say so where nothing is."""
    if not Path(".git").exists():  # a downloaded archive: DVC works without git once it is told so
        subprocess.run(["dvc", "config", "--local", "core.no_scm", "true"], check=True)
    if subprocess.run(["dvc", "status", "--quiet"], check=False).returncode == 0:
        print("Everything is up to date: nothing to do.\n")
    else:
        done = subprocess.run(["dvc", "repro"], check=False)
        if done.returncode != 0:
            print("\nStopped. `make run` goes on from here.", file=sys.stderr)
            return done.returncode
    config = load_config(None)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a log has no width; 80 columns would fold every cell
    print_table(stages.collect(config, stages.comparison_runs(config, _ARTIFACTS)), console)
    print(f"\nreport:       {_ARTIFACTS / 'comparison' / 'report.html'}   (open it in a browser)")
    print(f"runs, MLflow: {ui_command(config.tracking.uri)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
