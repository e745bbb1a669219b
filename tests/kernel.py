"""A real Jupyter kernel for tests: run a cell, answer its prompts, act while it runs, look at what it sent.

    with Kernel() as kernel:
        assert kernel.run("print(1)") == "ok"
        assert kernel.text().strip() == "1"

It needs no front end: what JupyterLab does with these messages is tests/browser's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from jupyter_client.manager import KernelManager

Message = dict[str, Any]


class Kernel:
    """Each ``run`` starts a new record: text(), errors(), displays() and seen are of the last (or running) cell."""

    def __init__(
        self, env: dict[str, str] | None = None, cwd: str | None = None, python: str | os.PathLike[str] | None = None
    ) -> None:
        # Over unix sockets no two tests can want one port, and ipykernel has no TCP to warn about.
        self._directory = tempfile.TemporaryDirectory(prefix="mlk-")
        file = os.path.join(self._directory.name, "kernel.json")  # the sockets lie beside it
        self.manager = KernelManager(kernel_name="python3", transport="ipc", connection_file=file)
        if python is not None:  # the interpreter of another environment, which has ipykernel
            assert self.manager.kernel_spec is not None
            self.manager.kernel_spec.argv[0] = str(python)
        self.seen: list[Message] = []
        self.reply: Message | None = None
        self.question: Message | None = None  # the last prompt
        self._env, self._cwd = env, cwd
        self._cell = ""

    def __enter__(self) -> Kernel:
        options: dict[str, Any] = {"env": {**os.environ, **(self._env or {})}}
        if self._cwd is not None:
            options["cwd"] = self._cwd
        self.manager.start_kernel(**options)
        self._connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()
        self._directory.cleanup()

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    # running cells

    def run(
        self,
        code: str,
        answer: Callable[[str], str] | None = None,
        during: Callable[[], object] | None = None,
        allow_stdin: bool = True,
        timeout: float = 60,
    ) -> str:
        """Run one cell to its end; the reply's status: "ok", "error" or "aborted".

        ``answer(prompt)`` gives the line for each prompt. ``during()`` is called about every 20 ms while the cell
        runs, and reads text() and the like to find the moment to act. Raises TimeoutError with what the cell sent.
        """
        self.start(code, allow_stdin=allow_stdin)
        return self.wait(answer, during, timeout)

    def start(self, code: str, allow_stdin: bool = True, **options: bool) -> str:
        """Send a cell and return at once; the id of its request. ``wait`` waits for its end. ``options``: silent,
        store_history."""
        self.seen, self.reply = [], None
        self._cell = self.client.execute(code, allow_stdin=allow_stdin, **options)
        return self._cell

    def wait(
        self,
        answer: Callable[[str], str] | None = None,
        during: Callable[[], object] | None = None,
        timeout: float = 60,
    ) -> str:
        def ended() -> bool:
            if during:
                during()
            return self.reply is not None and self._is_idle()

        self._read_until(ended, answer, timeout, "the cell to end")
        assert self.reply is not None
        return str(self.reply["content"]["status"])

    def wait_for(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Read what the kernel sends until ``condition()`` is true; for messages that come between cells."""
        self._read_until(condition, None, timeout, "the condition")

    def _read_until(
        self, condition: Callable[[], object], answer: Callable[[str], str] | None, timeout: float, what: str
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                sent = [(m["msg_type"], m["content"]) for m in self.seen[-20:]]
                raise TimeoutError(f"waited {timeout} s for {what}; the kernel's last messages: {sent}")
            if not self.manager.is_alive():
                raise RuntimeError(f"the kernel died while a test waited for {what}")
            with contextlib.suppress(queue.Empty):
                self.question = self.client.get_stdin_msg(timeout=0)
                prompt = self.question["content"]["prompt"]
                if answer is None:
                    raise AssertionError(f"the cell asked {prompt!r} and the test gave no answer=")
                self.client.input(answer(prompt))
            with contextlib.suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=0)
                if reply["parent_header"].get("msg_id") == self._cell:
                    self.reply = reply
            with contextlib.suppress(queue.Empty):
                self.seen.append(self.client.get_iopub_msg(timeout=0.02))

    def _is_idle(self) -> bool:
        return any(m["msg_type"] == "status" and m["content"]["execution_state"] == "idle" for m in self.mine())

    # what came

    def mine(self) -> list[Message]:
        """The cell's own messages; ``seen`` also has those of comms, other cells and late output."""
        return [m for m in self.seen if m["parent_header"].get("msg_id") == self._cell]

    def text(self, stream: str | None = None) -> str:
        """What the cell printed so far; ``stream`` is "stdout", "stderr" or None for both, and for what workers printed
        (notebook/block.py): that is in displays, where they were first shown, as they are now."""
        parts: list[str] = []
        places: dict[str, int] = {}
        for m in self.mine():
            content = m["content"]
            if m["msg_type"] == "stream" and stream in (None, content["name"]):
                parts.append(content["text"])
            elif stream is None and (block := _block_id(m)) is not None:
                parts.append("")
                place = places.setdefault(block, len(parts) - 1)
                parts[place] = content["data"]["text/plain"] + "\n"
        return "".join(parts)

    def errors(self) -> list[Message]:
        """The cell's errors: dicts with ename, evalue and traceback."""
        return [m["content"] for m in self.mine() if m["msg_type"] == "error"]

    def displays(self, updates: bool = False) -> list[dict[str, Any]]:
        """Mime bundles the cell showed, its result included; without what workers printed."""
        kinds = ("display_data", "execute_result") + (("update_display_data",) if updates else ())
        return [m["content"]["data"] for m in self.mine() if m["msg_type"] in kinds and _block_id(m) is None]

    def blocks(self) -> list[dict[str, Any]]:
        """Each state of each display of what workers printed."""
        return [m["content"]["data"] for m in self.mine() if _block_id(m) is not None]

    def comm_messages(self, comm_id: str) -> list[dict[str, Any]]:
        """Data that one comm sent since the last ``start``."""
        return [
            m["content"]["data"]
            for m in self.seen
            if m["msg_type"] == "comm_msg" and m["content"]["comm_id"] == comm_id
        ]

    # acting on it

    @property
    def pid(self) -> int:
        assert self.manager.provisioner is not None
        return int(self.manager.provisioner.pid)  # type: ignore[attr-defined]

    def send(self, msg_type: str, content: dict[str, Any], subshell: str | None = None) -> str:
        """Send on the shell channel; the message's id."""
        message = self.client.session.msg(msg_type, content)
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def control(self, msg_type: str, content: dict[str, Any] | None = None, timeout: float = 10) -> dict[str, Any]:
        """Send on the control channel; the reply's content."""
        message = self.client.session.msg(msg_type, content or {})
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def interrupt(self) -> None:
        """As the front end's stop button: SIGINT to the kernel's process group."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """SIGKILL to the kernel process alone; nothing of it runs afterwards."""
        os.kill(self.pid, signal.SIGKILL)
        self.manager.shutdown_kernel(now=True)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()


def _block_id(message: Message) -> str | None:
    """Of a display of what workers printed."""
    found = str(message["content"].get("transient", {}).get("display_id", ""))
    return found if found.startswith("monarch-output-") else None
