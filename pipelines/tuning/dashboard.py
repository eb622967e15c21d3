"""Optuna's dashboard for ``protofl up``, with the check of hosts and origins."""

from __future__ import annotations

import argparse

from pipelines.same_origin import LOOPBACK, checked_wsgi
from pipelines.tuning.storage import JOURNAL, open_storage


def main() -> None:
    """Serve the pages until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.tuning.dashboard", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this machine only)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--storage", metavar="URL", help=f"Optuna storage (default: {JOURNAL})")
    arguments = parser.parse_args()
    import bottle  # type: ignore[import-untyped]
    from optuna_dashboard import wsgi  # type: ignore[import-untyped]

    pages = wsgi(open_storage(arguments.storage))
    bottle.run(checked_wsgi(pages, any_host=arguments.host not in LOOPBACK), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
