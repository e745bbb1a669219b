"""From a print of a worker to the messages it becomes, without a mesh."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from monarch_lab.wire.engine import Output, OutputTail
from monarch_lab.worker import log_tail, output_cap
from monarch_lab.worker.output import CellStream, Recorder
from monarch_lab.worker.output_cap import HEAD_CHARACTERS, HEAD_LINES, TAIL_LINES, CellCap


class Worker:
    """A recorder whose cell is ``cell``, and the log files it reads."""

    def __init__(self, directory: Path) -> None:
        self.cell = 1
        self.sent: list[Any] = []
        self.logs = [directory / "mesh.0.out", directory / "mesh.0.err"]
        for log in self.logs:
            log.write_text("before the first cell\n")
        self.recorder = Recorder(lambda: self.cell, self.sent.append, *map(str, self.logs))
        self.out, self.err = (CellStream(name, self.recorder) for name in ("stdout", "stderr"))

    def texts(self) -> list[tuple[int, str, str]]:
        found = [(m.cell, m.stream, m.text) for m in self.sent if isinstance(m, Output)]
        self.sent.clear()
        return found


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_a_print_leaves_at_once_and_more_of_them_together(worker: Worker) -> None:
    print("first", file=worker.out)
    assert worker.texts() == [(1, "stdout", "first\n")]
    for n in range(3):
        print(n, file=worker.out)
    print("half", end="", file=worker.out)
    assert worker.texts() == []
    worker.recorder.tick()
    assert worker.texts() == [(1, "stdout", "0\n1\n2\n")]
    worker.out.flush()
    worker.recorder.tick()
    assert worker.texts() == [(1, "stdout", "half")]


def test_streams_and_descriptors_keep_their_order(worker: Worker) -> None:
    print("first", file=worker.out)
    worker.sent.clear()
    print("a", file=worker.out)
    with worker.logs[0].open("a") as log:
        log.write("b\n")
    print("c", file=worker.err)
    with worker.logs[1].open("ab") as log_of_bytes:
        log_of_bytes.write("d é".encode()[:-1])
    worker.recorder.tick()
    with worker.logs[1].open("ab") as log_of_bytes:
        log_of_bytes.write("é".encode()[-1:] + b"\xff\n")
    worker.recorder.flush()
    assert worker.texts() == [
        (1, "stdout", "a\nb\n"),
        (1, "stderr", "c\n"),
        (1, "stderr", "d é\N{REPLACEMENT CHARACTER}\n"),
    ]


def test_what_python_printed_can_be_sent_without_a_look_at_the_logs(worker: Worker) -> None:
    print("first", file=worker.out)
    worker.sent.clear()
    with worker.logs[0].open("a") as log:
        log.write("in C\n")
    worker.recorder.flush_pieces()
    assert worker.texts() == []
    worker.out.write("half")

    worker.recorder.flush_pieces()
    assert "".join(text for _, _, text in worker.texts()) == "in C\nhalf"  # a line that begins looks first


def test_text_belongs_to_the_cell_it_was_printed_in(worker: Worker) -> None:
    print("x", end="", file=worker.out)
    worker.cell = 2
    print("y", file=worker.out)
    worker.recorder.flush()
    assert worker.texts() == [(2, "stdout", "y\n"), (1, "stdout", "x")]


def test_versions_that_nobody_sees_are_not_sent_and_surrogates_can_be(worker: Worker) -> None:
    print("first", file=worker.out)
    worker.sent.clear()
    worker.err.write("".join(f"\r{n}%" for n in range(100)))
    worker.out.write("\ud800\n")
    worker.recorder.flush()
    assert worker.texts() == [(1, "stdout", "\\ud800\n"), (1, "stderr", "\r99%")]
    with pytest.raises(TypeError, match="must be str, not int"):
        worker.out.write(3)  # type: ignore[arg-type]


def test_bytes_stand_among_the_text(worker: Worker) -> None:
    print("text", file=worker.out)
    whole = "naïve\n".encode()
    assert worker.out.buffer.write(whole[:3]) + worker.out.buffer.write(bytearray(whole[3:])) == len(whole)
    worker.out.buffer.write(b"\xff\n")
    worker.recorder.tick()
    assert "".join(text for _, _, text in worker.texts()) == "text\nnaïve\n\\xff\n"


def test_an_interrupt_loses_no_text(worker: Worker) -> None:
    def send(message: Any) -> None:
        worker.recorder.interrupt()
        worker.sent.append(message)

    recorder = worker.recorder = Recorder(lambda: 1, send)
    recorder.write("stdout", "a")
    recorder.write("stderr", "b")
    with pytest.raises(KeyboardInterrupt):
        recorder.flush()
    assert worker.texts() == [(1, "stdout", "a"), (1, "stderr", "b")]
    recorder.flush()
    with pytest.raises(KeyboardInterrupt):
        recorder.interrupt()


def test_a_fork_writes_to_the_descriptor(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    print("pending", end="", file=worker.out)
    worker.recorder.watch_forks()
    if (pid := os.fork()) == 0:
        print("from the child", file=worker.out)
        os._exit(0)
    os.waitpid(pid, 0)
    assert capfd.readouterr().out == "from the child\n"
    worker.recorder.flush()
    assert worker.texts() == [(1, "stdout", "pending")]


def test_a_log_that_was_cut_is_read_from_its_begin_and_one_far_ahead_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("old " * 10)
    tail = log_tail.LogTail("stdout", str(path))
    assert tail.read() == ""
    path.write_text("new")
    assert tail.read() == "new"
    monkeypatch.setattr(log_tail, "_MOST_BEHIND", 100)
    monkeypatch.setattr(log_tail, "_READ_BYTES", 10)
    path.write_text("new" + "x" * 90 + "y" * 20)
    assert tail.read() == f"\n… 100 bytes are not shown; all are in {path}\n" + "y" * 10
    assert log_tail.LogTail("stdout", str(tmp_path / "none")).read() == ""


def test_a_head_then_a_tail_and_all_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "all"
    cap = CellCap(7, str(path))
    text = "".join(f"{n}\n" for n in range(HEAD_LINES + 500))
    assert cap.add("stdout", text[:50]) + cap.add("stdout", text[50:]) == "".join(f"{n}\n" for n in range(HEAD_LINES))
    assert cap.add("stderr", "begun") == ""
    last = [("stdout", str(n)) for n in range(HEAD_LINES + 500 - TAIL_LINES, HEAD_LINES + 500)]
    assert cap.news() == OutputTail(7, 500 - TAIL_LINES, str(path), "", [*last, ("stderr", "begun")])
    assert cap.news() is None
    assert path.read_text() == text + "begun" and stat.S_IMODE(path.stat().st_mode) == 0o600
    cap.close()


def test_characters_count_too_and_a_bar_that_moves_does_not(tmp_path: Path) -> None:
    cap = CellCap(1, str(tmp_path / "all"))
    for n in range(HEAD_CHARACTERS // 50):
        assert cap.add("stderr", f"\r{n:100}")
    assert not (tmp_path / "all").exists()
    assert cap.add("stdout", "x" * (HEAD_CHARACTERS + 10)) == "x" * (HEAD_CHARACTERS // 10)
    news = cap.news()
    assert news is not None and news.left_out == 0 and len(dict(news.lines)["stdout"]) < 3000
    assert (tmp_path / "all").read_text().count("x") == HEAD_CHARACTERS + 10
    cap.close()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_cap, "HEAD_LINES", 1)
    for path, note in (
        ("", "no file has them, as the workers have no log files"),
        (str(tmp_path / "a" / "b"), "No such"),
    ):
        cap = CellCap(1, path)
        assert cap.add("stdout", "1\n2\n3\n") == "1\n"
        news = cap.news()
        assert news is not None and news.path == "" and note in news.note and news.lines[-1] == ("stdout", "3")


def test_a_script_has_no_cells_and_no_limits(worker: Worker) -> None:
    worker.cell = 0
    worker.out.write("x\n" * (HEAD_LINES * 3))
    worker.recorder.flush()
    assert sum(text.count("x") for _, _, text in worker.texts()) == HEAD_LINES * 3
