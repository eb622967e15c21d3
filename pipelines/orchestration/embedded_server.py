"""A Prefect server for the length of one command, where none is configured.

Prefect would start one by itself at the first flow; that start takes several seconds in which nothing else happens, and
its stop prints tracebacks. Started here it comes up while torch is imported and data are prepared, writes what it has
to say to a log file, and ends with its parent however the parent ends: it reads a pipe that closes with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from flcore.errors import RunError
from flcore.locks import take_lock

_START_TIMEOUT_SECONDS = 180.0


def set_prefect_environment() -> None:
    """Defaults for Prefect, set before it is imported: its home in the project, quiet, no telemetry."""
    defaults = {
        "PREFECT_HOME": str(Path(".prefect").resolve()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "DO_NOT_TRACK": "true",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


class EmbeddedServer:
    """Starts at once, in the background; :meth:`wait` before the first flow. Idle where ``PREFECT_API_URL`` is set."""

    def __init__(self) -> None:
        """Start the server process, unless a server is configured."""
        set_prefect_environment()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        if "PREFECT_API_URL" in os.environ:
            return
        home = Path(os.environ["PREFECT_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "embedded-server.log"
        self._port = _free_port()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.orchestration.embedded_server", str(self._port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Its own process group: Ctrl-C reaches the run, which then still has a server to report to.
                start_new_session=True,
            )
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{self._port}/api"

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            RunError: it ended or did not answer in time; names its log.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{os.environ['PREFECT_API_URL']}/health", timeout=5):
                    self._answered = True
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RunError(
            f"the embedded Prefect server did not start; see {self._log}, or set PREFECT_API_URL to a server"
        )

    def close(self) -> None:
        """Let the server end, if it was started here; it takes a second, for which nobody needs to wait."""
        if self._process is None:
            return
        os.environ.pop("PREFECT_API_URL", None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._answered:  # nothing was reported to it, and it may still be starting
            self._process.kill()
        self._process = None

    def __enter__(self) -> EmbeddedServer:
        """The server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(port: int) -> None:
    """The server process: Prefect's API without its pages, until standard input closes."""
    os.environ |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    import uvicorn
    from prefect.server.api.server import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Two servers that make the tables of a new database at the same time stop each other.
            home = Path(os.environ["PREFECT_HOME"])
            home.mkdir(parents=True, exist_ok=True)
            with (home / "embedded-server.lock").open("w") as lock:
                take_lock(lock, wait=True)
                await super().startup(sockets)

    config = uvicorn.Config(create_app, factory=True, host="127.0.0.1", port=port, log_level="error", lifespan="on")
    server = Server(config)

    def stop_with_parent() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True
        # Services may be in the middle of something; results are on disk long since.
        time.sleep(5)
        os._exit(0)

    threading.Thread(target=stop_with_parent, daemon=True).start()
    server.run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
