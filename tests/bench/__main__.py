"""Every claim that can be measured, each in a process of its own: ``python -m tests.bench [CLAIM ...]``.

Prints for each claim one line of JSON and one to read. The exit status says whether the benchmarks ran, not whether
goals were met: 0 also where one was missed, 1 where a benchmark broke or left a process behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.bench import _peers
from tests.bench.peers._util import MARK, cmdline, judge_tree, marked

HERE = Path(__file__).resolve().parent
LIMIT_S = 3600
GRACE_S = 3  # for a resource tracker and the like to see that its parent is gone


def claims() -> list[str]:
    return sorted(
        (p.stem for p in HERE.glob("[a-z][0-9]*_*.py")), key=lambda n: (n[0] != "p", int(n[1:].split("_")[0]))
    )


def chosen(wanted: list[str]) -> list[str]:
    """By name, or by the claim alone: ``p1``, ``P1`` or ``p1_small_ops``. SystemExit for an unknown one."""
    found = []
    for text in wanted:
        fitting = [c for c in claims() if text.lower() in (c, c.split("_")[0])]
        if not fitting:
            sys.exit(f"{text!r} is not one of {', '.join(claims())}")
        found += fitting
    return found or claims()


def run(claim: str, quick: bool, json_directory: Path | None) -> bool:
    """Run one, its lines passed on; whether it ended well and left nothing running."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", f"tests.bench.{claim}", *(["--quick"] if quick else [])]
    process = subprocess.Popen(
        command,
        cwd=_peers.ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    found = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                found.append(line)
        code = process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        left = end_left(mark)
    if json_directory is not None:
        (json_directory / f"{claim}.json").write_text(f"[{','.join(found)}]")
    if left:
        print(f"{claim} left processes behind, now ended: {left}", file=sys.stderr)
    if code:
        print(f"{claim} failed with exit status {code}", file=sys.stderr)
    return not code and bool(found) and not left


def end_left(mark: str) -> dict[int, str]:
    """Processes of the run that outlived it by a moment, ended by pid: their command lines."""
    deadline = time.monotonic() + GRACE_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {pid: cmdline(pid) for pid in pids}
    if left:
        judge_tree(mark, kill=True)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="p1_small_ops, or p1; all if none is given")
    parser.add_argument("--peers", action="store_true", help="install the other systems, then their table beside ours")
    parser.add_argument("--json", type=Path, metavar="DIR", help="also write DIR/CLAIM.json")
    parser.add_argument("--quick", action="store_true", help="fewer runs: does it work, not how fast is it")
    parser.add_argument("--list", action="store_true", help="print the claims")
    options = parser.parse_args()
    names = chosen(options.claims)
    if options.list:
        print("\n".join(names))
        return 0
    if options.json is not None:
        options.json.mkdir(parents=True, exist_ok=True)
    if options.peers:
        _peers.install()
    broken = [name for name in names if not run(name, options.quick, options.json)]
    if options.peers and not options.claims:
        out = (options.json or _peers.ROOT / "bench-results") / "peers"
        if _peers.compare(out, options.quick):
            broken.append("peers")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
