"""The environments of the systems we compare with, and probes of torchmonarch for claims that name it.

Each lives in a virtual environment of its own, below ``.venv-peers``, so that none meets the project's packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "peers"
TORCH = os.environ.get("TORCH", "2.13.0")
# TORCH=nightly and the like are the Makefile's business: a peer wants a release.
ENVIRONMENTS = {
    "monarch": [f"torch=={TORCH}", "torchmonarch==0.7.0"],
    "others": [
        f"torch=={TORCH}",
        "numpy",
        "cloudpickle",
        "pyzmq",
        "ipython",
        "ipyparallel==9.2.0",
        "ray==2.60.0",
        "nbdistributed==0.1.0",
        "distributed",
    ],
}


def python_of(environment: str) -> Path:
    return ROOT / ".venv-peers" / environment / "bin" / "python"


def install() -> None:
    """Make the environments that are not there yet. CalledProcessError where pip cannot."""
    for name, packages in ENVIRONMENTS.items():
        done = python_of(name).parents[1] / ".installed"
        wanted = "\n".join(packages)
        if done.exists() and done.read_text() == wanted:
            continue
        print(f"installing {', '.join(packages)} into {done.parent}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", done.parent], check=True)
        pip = [python_of(name), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        subprocess.run([*pip, *packages], check=True)
        done.write_text(wanted)


def compare(out: Path, quick: bool) -> int:
    """The peers' own table (B1-B8), ours among them; run_all's exit status."""
    mine = [f"--venv={name}={sys.executable}" for name in ("monarch_lab", "floor", "torchmp", "torchrun")]
    command = [sys.executable, HERE / "run_all.py", "--python", python_of("others"), "--out", out]
    command += [f"--venv=monarch={python_of('monarch')}", *mine]
    if quick:
        command += ["--what", "perf", "--mb", "16"]
    return subprocess.run(command, cwd=ROOT).returncode


def probe_monarch(what: str, quick: bool) -> dict[str, Any] | None:
    """What peers/monarch_probe.py measures, in torchmonarch's environment; None where that is not installed."""
    python = python_of("monarch")
    if not (python.parents[1] / ".installed").exists():
        return None
    command = [python, HERE / "monarch_probe.py", what, *(["--quick"] if quick else [])]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for line in found.stdout.splitlines():
        if line.startswith("PROBE "):
            return dict(json.loads(line.removeprefix("PROBE ")))
    raise RuntimeError(f"the probe of torchmonarch failed:\n{found.stdout[-1000:]}\n{found.stderr[-2000:]}")
