"""``python -m monarch_lab.agent host [FILE]``: the agent of one host, for a supervisor that gave an invitation.

The invitation comes from FILE (mode 0600), or from stdin, as the file has it; it holds keys, and so is in no command
line and no environment.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from monarch_lab.agent.host_loop import HostAgent, Owner
from monarch_lab.config import load
from monarch_lab.errors import LaunchError, ProtocolError
from monarch_lab.transport.keys import Invitation, decode_invitation, read_invitation
from monarch_lab.transport.stream import read_message
from monarch_lab.wire.codec import Decoder
from monarch_lab.wire.hosts import LocalOwner

_decode_owner = Decoder(LocalOwner)
_LONGEST = 1 << 16


def main(args: Sequence[str]) -> int:
    """Exit code: 0 when the supervisor let it go, 1 when it was lost or could not begin, 2 for a wrong call."""
    if len(args) > 1 or any(arg.startswith("-") for arg in args):
        print("usage: monarch-lab agent [FILE]: joins the supervisor whose invitation is in FILE, or on stdin")
        return 0 if args[0] in ("-h", "--help") else 2
    try:
        invitation = read_invitation(args[0]) if args else decode_invitation(sys.stdin.buffer.read(_LONGEST))
    except (LaunchError, ProtocolError) as e:
        print(f"monarch-lab agent: {e}", file=sys.stderr)
        return 1
    return serve(invitation, Owner())


def serve(invitation: Invitation, owner: Owner) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s", stream=sys.stderr)
    return HostAgent(invitation, owner, load(), dict(os.environ)).run()


def local() -> NoReturn:
    """What a supervisor runs on its own machine: told by a LocalOwner on stdin, which stays open as a leash."""
    message = read_message(sys.stdin.fileno())
    if message is None:
        raise SystemExit("the supervisor ended before it said what to do")
    owner = _decode_owner(message)
    known = Owner(owner.pid, owner.pid_fd, owner.stderr_fd, stdin_is_leash=True)
    code = serve(decode_invitation(owner.invitation), known)
    # At once: zmq's and the interpreter's own ending have nothing to add, and the supervisor waits.
    logging.shutdown()
    os._exit(code)
