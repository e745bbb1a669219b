"""%mesh debugpy: another debugger attaches to a worker, over the loopback interface alone. No editor here."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_lab as ml
from monarch_lab.controller import debugging
from monarch_lab.errors import UsageError, UsageRuntimeError
from monarch_lab.worker import outside

MODULE = "def work(n):\n    inner = n * 2\n    return inner + 1\n"


class Editor:
    """The few messages of the Debug Adapter Protocol that an editor sends."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._stream = self._socket.makefile("rb")
        self._numbers = itertools.count(1)

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        number = next(self._numbers)
        message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return number

    def read(self) -> dict[str, Any]:
        length = 0
        while (line := self._stream.readline().strip()) or not length:
            length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
        found: dict[str, Any] = json.loads(self._stream.read(length))
        return found

    def until(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        while True:
            message = self.read()
            if message["type"] == "event" and message["event"] == kind:
                return dict(message.get("body") or {})

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = self.send(command, **arguments)
        while True:
            message = self.read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                return dict(message.get("body") or {})


@pytest.fixture
def port(cell: Any) -> Iterator[int]:
    yield debugging.listen(cell, "0")[0]
    cell.restart("0")


def listening(port: int) -> set[str]:
    """Addresses of this machine where the port is open, as the system writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, hexadecimal = line.split()[1].partition(":")
            if int(hexadecimal, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


def test_an_editor_stops_a_worker_in_a_file_and_looks_at_it(cell: Any, port: int, tmp_path: Path) -> None:
    assert listening(port) == {"0100007F"}  # 127.0.0.1 and nothing else
    assert debugging.listen(cell, "0") == {0: port}  # once a process
    file, folder = tmp_path / "debugged_work.py", str(tmp_path)
    file.write_text(MODULE)

    def work() -> int:
        import sys

        sys.path.insert(0, folder)
        import debugged_work

        return int(debugged_work.work(20))

    with Editor(port) as editor:
        editor.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        editor.send("attach", justMyCode=True)
        editor.until("initialized")
        editor.ask("setBreakpoints", source={"path": str(file)}, breakpoints=[{"line": 3}])
        editor.ask("configurationDone")
        future = ml.call_on_shard_and_fetch(work, shard={"gpu": 0})
        stopped = editor.until("stopped")
        assert stopped["reason"] == "breakpoint" and not future.done()
        frame = editor.ask("stackTrace", threadId=stopped["threadId"], levels=1)["stackFrames"][0]
        assert (frame["name"], frame["line"]) == ("work", 3)
        assert editor.ask("evaluate", expression="inner", frameId=frame["id"], context="repl")["result"] == "40"
        editor.ask("continue", threadId=stopped["threadId"])
        assert future.result(30) == 41
        editor.ask("disconnect", terminateDebuggee=False)
    assert ml.call_on_shard_and_fetch(work, shard={"gpu": 0}).result(30) == 41

    cell.restart("0")
    assert not listening(port)


def test_what_is_not_there_is_one_sentence(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", None)  # import raises
    assert outside.listen() == (0, outside.NOT_THERE)
    with pytest.raises(UsageError, match="rank"):
        debugging.listen(cell, "7")

    def hide() -> None:
        import sys

        sys.modules["debugpy"] = None  # type: ignore[assignment]

    def show() -> None:
        import sys

        del sys.modules["debugpy"]

    ml.call_on_shard_and_fetch(hide, shard={"gpu": 1}).result(30)
    with pytest.raises(UsageRuntimeError, match="rank 1: debugpy is not installed where the workers run: pip install"):
        debugging.listen(cell, "1")
    ml.call_on_shard_and_fetch(show, shard={"gpu": 1}).result(30)
