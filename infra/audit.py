"""Known vulnerabilities of what the lock installs, as `make audit` asks for them (of which make's exit code is 2 or 0).

pip-audit is installed into an environment of its own: it is no part of what it looks at. Asked is the advisory service
that it asks by default, a package and a version at a time; nothing is installed from the lock. One package is asked for
first: where the service does not even know that, as behind a mirror that has none, the others are not asked for.

Exit codes: 0 none is known; 1 some are, and are printed, one a line; 5 the service, or pip-audit itself, could not be
reached, or not for every package, so that nothing is known of those.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("requirements.lock")
HOME = Path(".venv") / "audit"
UNKNOWN = 5
_SECONDS = 1500


def main(environment: Path = HOME, lock: Path = LOCK) -> int:
    """Ask, and say what was found.

    Args:
        environment: folder of pip-audit's own, made where it is not there.
        lock: requirements with versions and hashes.
    """
    program = environment / "bin" / "pip-audit"
    if not program.exists() and not _made(environment):
        return _unknown("pip-audit cannot be installed here")
    first = next(line.split()[0] for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line)
    with tempfile.TemporaryDirectory() as scratch:
        one = Path(scratch) / "one.txt"
        one.write_text(f"{first}\n", encoding="utf-8")
        found = _asked(program, one)
    if isinstance(found, list) and not any("skip_reason" in package for package in found):
        found = _asked(program, lock)
    else:
        return _unknown(found if isinstance(found, str) else f"it does not know {first}")
    return _unknown(found) if isinstance(found, str) else told(found)


def told(packages: list[dict[str, Any]]) -> int:
    """Print what is known of packages, as pip-audit describes them; returns the exit code."""
    skipped = [package for package in packages if "skip_reason" in package]
    found = [(package, known) for package in packages for known in package.get("vulns", ())]
    for package, known in found:
        cure = f"fixed in {', '.join(known['fix_versions'])}" if known["fix_versions"] else "not fixed yet"
        print(f"{package['name']} {package['version']}: {known['id']}, {cure}")
    for package in skipped:
        print(f"{package['name']}: not known to the service")
    print(f"{len(packages) - len(skipped)} packages asked for, {len(found)} known vulnerabilities")
    if found:
        return 1
    return UNKNOWN if skipped else 0


def _asked(program: Path, requirements: Path) -> list[dict[str, Any]] | str:
    """What the service knows, by package; or why it could not be asked."""
    words = [str(program), "--requirement", str(requirements), "--no-deps", "--disable-pip", "--format", "json"]
    words += ["--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
        return list(json.loads(done.stdout)["dependencies"])
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS} s"
    except (ValueError, TypeError, KeyError):
        return (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]


def _unknown(why: str) -> int:
    print(f"audit: the advisory service cannot be asked from here, so nothing is known: {why}", file=sys.stderr)
    return UNKNOWN


def _made(environment: Path) -> bool:
    """Make pip-audit's environment; whether that was possible."""
    uv = [sys.executable, "-m", "uv", "--quiet"]
    steps = [
        [*uv, "venv", "--clear", "--python", sys.executable, str(environment)],
        [*uv, "pip", "install", "--python", str(environment / "bin" / "python"), "pip-audit>=2.7"],
    ]
    return all(subprocess.run(step, stderr=subprocess.DEVNULL, check=False).returncode == 0 for step in steps)


if __name__ == "__main__":
    sys.exit(main())
