"""``make run``: ``dvc repro``, then the comparison's table and where to look further."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flcore.errors import ConfigError, ProtoflError
from flcore.wording import fit_to_print
from pipelines.config.files import read_params
from pipelines.orchestration.pages import runs_page
from pipelines.runs.file_state import refuse_linked_folders
from pipelines.runs.standard_error import console, safe_streams

_ARTIFACTS = Path("artifacts")
_WIDTH_OF_A_LOG = 150


def main() -> int:
    """Reproduce what is out of date, and show what came of it, now or earlier."""
    if not Path(".git").exists():  # a downloaded archive: DVC works without git once it is told so
        subprocess.run(["dvc", "config", "--local", "core.no_scm", "true"], check=True)
    try:
        parameters = read_params(None)
        _check_root(parameters)
    except ProtoflError as error:
        print(f"protofl: {fit_to_print(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3
    done = subprocess.run(["dvc", "repro"], check=False)
    if done.returncode != 0:
        print("\nStopped. `make run` goes on from here.", file=sys.stderr)
        return done.returncode
    print()
    _print_table(parameters)
    print(f"\nreport:       {_ARTIFACTS / 'comparison' / 'report.html'}   (open it in a browser)")
    tracking = parameters.get("tracking") or {}
    if tracking.get("enabled", True):
        print(f"runs, MLflow: {runs_page(tracking.get('uri'))}")
    return 0


def _check_root(parameters: Mapping[str, Any]) -> None:
    """Refuse what DVC would trip over, or not see, where `dvc.yaml` names data.root.

    Raises:
        ConfigError: the key is missing. DataError: a folder below is a link.
    """
    data = parameters.get("data")
    root = data.get("root") if isinstance(data, Mapping) else None
    if not isinstance(root, str) or not root:
        raise ConfigError(
            "params.yaml: data.root is not set, and dvc.yaml depends on it; set it to the folder or zip of the images "
            "(for digits: images)"
        )
    refuse_linked_folders(Path(root))


def _print_table(parameters: Mapping[str, Any]) -> None:
    """Read the runs, which may have come by DVC, and print for this terminal; what draws figures is not loaded."""
    from flcore.params import build
    from flcore.sections import CompareConfig
    from pipelines.reporting.claims import claims_of
    from pipelines.reporting.comparison import compare
    from pipelines.reporting.comparison_files import print_table
    from pipelines.runs.record import load_run

    asked = build(CompareConfig, parameters.get("compare") or {}, "compare")
    folders = [_ARTIFACTS / "runs" / f"{method}-s{seed}" for method in asked.methods for seed in asked.seeds]
    runs, claims = [load_run(folder) for folder in folders], claims_of(asked.claims)
    found = compare(runs, asked.baseline, target_fraction=asked.target_fraction, claims=claims)
    print_table(found, console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_LOG))


if __name__ == "__main__":
    with safe_streams():
        sys.exit(main())
