"""Prefect's command line with protofl's flows imported, for ``prefect deploy``.

That command adds the working folder to the search path to import a flow by its name. A flow that is imported before is
not looked for there, nor is a library that it needs.
"""

from __future__ import annotations

from prefect.cli import app

from pipelines.orchestration import flows, paper_flow  # noqa: F401 - imported before Prefect looks for them

if __name__ == "__main__":
    app()
