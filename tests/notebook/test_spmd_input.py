"""``input()`` and ``getpass()`` on workers, in a real kernel: who is asked, and every way in which a prompt ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.kernel import Kernel


@pytest.fixture
def kernel(meshed: Kernel) -> Kernel:
    return meshed


def shown(kernel: Kernel) -> list[str]:
    return [display["text/plain"] for display in kernel.displays()]


def error(kernel: Kernel) -> str:
    [error] = kernel.errors()
    return f"{error['ename']}: {error['evalue']}"


def test_each_rank_asks_with_its_label_and_gets_its_own_line(kernel: Kernel) -> None:
    answers = {"[0.0] name? ": "ada", "[0.1] name? ": "bob", "[0.0] Password: ": "s0", "[0.1] Password: ": "s1"}
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return answers[prompt]

    body = "import getpass\nprint('before', end='')\nname = input('name? ')\nword = getpass.getpass()\nname, word"
    assert kernel.run(f"%%spmd -q\n{body}", answer=answer) == "ok", error(kernel)
    assert sorted(asked) == sorted(answers)
    assert shown(kernel) == ["rank 0: ('ada', 's0')\nrank 1: ('bob', 's1')"]
    # One line where both had printed it by the first prompt.
    assert sorted(kernel.text().splitlines()) in (["[0.0-0.1] before"], ["[0.0] before", "[0.1] before"])


def test_a_password_is_hidden(kernel: Kernel) -> None:
    kernel.start("%%spmd[1] -q\nimport getpass\ngetpass.getpass('word: ')")
    message = kernel.client.get_stdin_msg(timeout=20)["content"]
    assert message == {"prompt": "[0.1] word: ", "password": True}
    kernel.client.input("secret")
    assert kernel.wait() == "ok" and shown(kernel) == ["rank 1: 'secret'"]


def test_a_remote_function_and_a_thread_of_a_worker_ask_too(kernel: Kernel) -> None:
    body = """%%mesh -q
import concurrent.futures
def ask(t):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return torch.tensor(float(input("here? ")) + float(pool.submit(input, "there? ").result()))
ml.fetch_all(ml.remote(ask)(torch.ones(1))).flatten().tolist()
"""
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "2" if prompt == "[0.0] here? " else "5"

    assert kernel.run(body, answer=answer) == "ok", error(kernel)
    assert sorted(asked) == [f"[0.{rank}] {what}? " for rank in (0, 1) for what in ("here", "there")]
    assert shown(kernel) == ["[7.0, 10.0]"]


def test_the_end_of_input_is_an_eof_error(kernel: Kernel) -> None:
    body = "try:\n    input()\nexcept EOFError as e:\n    said = str(e)\nsaid"
    assert kernel.run(f"%%spmd -q\n{body}", answer=lambda prompt: "\x04") == "ok", error(kernel)
    assert shown(kernel) == ["ranks 0, 1: 'input(): end of input'"]


def test_a_front_end_without_input_fails_at_once_and_says_so(kernel: Kernel) -> None:
    assert kernel.run("%%spmd\nimport getpass\ngetpass.getpass()", allow_stdin=False) == "error"
    assert error(kernel).startswith(
        "RemoteException: StdinNotImplementedError: getpass(): this front end cannot ask for input"
    )
    caught = "%%spmd -q\ntry:\n    input()\nexcept NotImplementedError:\n    given = 'a default'\ngiven"
    assert kernel.run(caught, allow_stdin=False) == "ok" and shown(kernel) == ["ranks 0, 1: 'a default'"]


def test_standard_input_is_asked_for_line_by_line(kernel: Kernel) -> None:
    lines = iter(["one", "two", "three", "four", "\x04"])
    body = "import sys\nlong = sys.stdin.readline(2)\nlong += sys.stdin.readline()\n"
    body += "first = next(sys.stdin)\nrest = sys.stdin.readlines()\nlong, first, rest, sys.stdin.isatty()"
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return next(lines)

    assert kernel.run(f"%%spmd[1] -q\n{body}", answer=answer) == "ok", error(kernel)
    assert asked == ["[0.1] "] * 5
    assert shown(kernel) == [r"rank 1: ('one\n', 'two\n', ['three\n', 'four\n'], False)"]
    assert kernel.run("%%spmd[1]\nsys.stdin.read()", allow_stdin=False) == "error"
    assert "StdinNotImplementedError: sys.stdin: this front end cannot ask for input" in error(kernel)


def test_a_process_that_a_worker_forks_cannot_ask_and_says_so(kernel: Kernel) -> None:
    body = """
import multiprocessing
def ask(found):
    try:
        input('name? ')
    except NotImplementedError as e:
        found.put(str(e))
context = multiprocessing.get_context('fork')
found = context.SimpleQueue()
child = context.Process(target=ask, args=[found])
child.start()
said = found.get()
child.join()
said"""
    assert kernel.run(f"%%spmd -q{body}") == "ok", error(kernel)
    assert "input(): a process that a worker has started cannot ask: ask before it starts" in shown(kernel)[0]


IN_A_THREAD = """import threading
heard = []
def ask():
    try:
        input('wait ')
    except KeyboardInterrupt:
        heard.append(1)
t = threading.Thread(target=ask)
t.start()
t.join()
"""


@pytest.mark.parametrize("body", ["input('wait ')", IN_A_THREAD])
def test_an_interrupt_at_a_prompt_ends_the_cell_and_keeps_variables(kernel: Kernel, body: str) -> None:
    asked: list[str] = []

    def interrupt(prompt: str) -> str:
        asked.append(prompt)
        kernel.interrupt()
        kernel.wait_for(kernel.errors)
        return ""

    assert kernel.run(f"%%spmd -q\nkept = rank\n{body}", answer=interrupt) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt" and len(asked) == 1, error(kernel)
    assert kernel.run("%%spmd -q\nkept") == "ok", error(kernel)
    assert shown(kernel) == ["rank 0: 0\nrank 1: 1"]
    if body == IN_A_THREAD:
        assert kernel.run("%%spmd -q\nt.join()\nheard") == "ok" and shown(kernel) == ["ranks 0, 1: [1]"]


def test_nobody_is_freed_while_another_rank_is_asked(kernel: Kernel) -> None:
    def slowly(prompt: str) -> str:
        threading.Event().wait(2)  # longer than the grace after a failure, and than --timeout
        return "3"

    body = "if rank == 1: n = int(input())\nelse: n = 1\nt = torch.tensor(n)\ndist.all_reduce(t)\nt.item()"
    assert kernel.run(f"%%spmd -q --timeout 1\n{body}", answer=slowly) == "ok", error(kernel)
    assert shown(kernel) == ["ranks 0, 1: 4"]


def test_a_worker_that_dies_at_its_prompt_ends_it(kernel: Kernel) -> None:
    def die(prompt: str) -> str:
        kernel.wait_for(kernel.text)  # the prompt came by another channel
        os.kill(int(kernel.text().split()[-1]), signal.SIGKILL)
        kernel.wait_for(lambda: "its prompt ended" in kernel.text())
        return "stale"

    assert kernel.run("%%spmd[1] -q\nimport os\nprint(os.getpid())\ninput()", answer=die) == "error"
    assert kernel.errors()[0]["ename"] == "DeviceException"
