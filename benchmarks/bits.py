"""Whether the same bits come out: when repeated, with another number of workers, after a kill."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.numpy import load_file

from benchmarks.common import Bench, Federation
from benchmarks.work import digest
from pipelines.runs.layout import RunFiles, read_json

ONE_PROCESS, STARTS_OVER = "one process", "starts over"
Verdict = Literal["same", "differ"]


@dataclass(frozen=True)
class Bits:
    """What is known of a case; None: it was not tried.

    Attributes:
        repeated: digests of the final weights over the repetitions.
        workers: with another number of workers or cores; :data:`ONE_PROCESS` where there is but one.
        killed: after SIGKILL and the same command once more: the verdict, and whether it went on or started over;
            ``failed`` where that failed; :data:`STARTS_OVER` where nothing is kept that it could go on from.
    """

    repeated: Verdict | None
    workers: str | None
    killed: str | None

    def fact(self) -> dict[str, Any]:
        """As keys of a case's JSON object."""
        return {"bits": asdict(self)}


def compared(digests: Sequence[str]) -> Verdict | None:
    """Whether all digests are the same; None for fewer than two."""
    if len(digests) < 2:
        return None
    return "same" if len(set(digests)) == 1 else "differ"


def run_digest(run: Path) -> str:
    """Digest of the global model that a finished run has left."""
    return digest(load_file(RunFiles(run).model))


@dataclass(frozen=True)
class Killed:
    """A training that was killed and started again: its digest, and whether it went on where it was."""

    digest: str
    went_on: bool

    def verdict(self, undisturbed: str) -> str:
        """Beside the digest of a run that nobody killed."""
        return f"{compared([self.digest, undisturbed])}, {'went on' if self.went_on else 'started over'}"


def kill_and_start_again(
    bench: Bench, federation: Federation, rounds: int, assignments: Sequence[str], environment: Mapping[str, str]
) -> Killed | None:
    """Start a training, kill it with SIGKILL after half of its rounds, start it again.

    Args:
        bench: whose folder and variables it has.
        federation: what is trained, in one process.
        rounds: of the run.
        assignments: as for ``--set``.
        environment: further variables.

    Returns:
        None where the training had finished before it could be killed.

    Raises:
        RunError: started again, it failed.
    """
    case = "a training that is killed"
    bench.say(case)
    checkpoint = RunFiles(federation.out).checkpoint / "state.json"
    federation.clear()
    process = subprocess.Popen(
        federation.command(*assignments),
        cwd=bench.folder,
        env=bench.environment(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None and _rounds_done(checkpoint) < max(1, rounds // 2):
            time.sleep(0.01)
    finally:
        process.kill()  # this process alone: SIGKILL to its id
    killed = process.wait() == -signal.SIGKILL and checkpoint.exists()
    killed_ms = 1000 * time.time()
    federation.train(case, *assignments, environment=environment, go_on=True)
    if not killed:
        return None
    first_round = read_json(RunFiles(federation.out).timing)["began_ms"]
    return Killed(run_digest(federation.out), went_on=first_round < killed_ms)


def _rounds_done(state: Path) -> int:
    """Rounds that a checkpoint holds, which is replaced as a whole; 0 where there is none yet."""
    return int(read_json(state)["round"]) if state.exists() else 0
