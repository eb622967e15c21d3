"""``make run``: runs ``dvc repro``, then prints the comparison's table and the addresses of results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flcore.core.errors import ConfigError, ProtoflError
from pipelines.orchestration.pages import runs_page
from pipelines.plan.files import read_params
from pipelines.runs.file_state import refuse_linked_folders
from pipelines.runs.standard_error import console, safe_streams, tell
from pipelines.stages.parameters import problem

_ARTIFACTS = Path("artifacts")
_WIDTH_OF_A_LOG = 150


def main() -> int:
    """Reproduce outdated stages, and print the results, new or old."""
    try:
        parameters = read_params(None)
        _check(parameters)
    except ProtoflError as error:
        tell(f"protofl: {error}")
        return 2 if isinstance(error, ConfigError) else 3
    if not Path(".git").exists():  # a downloaded archive: DVC works without git if configured
        subprocess.run(["dvc", "config", "--local", "core.no_scm", "true"], check=True)
    done = subprocess.run(["dvc", "repro"], check=False)
    if done.returncode != 0:
        tell("\nStopped. When what is said above is mended, `make run` resumes.")
        return done.returncode
    print()
    _print_table(parameters)
    print(f"\nreport:       {_ARTIFACTS / 'comparison' / 'report.html'}   (open it in a browser)")
    tracking = parameters.get("tracking") or {}
    if tracking.get("enabled", True):
        print(f"runs, MLflow: {runs_page(tracking.get('uri'))}")
    return 0


def _check(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that DVC cannot use, and folders of images that are links: it would not detect changes."""
    refused = problem(Path(), parameters)
    if refused is not None:
        raise ConfigError(refused)
    data = parameters.get("data")
    root = data.get("root") if isinstance(data, Mapping) else None
    if isinstance(root, str):
        refuse_linked_folders(Path(root))


def _print_table(parameters: Mapping[str, Any]) -> None:
    """Read the runs, which may come from DVC, and print them for this terminal; imports no plotting library."""
    from flcore.config.sections import CompareConfig
    from flcore.core.params import build
    from pipelines.reporting.claims import claims_of
    from pipelines.reporting.comparison import compare
    from pipelines.reporting.comparison_files import print_table
    from pipelines.runs.folder import RunFolder
    from pipelines.runs.record import record_of

    asked = build(CompareConfig, parameters.get("compare") or {}, "compare")
    folders = [_ARTIFACTS / "runs" / f"{method}-s{seed}" for method in asked.methods for seed in asked.seeds]
    runs, claims = [record_of(RunFolder(folder)) for folder in folders], claims_of(asked.claims)
    found = compare(runs, asked.baseline, target_fraction=asked.target_fraction, claims=claims)
    print_table(found, console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_LOG))


if __name__ == "__main__":
    with safe_streams():
        sys.exit(main())
