"""A pipe's side process: runs the user's function beside its worker, and ends with it. It sees no GPU.

``main(fd, worker)``: ``fd`` is one end of a socket pair made by the worker, ``worker`` its process number.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

from monarch_lab.tensors import naming, payload
from monarch_lab.transport import platform
from monarch_lab.worker import unattended
from monarch_lab.worker.pipe_end import PipeEnd


def main(fd: int, worker: int) -> None:
    platform.set_parent_death_signal()
    if os.getppid() != worker:
        return
    link = Connection(fd)
    max_messages, ranks, sizes = link.recv()
    order = link.recv_bytes()
    payload.remember_sources(link.recv())
    unattended.install()
    end = PipeEnd(link, max_messages, ranks, sizes)
    try:
        _run(end, order)
    except EOFError:
        end.end()  # the worker let go of the pipe
    except BaseException:
        end.end(traceback.format_exc())
    else:
        end.end()


def _run(end: PipeEnd, order: bytes) -> None:
    function, is_generator, args, kwargs = payload.unpack(order)
    if isinstance(function, str):
        function = naming.resolve(f"user:{function}", {})
    if not is_generator:
        function(end, *args, **kwargs)
        return
    values: Any = function(*args, **kwargs)
    for value in values:
        end.send(value)
