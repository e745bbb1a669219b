"""Who is asked next, and what a line typed at a debugger's prompt means; no workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch_lab.controller import debug_console as console
from monarch_lab.controller.debug_sessions import MOVES, SWITCH_S, Event, Sessions, State
from monarch_lab.controller.front import DebugPrompt
from monarch_lab.controller.prompts import Prompts
from monarch_lab.errors import DetachedError, UsageKeyError, UsageRuntimeError
from monarch_lab.wire.debugging import DebugRead, DebugReply, Place

DIMS = {"host": 2, "gpu": 2}
HERE = Place("cell.py", 4, "f", "x = 1")


def read(session: int = 1, number: int = 0, thread: str = "", stream: int = 0, prompt: str = "(Pdb) ") -> DebugRead:
    return DebugRead(session, number, f"text {number}\n", prompt, HERE, thread, stream)


def stopped(*ranks: int) -> Sessions:
    sessions = Sessions(lambda rank: f"{rank // 2}.{rank % 2}", {3: "copy"}.__getitem__)
    for rank in ranks:
        sessions.read(rank, read())
    return sessions


def typed(sessions: Sessions, line: str, prompt: str = "(Pdb) ") -> console.Action:
    focus = next(iter(sessions))
    focus.read = read(prompt=prompt)
    return console.read_line(line, focus, list(sessions), DIMS, str)


def test_a_session_that_is_done_moves_no_more() -> None:
    assert {state for state, _ in MOVES} == {State.PAUSED, State.ATTACHED, State.HELD, State.DETACHED}
    assert all(MOVES[state, Event.END] is State.DONE for state, _ in MOVES)
    [session] = stopped(1)
    session.move(Event.END)
    with pytest.raises(KeyError):
        session.move(Event.ATTACH)


def test_sessions_are_named_by_rank_stream_and_count() -> None:
    sessions = stopped(1)
    sessions.read(1, read(2, stream=3))
    sessions.read(1, read(3, thread="loader"))
    sessions.read(1, read(4, thread="loader"))
    sessions.read(1, read(5, thread="monarch-pm"))
    assert [s.name for s in sessions] == ["1", "1/copy", "1#2", "1#3", "1/pm"]
    assert [s.label for s in sessions][:2] == ["0.1", "0.1/copy"]
    assert console.named(list(sessions)) == "ranks 1, 1/copy, 1#2, 1#3, 1/pm"


def test_the_focus_stays_until_its_rank_goes_on() -> None:
    sessions = stopped(2, 0, 1)
    first = sessions.to_ask(0.0)
    assert first is not None and first.rank == 0
    sessions.answered(first, 10.0)
    assert sessions.to_ask(10.0 + SWITCH_S / 2) is None  # it may stop again in a moment
    sessions.read(0, read(number=1))
    assert sessions.to_ask(10.0 + SWITCH_S / 2) is first
    sessions.answered(first, 20.0)
    other = sessions.to_ask(20.0 + SWITCH_S)  # it runs on: the others are not kept waiting
    assert other is not None and other.rank == 1
    sessions.end(0, 1)
    assert sessions.to_ask(30.0) is other and first.state is State.DONE


def test_the_end_of_a_process_ends_its_sessions() -> None:
    sessions = stopped(0, 1)
    sessions.end_rank(0)
    assert [s.rank for s in sessions] == [1]
    assert sessions.end(0, 1) is None


def test_what_is_for_all_ranks_is_read_and_the_rest_is_pdbs() -> None:
    sessions = stopped(0, 1, 2)
    zero, one, two = sessions

    assert typed(sessions, "p ranks") == console.Send((zero,), "p ranks")
    assert typed(sessions, "rank = 3") == console.Send((zero,), "rank = 3")
    assert typed(sessions, "rank") == console.Send((zero,), "rank")  # the variable of a %%spmd cell
    assert typed(sessions, "ranks", ">>> ") == console.Send((zero,), "ranks")
    assert typed(sessions, "rank 1") == typed(sessions, "rank 0.1") == console.Focus(one)
    assert typed(sessions, "cast 1-2 p x") == typed(sessions, "cast 1:3 p x") == console.Send((one, two), "p x")
    assert typed(sessions, "cast host=1 n") == console.Send((two,), "n")
    assert typed(sessions, "c all") == console.Send((zero, one, two), "c")
    assert typed(sessions, "n all") == typed(sessions, "cast all n")
    assert typed(sessions, "detach") == console.Detach()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rank 3", "*** rank 3 waits in no debugger: there are 0, 1, 2"),
        ("cast 3 n", "*** none of these waits at a prompt"),
        ("cast 9 n", "rank"),
        ("cast", "*** write cast RANKS COMMAND"),
        ("cast all", "*** write cast RANKS COMMAND"),
        ("cast gpu= n", "***"),
        ("help mesh", "cast R CMD"),
        ("ranks", "ranks 1, 2 at cell.py:4 in f: x = 1"),
    ],
)
def test_what_cannot_be_done_is_said(line: str, said: str) -> None:
    action = typed(stopped(0, 1, 2), line)
    assert isinstance(action, console.Say) and said in action.text.replace("ranks 0-2", "ranks 1, 2")


def test_ranks_at_one_place_are_one_line() -> None:
    sessions = stopped(0, 1, 2, 3)
    elsewhere = sessions.find("2")
    assert elsewhere is not None
    elsewhere.place, elsewhere.why = Place("cell.py", 9, "<module>", "y"), "breakpoint 1"
    assert console.announcement(sessions, lambda file: "In[3]") == (
        "ranks 0, 1, 3 stopped at In[3]:4 in f: x = 1\nrank 2 stopped at In[3]:9: y (breakpoint 1)"
    )
    assert console.with_names(
        "-> x\n> a/b.py(4)f()\n  c.py(1)g()", {"a/b.py": "In[3]", "c.py": "c.py"}.__getitem__
    ) == ("-> x\n> In[3](4)f()\n  c.py(1)g()")


class Front:
    def __init__(self, *lines: str | None | Callable[[], str]) -> None:
        self.lines = list(lines)
        self.asked: list[str] = []
        self.told: list[str] = []

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None: ...

    def ask(self, prompt: DebugPrompt) -> str | None:
        self.asked.append(prompt.label)
        line = self.lines.pop(0)
        return line() if callable(line) else line

    def tell(self, text: str) -> None:
        self.told.append(text)

    def place(self, file: str) -> str:
        return file


def prompts(*ranks: int) -> tuple[Prompts, list[tuple[int, DebugReply]]]:
    sent: list[tuple[int, DebugReply]] = []
    made = Prompts(lambda rank, reply: sent.append((rank, reply)), str, lambda rank: False, str, lambda: DIMS)
    for rank in ranks:
        made.add(rank, read())
    return made, sent


def test_detached_sessions_are_kept_and_who_needs_them_is_told() -> None:
    made, sent = prompts(0, 1)
    made.serve(Front("detach"))
    assert sent == [] and not made and len(made) == 2
    with pytest.raises(DetachedError, match=r"ranks 0, 1 wait in the debugger at cell.py:4: %mesh debug") as raised:
        made.refuse_detached([1, 0, 3])
    assert raised.value.ranks == (0, 1)
    made.refuse_detached([2, 3])
    assert [s.rank for s in made.attach([1])] == [1] and made
    made.serve(Front("c"))
    assert [(rank, reply.line) for rank, reply in sent] == [(1, "c")]
    made.leave_all()
    assert sent[-1] == (0, DebugReply(1, 0, None, leave=True)) and len(made) == 0


def test_who_stops_after_the_others_were_left_is_left_with_them() -> None:
    made, _ = prompts(0)
    made.add(1, read(), is_awaited=False)  # nobody was left: the next cell asks
    made.serve(Front("detach"))
    made.add(2, read(), is_awaited=False)
    made.add(3, read(), is_awaited=True)  # of a cell that runs now, which asks
    assert {s.rank: s.state for s in made.sessions} == {
        0: State.DETACHED, 1: State.DETACHED, 2: State.DETACHED, 3: State.PAUSED
    }  # fmt: skip


def test_an_answer_from_elsewhere_ends_the_prompt() -> None:
    made, sent = prompts(1)

    def panel() -> str:
        assert made.type_line("1", "n") == ""
        with pytest.raises(UsageRuntimeError, match="rank 1 runs: it can be asked when it stops again"):
            made.type_line("1", "n")
        with pytest.raises(UsageKeyError, match="no debugger waits that is named 7; there is 1"):
            made.type_line("7", "n")
        return "typed too late"

    made.serve(Front(panel))
    assert [reply.line for _, reply in sent] == ["n"]


def test_nobody_to_ask_lets_the_worker_go_on() -> None:
    made, sent = prompts(0)
    made.serve(Front(None))
    assert sent == [(0, DebugReply(1, 0, None, declined=True))]
    made.quitting = True
    made.add(3, read(2, 5))
    assert sent[-1] == (3, DebugReply(2, 5, None, leave=True)) and not made.is_waiting(3)


def test_what_the_panel_holds_no_cell_asks_for_and_its_text_goes_there() -> None:
    made, sent = prompts(0, 1)
    news: list[tuple[str, str, str]] = []
    made.on_news = lambda *told: news.append(told)

    def panel() -> str:
        made.hold("0")
        return "typed too late"

    front = Front(panel, "c")
    made.serve(front)  # ends though rank 0 still waits
    assert front.asked == ["0", "1"] and [(rank, reply.line) for rank, reply in sent] == [(1, "c")]
    assert news[0] == ("0", "text 0\n", "(Pdb) ") and not made and made.is_used
    made.refuse_detached([0])  # who waits goes on waiting: somebody answers
    assert made.type_line("0", "n") == "" and sent[-1][1].line == "n"
    made.add(0, read(number=1))
    assert news[-2:] == [("0", "", ""), ("0", "text 1\n", "(Pdb) ")]
    assert "waits in no debugger" in made.type_line("0", "rank 3")
    assert made.end(1, 1, "bye") == "1" and made.end(0, 1, "bye") is None
    assert news[-1] == ("0", "bye", "")


def test_what_the_panel_lets_go_is_left_waiting() -> None:
    made, sent = prompts(0, 1)
    made.hold("0")
    made.serve(Front("c all"))
    assert sorted(rank for rank, _ in sent) == [0, 1]  # everyone goes on, wherever they are asked
    made.add(0, read(number=1))
    assert made.type_line("0", "detach") == ""
    with pytest.raises(DetachedError, match="rank 0 waits in the debugger"):
        made.refuse_detached([0])
    made.hold("0")
    made.hold("0")
    assert made.leave_prompt(str).startswith("rank 0 waits in the debugger at cell.py:4")
    assert made.is_used  # by the panel, still
    made.release("0")
    assert not made.is_used
    with pytest.raises(UsageKeyError, match="named 7"):
        made.hold("7")
