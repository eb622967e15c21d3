"""The servers of ``protofl up`` that are ASGI applications: as their makers make them, behind one check.

    python -P -m pipelines.orchestration.serving prefect|mlflow PORT

:mod:`pipelines.same_origin` says what is checked. Optuna's dashboard is in :mod:`pipelines.tuning.dashboard`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from pipelines.same_origin import Checked

if TYPE_CHECKING:
    from starlette.types import ASGIApp

HOST = "127.0.0.1"
_LOOK_EVERY_SECONDS = 30.0


def _mlflow() -> ASGIApp:
    """Return MLflow's server, as ``mlflow server`` makes it: in this process, instead of one that it starts."""
    from mlflow.environment_variables import _MLFLOW_IN_JOB_EXECUTOR, _MLFLOW_SGI_NAME
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    store, root = os.environ["MLFLOW_BACKEND_STORE_URI"], "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: store,
        constants.REGISTRY_STORE_URI_ENV_VAR: store,
        constants.ARTIFACT_ROOT_ENV_VAR: root,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ["MLFLOW_ARTIFACTS_DESTINATION"],
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        _MLFLOW_SGI_NAME.name: "uvicorn",
        _MLFLOW_IN_JOB_EXECUTOR.name: "false",
    }
    initialize_backend_stores(store, store, root)
    from mlflow.server.fastapi_app import app  # reads what is set above

    threading.Thread(target=_mark_killed_runs, args=(store,), daemon=True).start()
    return app


def _mark_killed_runs(store: str) -> None:
    """Mark runs whose processes were all killed, which nobody else would do before the next run begins."""
    from mlflow.tracking.client import MlflowClient

    from pipelines.tracking.run_status import mark_silent_here

    client = MlflowClient(store)
    while True:
        time.sleep(_LOOK_EVERY_SECONDS)
        try:
            mark_silent_here(client)
        except Exception:  # a locked or absent database; the server goes on
            logging.getLogger(__name__).exception("runs without a sign of life could not be marked")


def main() -> None:
    """Serve until the process is ended."""
    name, port = sys.argv[1], int(sys.argv[2])
    import uvicorn

    if name == "mlflow":
        app = _mlflow()
    else:
        from prefect.server.api.server import create_app

        app = create_app(final=True)
    uvicorn.run(Checked(app), host=HOST, port=port, timeout_keep_alive=5)


if __name__ == "__main__":
    main()
