"""What workers printed, as HTML beside the plain text: labels dimmed, stderr marked, colours kept, bars fold out."""

from __future__ import annotations

import re
from html import escape

from monarch_lab.notebook.folding import Row, label_of, plain, text_of

_SGR = re.compile(r"\x1b\[([0-9;]*)m")
# As Jupyter has them: its classes for colours hold in text output alone.
_COLOURS = ("#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4")
_PRE = "margin: 0; white-space: pre-wrap"
_STDERR = "background: var(--jp-rendermime-error-background, #fdd)"


def html(rows: list[Row], labels: dict[int, str]) -> str:
    parts: list[str] = []
    block: list[str] = []
    for row in rows:
        if len(row.by_rank) < 2:
            block.append(_line(row, labels))
            continue
        _close(parts, block)
        bars = "\n".join(f"[{labels[rank]}] {escape(plain(text))}" for rank, text in sorted(row.by_rank.items()))
        parts.append(
            f'<details><summary><pre style="display: inline; {_PRE}">{_line(row, labels)}</pre></summary>'
            f'<pre style="{_PRE}">{bars}</pre></details>'
        )
    _close(parts, block)
    return "".join(parts)


def _close(parts: list[str], block: list[str]) -> None:
    if block:
        parts.append(f'<pre style="{_PRE}">' + "\n".join(block) + "</pre>")
        block.clear()


def _line(row: Row, labels: dict[int, str]) -> str:
    text = _coloured(text_of(row, labels))
    if row.line.stream == "stderr" and not row.line.is_rewritten:
        text = f'<span style="{_STDERR}">{text}</span>'
    return f'<span style="opacity: 0.6">[{label_of(row.ranks, labels)}]</span> {text}'


def _coloured(text: str) -> str:
    if "\x1b" not in text:
        return escape(plain(text))
    shown: list[str] = []
    style: dict[str, str] = {}
    for n, piece in enumerate(_SGR.split(text)):
        if n % 2:
            style = _style(piece, style)
        elif piece:
            safe = escape(plain(piece))
            css = "; ".join(f"{name}: {value}" for name, value in style.items())
            shown.append(f'<span style="{css}">{safe}</span>' if css else safe)
    return "".join(shown)


def _style(codes: str, before: dict[str, str]) -> dict[str, str]:
    """The sixteen colours and bold; other codes change nothing."""
    found = dict(before)
    for code in codes.split(";") or [""]:
        if code in ("", "0"):
            found.clear()
        elif code == "1":
            found["font-weight"] = "bold"
        elif re.fullmatch("3[0-7]|9[0-7]", code):
            found["color"] = _COLOURS[int(code[1])]
        elif code in ("38", "48"):  # 256 colours: the numbers after it are no codes
            break
    return found
