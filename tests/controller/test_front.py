"""What scripts show of their workers' output."""

from __future__ import annotations

import pytest

from monarch_lab.controller.front import TerminalFront


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
