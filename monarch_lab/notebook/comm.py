"""The kernel's side of the browser panel: one comm with a fixed name, pushed to at 2 Hz.

What a snapshot holds is wire/snapshot.py's; what a button does is up to the ``PanelCommands`` passed in.

    kernel to browser   {"op": "snapshot", "snapshot": KernelSnapshot}
                        {"op": "debug_text", "mesh": name, "session": name, "text": what was printed,
                         "prompt": "" while it runs}, of sessions that the panel holds
                        {"op": "failed", "command": op, "mesh": name, "text": sentence}
                        {"op": "pong", "thread": name}
    browser to kernel   {"op": "sync"}, {"op": "ping"}, {"op": "interrupt" | "stop", "mesh": name}
                        {"op": "debug_attach" | "debug_detach", "mesh": name, "session": name}
                        {"op": "debug_line", "mesh": name, "session": name, "line": text}

Runs on: "monarch-panel" (the only thread that publishes, and that takes snapshots) and a subshell of the kernel
(where the browser's messages arrive, so that they are heard while a cell runs).
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

import comm
import msgspec

from monarch_lab.wire.snapshot import KernelSnapshot

TARGET = "monarch_lab"
COMM_ID = "monarch_lab.panel"
PERIOD_S = 0.5
# Pushed even if nothing changed: a page that was reloaded while a cell runs finds the kernel by hearing it.
KEEPALIVE_S = 5.0

log = logging.getLogger(__name__)

Message = dict[str, Any]


class _Order(Enum):
    PUSH = auto()
    LOOK = auto()  # something may have changed
    END = auto()


class PanelCommands(Protocol):
    """What the panel's buttons do.

    Called on a thread of the kernel while a cell may be running. An exception's text is shown in the panel.
    """

    def interrupt(self, mesh: str) -> None: ...

    def stop(self, mesh: str) -> None: ...

    def debug_attach(self, mesh: str, session: str) -> None: ...

    def debug_line(self, mesh: str, session: str, line: str) -> str:
        """What the mesh's own commands say to it."""

    def debug_detach(self, mesh: str, session: str) -> None: ...


