"""What workers print, as a user sees it in JupyterLab."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.conftest import Notebook

CELLS = (
    "%load_ext monarch_lab\n%mesh start --cpu",
    "%%spmd\nimport sys, time\n"
    "print('loading')\nprint('shard', rank)\n"
    "for n in range(21 - 5 * rank):\n"
    "    sys.stderr.write(f'\\rtrain: {5 * n:3}%|{\"█\" * (n // 2):10}| {n}/20')\n"
    "    sys.stderr.flush(); time.sleep(0.05)\n"
    "if rank: time.sleep(1)\n"
    "sys.stderr.write('\\n')\nprint('a \\x1b[32mgreen\\x1b[0m word')\nprint('careful <b>', file=sys.stderr)",
)


def test_output_is_folded_and_a_bar_moves_in_place(notebook: Notebook) -> None:
    notebook.open("output.ipynb", *CELLS)
    notebook.run(0)
    expect(notebook.output(0)).to_contain_text("live", timeout=60_000)
    notebook.run(1)
    text = notebook.output(1).locator(".jp-OutputArea-output").first
    expect(text).to_contain_text(re.compile(r"\[0\.0-0\.1\] train: +\d+%.*slowest 0\.[01]; fastest"), timeout=60_000)
    expect(text).to_contain_text("[0.0-0.1] a green word", timeout=60_000)
    expect(text.locator("summary")).to_have_count(1)
    expect(text).to_contain_text("[0.0-0.1] loading\n[0.0] shard 0\n[0.1] shard 1")
    expect(text.get_by_text("green", exact=True)).to_have_css("color", "rgb(0, 162, 80)")
    text.locator("summary").click()
    expect(text).to_contain_text(re.compile(r"\[0\.0\] train: 100%.*20/20\s+\[0\.1\] train:  75%", re.S))
