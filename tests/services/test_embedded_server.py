"""Commands begun at the same time in a fresh folder all get their server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.services


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Whether a server answers within three minutes, and has not ended before."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def test_two_servers_make_one_database(tmp_path: Path) -> None:
    """Without the lock one of them fails on tables that the other has just made."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    ports = free_ports(3)
    servers = []
    for port in ports:
        with (tmp_path / f"{port}.log").open("w") as log:
            command = [sys.executable, "-m", "pipelines.orchestration.embedded_server", str(port)]
            servers.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
            )
    try:
        found = [answers(port, server) for port, server in zip(ports, servers, strict=True)]
        assert all(found), (tmp_path / f"{ports[found.index(False)]}.log").read_text()[-2000:]
    finally:
        for server in servers:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)
