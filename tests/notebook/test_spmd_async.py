"""``%%spmd --async`` in a real kernel on real workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel import Kernel

WAIT = "import os, time\nwhile not os.path.exists(GO): time.sleep(0.01)\n"


@pytest.fixture
def gate(meshed: Kernel, tmp_path: Path) -> Callable[[], None]:
    """Lets what runs ``WAIT`` go on."""
    assert meshed.run(f"GO = {str(tmp_path / 'go')!r}\n%mesh push GO") == "ok"
    return (tmp_path / "go").touch


@pytest.fixture
def kernel(meshed: Kernel, gate: object) -> Kernel:
    return meshed


def of(kernel: Kernel, cell: str) -> list[str]:
    """Texts of an earlier cell's displays, what workers print among them, as they are now."""
    texts: dict[str, str] = {}
    for k, m in enumerate(kernel.seen):
        if m["parent_header"].get("msg_id") == cell and "display_data" in m["msg_type"]:
            texts[m["content"].get("transient", {}).get("display_id", str(k))] = m["content"]["data"]["text/plain"]
    return list(texts.values())


def error(kernel: Kernel) -> str:
    return "\n".join("\n".join(e["traceback"]) for e in kernel.errors())


def test_it_returns_at_once_and_its_output_comes_to_its_cell(kernel: Kernel, gate: Callable[[], None]) -> None:
    cell = kernel.start(f"%%spmd --async --time -o kept\n{WAIT}print('at last')\nrank * 2")
    assert kernel.wait() == "ok", error(kernel)
    texts = [d["text/plain"] for d in kernel.displays()]
    assert texts == ['spmd · mesh "mesh" · 2 workers · not waited for', "<%%spmd cell on ranks 0, 1: running>"]
    assert kernel.run("print(_.done(), kept is _)\ntry: kept.result(0.05)\nexcept TimeoutError: print('late')") == "ok"
    assert kernel.text() == "False True\nlate\n"
    gate()
    kernel.wait_for(lambda: {"[0.0-0.1] at last", "rank 0: 0\nrank 1: 2"} <= set(of(kernel, cell)))
    assert any(text.endswith(" s") for text in of(kernel, cell))
    assert kernel.run("print(kept.result(), kept.done(), await kept, kept.exception(), kept)") == "ok", error(kernel)
    assert kernel.text() == "{0: '0', 1: '2'} True {0: '0', 1: '2'} None <%%spmd cell on ranks 0, 1: done>\n"


def test_the_next_cell_waits_its_turn_and_sees_what_it_did(kernel: Kernel, gate: Callable[[], None]) -> None:
    assert kernel.run(f"%%spmd -a --out lifted\n{WAIT}made = rank + 1\nlifted = torch.ones(2) * made") == "ok"
    kernel.start("%%spmd -q\nmade")
    gate()
    assert kernel.wait() == "ok" and kernel.displays()[-1]["text/plain"] == "rank 0: 1\nrank 1: 2"
    assert kernel.run("print(ml.fetch_all(lifted)[0, :, 0].tolist())") == "ok" and kernel.text() == "[1.0, 2.0]\n"


def test_several_wait_in_a_queue_and_not_where_one_before_them_fails(kernel: Kernel, gate: Callable[[], None]) -> None:
    assert kernel.run(f"%%spmd -q -a -o first\n{WAIT}steps = [1]\nsteps") == "ok"
    assert kernel.run("%%spmd -q -a -o second\nsteps.append(2)\nsteps") == "ok"
    assert kernel.run("%%spmd -q -a -o third --out lifted\nlifted = torch.ones(len(steps))") == "ok"
    assert kernel.run("print(first, second, third, sep='\\n')") == "ok"
    assert [line.split(": ")[1] for line in kernel.text().splitlines()] == ["running>", "queued>", "queued>"]
    gate()
    assert kernel.run("%%spmd -q -t 0\nsteps, len(lifted)") == "ok", error(kernel)
    assert kernel.displays()[-1]["text/plain"] == "rank 0: ([1, 2], 2)"
    assert kernel.run("print(first.result()[1], second.result()[1], third.result(), lifted.shape)") == "ok"
    assert kernel.text() == "[1] [1, 2] {} torch.Size([2])\n"


