from __future__ import annotations

from html.parser import HTMLParser

from monarch_lab.notebook import status
from monarch_lab.notebook.names import op_text
from monarch_lab.wire.snapshot import KernelSnapshot, MeshSnapshot, ProcessSnapshot
from tests.fakes.shell import Shell

GIB = 1 << 30
MESH = MeshSnapshot(
    "train",
    "live",
    [("host", 2), ("gpu", 2)],
    "cuda",
    [
        ProcessSnapshot(0, "0.0", "h0", 41, "idle", rss_bytes=GIB, device_bytes=3 * GIB),
        ProcessSnapshot(1, "0.1", "h0", 42, "busy", rss_bytes=GIB, pending_ops=12, op="In[3]:4 a @ b", op_age_s=1.25),
        ProcessSnapshot(2, "1.0", "h1", 43, "exited", exit="signal SIGKILL"),
        ProcessSnapshot(3, "1.1", "h1", 0, "starting"),
    ],
)


def test_the_card_as_text() -> None:
    assert status.card_text(MESH).splitlines() == [
        'mesh "train" · live · host=2 × gpu=2 · cuda · 4 workers',
        "rank  worker  pid  state                   memory                  pending  current op",
        "0     0.0     41   idle                    3.0 GiB + 1.0 GiB host  0",
        "1     0.1     42   busy                    1.0 GiB                 12       In[3]:4 a @ b (1.2 s)",
        "2     1.0     43   exited: signal SIGKILL                          0",
        "3     1.1          starting                                        0",
    ]


def test_the_card_of_a_dead_mesh_says_why() -> None:
    text = status.card_text(MeshSnapshot("m", "dead", [("host", 1)], "cpu", [], note="host h0 went silent"))
    assert text.splitlines()[:2] == ['mesh "m" · dead · host=1 · cpu · 0 workers', "host h0 went silent"]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.styles = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.styles += str(dict(attrs).get("style"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_card_as_html_says_the_same() -> None:
    reader = read(status.card_html(MESH))
    for process in MESH.processes:
        for text in status.row(process):
            assert text in reader.text


def test_the_html_has_no_colours_but_of_states() -> None:
    styles = read(status.card_html(MESH)).styles
    for colour in set(status.COLOURS.values()):
        styles = styles.replace(colour, "")
    assert "#" not in styles
    assert "background: transparent" in styles


def test_names_cannot_break_the_html() -> None:
    mesh = MeshSnapshot("<b>&", "live", [("host", 1)], "cpu", [], note="<script>")
    assert read(status.card_html(mesh)).text.count("<b>&") == 1


def test_the_list_marks_the_current_mesh() -> None:
    other = MeshSnapshot("b", "dead", [("host", 1), ("gpu", 1)], "cpu", [])
    text = status.list_text(KernelSnapshot(1, "train", [MESH, other]))
    assert text.splitlines() == [
        '* mesh "train" · live · host=2 × gpu=2 · cuda · 4 workers',
        '  mesh "b" · dead · host=1 × gpu=1 · cpu · 0 workers',
    ]


def test_an_op_names_its_cell(bare: Shell) -> None:
    bare.run("1")
    number = bare.ip.execution_count - 1
    filename = next(iter(reversed(bare.ip.compile._filename_map)))
    assert op_text(f"{filename}:3 y = x @ w") == f"In[{number}] line 3: y = x @ w"
    assert op_text("/home/me/train.py:12 loss.backward()") == "train.py line 12: loss.backward()"
    assert op_text("backward") == "backward"


def test_sizes() -> None:
    assert [status.size(n) for n in (0, 1023, 1024, 300 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "300 MiB",
        "5.0 GiB",
    ]
