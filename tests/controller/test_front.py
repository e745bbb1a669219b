"""What scripts show of their workers' output."""

from __future__ import annotations

import io

import pytest

from monarch_lab.controller.front import DebugPrompt, TerminalFront


def test_a_script_prints_lines_with_their_worker_and_rewritten_ones_in_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    front = TerminalFront()
    for text in ("one\ntwo", " three\n", "\n", "windows\r\n", "a\x0bb\n", "\r 10%\r 20%", "\r 30%", "\n"):
        front.output(0, 1, "0.1", "stdout", text)
    front.output(0, 1, "0.1", "stderr", "careful\n")
    out, err = capsys.readouterr()
    assert out == (
        "[0.1] one\n[0.1] two[0.1]  three\n[0.1] \n[0.1] windows\n[0.1] a\x0bb\n\r[0.1]  20%\r[0.1]  30%[0.1] \n"
    )
    assert err == "[0.1] careful\n"


def test_a_script_in_a_terminal_is_asked_by_debuggers_and_one_without_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("n\n")
    prompt = DebugPrompt(1, "0.1", "> a.py(4)f()\n-> x = 1\n", "(Pdb) ", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert TerminalFront().ask(prompt) is None and capsys.readouterr().out == ""
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert TerminalFront().ask(prompt) == "n"
    assert capsys.readouterr().out == "[0.1] > a.py(4)f()\n[0.1] -> x = 1\n[0.1] (Pdb) "
    assert TerminalFront().ask(prompt) is None  # the end of what is typed