class Panel:
    """Keeps the browser's panel current between ``start`` and ``stop``, both called on the main thread.

    ``snapshot`` is called on the panel's thread, up to twice a second; it must not wait for a running cell.
    """

    def __init__(self, snapshot: Callable[[], KernelSnapshot], commands: PanelCommands) -> None:
        self._snapshot = snapshot
        self._commands = commands
        self._handlers: dict[str, Callable[[Message], None]] = {
            "sync": lambda _: self._outbox.put(_Order.PUSH),
            "ping": lambda _: self._outbox.put({"op": "pong", "thread": threading.current_thread().name}),
            "interrupt": lambda data: self._commands.interrupt(_mesh_of(data)),
            "stop": lambda data: self._commands.stop(_mesh_of(data)),
            "debug_attach": lambda data: self._commands.debug_attach(_mesh_of(data), _text_of(data, "session")),
            "debug_line": self._type,
            "debug_detach": lambda data: self._commands.debug_detach(_mesh_of(data), _text_of(data, "session")),
        }
        self._outbox: queue.SimpleQueue[Message | _Order] = queue.SimpleQueue()
        self._comm: Any = None
        self._thread: threading.Thread | None = None
        self._close_subshell: Callable[[], None] = lambda: None

    def start(self, ip: Any) -> None:
        """Open the comm. Does nothing in an IPython without a kernel, where no browser listens."""
        kernel = getattr(ip, "kernel", None)
        if kernel is None or self._thread is not None:
            return
        # primary=False sends no comm_open, of which front ends without the panel would complain.
        self._comm = comm.create_comm(target_name=TARGET, comm_id=COMM_ID, primary=False)
        comm.get_comm_manager().register_comm(self._comm)
        self._comm.on_msg(self._receive)
        self._close_subshell = _route_to_subshell(kernel, self._comm)
        self._outbox.put(_Order.PUSH)
        self._thread = threading.Thread(target=self._publish, args=(self._comm,), name="monarch-panel", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the comm; the panel says so. Raises nothing if ``start`` did nothing."""
        if self._thread is None:
            return
        self._outbox.put(_Order.END)
        self._thread.join()
        self._thread = None
        self._comm.close()
        self._close_subshell()
        self._outbox = queue.SimpleQueue()

    def debugger_news(self, mesh: str, session: str, text: str, prompt: str) -> None:
        """Of a debugger that the panel holds (controller.prompts.News). Any thread."""
        self._outbox.put({"op": "debug_text", "mesh": mesh, "session": session, "text": text, "prompt": prompt})
        self._outbox.put(_Order.LOOK)

    def _type(self, data: Message) -> None:
        mesh, session = _mesh_of(data), _text_of(data, "session")
        said = self._commands.debug_line(mesh, session, _text_of(data, "line"))
        if said:
            self.debugger_news(mesh, session, f"{said}\n", "(Pdb) ")  # where the mesh's own commands are

    def _publish(self, channel: Any) -> None:
        pushed: tuple[object, ...] | None = None
        pushed_at = 0.0
        is_failing = False  # one line in the log for a row of equal failures
        while True:
            item: Message | _Order | None
            try:
                item = self._outbox.get(timeout=PERIOD_S)
            except queue.Empty:
                item = None
            if item is _Order.END:
                return
            if isinstance(item, dict):
                channel.send(item)
                continue
            try:
                snapshot = self._snapshot()
            except Exception:
                if not is_failing:
                    log.exception("the panel cannot show the meshes of this kernel")
                is_failing = True
                continue
            is_failing = False
            shown, now = what_shows(snapshot), time.monotonic()
            if item is _Order.PUSH or shown != pushed or now - pushed_at >= KEEPALIVE_S:
                pushed, pushed_at = shown, now
                channel.send({"op": "snapshot", "snapshot": msgspec.to_builtins(snapshot)})

    def _receive(self, received: Message) -> None:
        data = received["content"]["data"]
        op = data.get("op")
        try:
            handler = self._handlers.get(op)
            if handler is None:
                raise ValueError(f"this kernel's monarch_lab knows no command {op!r}; is the panel of another version?")
            handler(data)
        except Exception as error:
            self._outbox.put({"op": "failed", "command": op, "mesh": data.get("mesh", ""), "text": str(error)})


def what_shows(snapshot: KernelSnapshot) -> tuple[object, ...]:
    """What has to differ for a push to be worth it: all but the number, and times that always run."""
    return (
        snapshot.current,
        *(
            (
                m.name,
                m.state,
                m.device,
                m.note,
                m.ops,
                *m.dims,
                *m.debuggers,
                *(msgspec.structs.replace(p, cpu_s=0.0) for p in m.processes),
            )
            for m in snapshot.meshes
        ),
    )


def _mesh_of(data: Message) -> str:
    return _text_of(data, "mesh")


def _text_of(data: Message, field: str) -> str:
    text = data.get(field)
    if not isinstance(text, str):
        raise ValueError(f"the command {data.get('op')!r} names no {field}")
    return text


def _route_to_subshell(kernel: Any, channel: Any) -> Callable[[], None]:
    """Have the comm's messages handled on a subshell made here, whatever the front end asks for.

    Left alone, ipykernel routes them to the shell that last published: the main one, busy while a cell runs, and a
    page reloaded meanwhile asks for no subshell at all. All of this is private to ipykernel; where it is missing,
    messages run where the front end sends them. Returns what closes the subshell.
    """
    try:
        thread = kernel.shell_channel_thread
        made: concurrent.futures.Future[str] = concurrent.futures.Future()
        thread.io_loop.add_callback(lambda: made.set_result(thread.manager._create_subshell()))  # noqa: SLF001
        subshell = made.result(5)
        channel._reply_subshell_for = lambda data, default: subshell  # noqa: SLF001
    except (AttributeError, TimeoutError):
        log.info("no subshell: the panel's buttons wait for a running cell", exc_info=True)
        return lambda: None
    # Not waited for: the subshell may be running the very command that stops us.
    return lambda: thread.io_loop.add_callback(thread.manager._delete_subshell, subshell)  # noqa: SLF001
