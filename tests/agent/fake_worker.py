"""A worker without torch: says what it is told, on the real link. Orders and control are words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from monarch_lab.transport.worker_link import WorkerLink
from monarch_lab.wire.supervision import WorkerSpec

_SLEEPER = "import time; time.sleep(600)"


def run(spec: WorkerSpec) -> None:
    link = WorkerLink(spec)
    link.connect()
    link.start_control(lambda header: link.send(b"control " + header))
    try:
        while True:
            header, *frames = link.receive()
            word, _, rest = bytes(header).partition(b" ")
            match word:
                case b"echo":
                    link.send(b"echo " + rest, frames)
                case b"say":
                    link.send(bytes(frames[0]))
                case b"where":
                    here = f"{os.getpid()} {os.getppid()} {os.getsid(0)} {threading.active_count()} {os.getcwd()}"
                    link.send(here.encode())
                case b"env":
                    link.send(os.environ.get(rest.decode(), "").encode())
                case b"burst":
                    for n in range(int(rest)):
                        link.send(b"%d" % n)
                    os.kill(os.getpid(), signal.SIGKILL)
                case b"print":
                    print(rest.decode())
                    print(rest.decode(), file=sys.stderr)
                    link.send(b"printed")
                case b"deaf":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    link.send(b"deaf")
                case b"family":
                    link.send(b" ".join(b"%d" % pid for pid in _family()))
                case b"raise":
                    raise ValueError(rest.decode())
                case b"exit":
                    sys.exit(int(rest))
                case b"leave":
                    return
    finally:
        link.close()


def _family() -> list[int]:
    """Three grandchildren as user code can make them: plain, in a session of its own, a daemon."""
    plain = subprocess.Popen([sys.executable, "-c", _SLEEPER])
    session = subprocess.Popen([sys.executable, "-c", _SLEEPER], start_new_session=True)
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            os.close(w)
            os.execv(sys.executable, [sys.executable, "-c", _SLEEPER])
        os.write(w, b"%d" % child)
        os._exit(0)
    daemon = int(os.read(r, 32))
    return [plain.pid, session.pid, daemon]
