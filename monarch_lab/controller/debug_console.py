"""What is typed at a debugger's prompt, read: the few commands that are for all ranks, and what goes to the worker.

    ranks          who has stopped where       cast R CMD   the same command on several
    rank R         go to another one           c all        every one goes on (n all, s all as well)
    detach         leave all of them waiting, until %mesh debug

Everything else is pdb's, or a statement. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from monarch_lab.controller.debug_sessions import Session, State, by_place
from monarch_lab.errors import UsageValueError
from monarch_lab.wire.debugging import Place
from monarch_lab.wire.ranks import parse_ranks

PDB_PROMPT = "(Pdb) "
HELP = """\
The mesh's own commands, beside pdb's (help CMD tells of those):
  ranks        who has stopped where
  rank R       go to another one: a rank as 2 or 0.1, a session as 1/copy or 1#2
  cast R CMD   the same command on several: cast all n, cast 0,2-5 p x, cast gpu=0 c
  c all        every one goes on; n all and s all step them together
  detach       leave all of them waiting, until %mesh debug
  q            end this rank's op; the mesh lives
A name that is one of these is printed with p: p ranks"""


@dataclass(frozen=True, slots=True)
class Send:
    """``line`` to these sessions."""

    to: tuple[Session, ...]
    line: str


@dataclass(frozen=True, slots=True)
class Focus:
    on: Session


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Detach:
    pass


Action = Send | Focus | Say | Detach
_STEP_ALL = re.compile(r"(c|cont|continue|n|next|s|step|r|return)\s+all")
_RANK = re.compile(r"rank\s+(-?[\w./#]+)")
_PLACES = re.compile(r"(^[> ] | at )(\S+)(?=\(\d+\)|:\d+$)", re.MULTILINE)
_CAST = re.compile(r"cast(?:\s+(\S+)(?:\s+(.+))?)?")


def read_line(line: str, focus: Session, sessions: Sequence[Session], dims: Mapping[str, int], place: Placer) -> Action:
    """What a line typed at the prompt of ``focus`` asks for; what is wrong with it is said and changes nothing."""
    words = line.strip()
    if focus.read is None or focus.read.prompt != PDB_PROMPT:  # in the middle of a statement, interact or commands
        return Send((focus,), line)
    if words == "ranks":
        return Say(overview(sessions, focus, place))
    if words == "detach":
        return Detach()
    if words in ("help ranks", "help mesh", "help rank", "help cast", "help detach"):
        return Say(HELP)
    if match := _STEP_ALL.fullmatch(words):
        return _cast(sessions, sessions, match[1])
    if match := _RANK.fullmatch(words):
        found = next((s for s in sessions if match[1] in (s.name, s.label)), None)
        if found is None and match[1].startswith("-"):
            ranks = _parsed(match[1], dims)
            found = next((s for s in sessions if s.rank in ranks), None)
        if found is None or found.state is State.DETACHED:
            return Say(f"*** rank {match[1]} waits in no debugger: {_those(sessions)}")
        if found.state is State.HELD:
            return Say(f"*** rank {found.name} is asked in the panel: %mesh debug {found.rank} brings it here")
        if found.read is None:
            return Say(f"*** rank {found.name} runs: it can be asked when it stops again")
        return Focus(found)
    if match := _CAST.fullmatch(words):
        if not match[1] or not match[2]:
            return Say("*** write cast RANKS COMMAND, as in: cast all n, cast 0,2-5 p x")
        try:
            chosen = _parsed(match[1], dims)
        except UsageValueError as error:
            named = [s for s in sessions if match[1] in (s.name, s.label)]
            return _cast(named, sessions, match[2]) if named else Say(f"*** {error}")
        return _cast([s for s in sessions if s.rank in chosen], sessions, match[2])
    return Send((focus,), line)


Placer = Callable[[str], str]  # the name of a file, as the user knows it


def _parsed(text: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    return parse_ranks(text, dims)


def _cast(wanted: Iterable[Session], sessions: Sequence[Session], line: str) -> Action:
    to = tuple(s for s in wanted if s.can_be_told and s.read is not None and s.read.prompt == PDB_PROMPT)
    return Send(to, line) if to else Say(f"*** none of these waits at a prompt: {_those(sessions)}")


def _those(sessions: Sequence[Session]) -> str:
    names = [s.name for s in sessions if s.can_be_told]
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else "no other rank does"


def announcement(sessions: Iterable[Session], place: Placer) -> str:
    """As in "ranks 0-3 stopped at In[3]:4 in f: y = x + 1", a line for each place."""
    return "\n".join(
        f"{named(found)} stopped {_at(where, place)}{f' ({why})' if why else ''}"
        for where, why, found in by_place(sessions)
    )


def overview(sessions: Sequence[Session], focus: Session | None, place: Placer) -> str:
    lines = []
    for where, _, found in by_place(sessions):
        states = {_state(s, focus) for s in found}
        marked = f" ({', '.join(sorted(states - {''}))})" if states != {""} else ""
        lines.append(f"{named(found)} {_at(where, place)}{marked}")
    return "\n".join(lines) or "no rank waits in a debugger"


def waiting(sessions: Iterable[Session], place: Placer) -> str:
    """As in "rank 1 waits in the debugger at In[3]:4"."""
    return "; ".join(
        f"{named(found)} {'wait' if len(found) > 1 else 'waits'} in the debugger {_at(where, place, short=True)}"
        for where, _, found in by_place(sessions)
    )


def with_names(text: str, place: Placer) -> str:
    """What pdb prints of a place, "> /tmp/x/2.py(4)f()" or "Breakpoint 1 at /tmp/x/2.py:4", with the file as the user
    knows it."""
    return _PLACES.sub(lambda found: found[1] + place(found[2]), text)


def _state(session: Session, focus: Session | None) -> str:
    if session.state is State.DETACHED:
        return "detached"
    if session.state is State.HELD:
        return "in the panel"
    if session.read is None:
        return "runs"
    return f"in focus: {session.name}" if session is focus else ""


def _at(where: Place, place: Placer, short: bool = False) -> str:
    if not where.line:
        return "before its first line"
    at = f"at {place(where.file)}:{where.line}"
    if short:
        return at
    function = f" in {where.function}" if where.function not in ("", "<module>") else ""
    return f"{at}{function}: {where.source}" if where.source else f"{at}{function}"


def named(sessions: Sequence[Session]) -> str:
    """As in "rank 3" or "ranks 0-3, 5/copy"."""
    runs: list[list[int]] = []
    for rank in sorted(s.rank for s in sessions if s.name == str(s.rank)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    words += [s.name for s in sessions if s.name != str(s.rank)]
    return f"rank{'s' if len(sessions) > 1 else ''} {', '.join(words)}"