def test_what_is_queued_behind_a_failure_does_not_run_and_says_so(kernel: Kernel, gate: Callable[[], None]) -> None:
    assert kernel.run(f"%%spmd -q -a -o first\n{WAIT}1 / 0") == "ok"
    cell = kernel.start("%%spmd -q -a -o second\nnever = 1")
    assert kernel.wait() == "ok"
    gate()
    kernel.wait_for(lambda: any("did not run" in text for text in of(kernel, cell)))
    assert kernel.run("%%mesh -q\n1") == "error" and "ZeroDivisionError" in error(kernel)
    assert kernel.run("second.result()") == "error"
    assert "this %%spmd cell did not run: the one before it failed (ZeroDivisionError" in error(kernel)
    assert kernel.run("%%spmd -q\nassert 'never' not in globals()") == "ok", error(kernel)


def test_its_error_is_shown_in_it_and_raised_at_the_next_wait_once(kernel: Kernel, gate: Callable[[], None]) -> None:
    cell = kernel.start(f"%%spmd -q --async\n{WAIT}if rank: 1 / 0\ndist.barrier()")
    assert kernel.wait() == "ok"
    kernel.start("print('another')")
    assert kernel.wait() == "ok"
    gate()
    kernel.wait_for(lambda: any("ZeroDivisionError" in text for text in of(kernel, cell)))
    [told] = [text for text in of(kernel, cell) if "ZeroDivisionError" in text]
    assert "On rank 1:" in told and "4 if rank: 1 / 0" in told and "rank 0 waited in line 5" in told
    assert kernel.run("%%mesh\n1") == "error" and "ZeroDivisionError" in error(kernel)
    assert kernel.run("%%spmd -q\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == "ok", error(kernel)
    assert kernel.run("%%spmd -q --async -o failing\nraise KeyError(rank)") == "ok"
    assert kernel.run("failing.result()") == "error" and "KeyError: 0" in error(kernel)
    assert kernel.run("%%spmd -q\nrank") == "ok", error(kernel)


def test_input_is_asked_by_the_thread_that_waits_and_an_interrupt_ends_it(kernel: Kernel) -> None:
    assert kernel.run("%%spmd[1] -q --async -o handle\nname = input('name? ')\nname") == "ok"
    assert kernel.run("handle.result()[1]", answer=lambda prompt: prompt) == "ok", error(kernel)
    assert kernel.displays()[-1]["text/plain"] == "\"'[0.1] name? '\""
    assert kernel.run("%%spmd -q --async -o handle\nimport time\nprint('begun')\ntime.sleep(600)") == "ok"
    kernel.start("print('waits', flush=True); handle.result()")
    done: list[int] = []

    def interrupt() -> None:
        if "waits" in kernel.text():
            done.append(1)
            if len(done) == 15:  # 0.3 s later: it waits by now
                kernel.interrupt()

    assert kernel.wait(during=interrupt) == "error" and kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert kernel.run("%%spmd -q -t 0\nrank") == "ok", error(kernel)
    assert kernel.displays()[-1]["text/plain"] == "rank 0: 0"


def test_a_time_out_and_the_meshs_end_are_told_in_the_cell(kernel: Kernel) -> None:
    cell = kernel.start("%%spmd -q --async -o late --timeout 0.3\nimport time\ntime.sleep(600)")
    assert kernel.wait() == "ok"
    kernel.wait_for(lambda: any("had not ended after 0.3 s" in text for text in of(kernel, cell)))
    assert kernel.run("type(late.exception()).__name__, late.done()") == "ok"
    assert kernel.displays()[-1]["text/plain"] == "('TimeoutError', True)"
    cell = kernel.start("%%spmd -q --async -o late\nimport time\ntime.sleep(600)")
    assert kernel.wait() == "ok" and kernel.run("%mesh stop") == "ok"
    assert kernel.run("late.result(10)") == "error"
    assert kernel.errors()[0]["ename"] in ("ClosedError", "DeviceException")


def test_a_rank_that_is_restarted_meanwhile_fails_the_cell_and_not_the_mesh(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q --async -o handle\nimport time\nif rank: time.sleep(600)") == "ok"
    assert kernel.run("%mesh restart --ranks 1") == "ok", error(kernel)
    assert kernel.run("handle.result()") == "error" and kernel.errors()[0]["ename"] == "DeviceException"
    assert "rank 1" in kernel.errors()[0]["evalue"]
    assert kernel.run("%%spmd -q\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == "ok", error(kernel)
