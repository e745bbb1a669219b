"""What an editor asks of the variables of ``%%spmd`` cells: completion and inspection, answered while a cell runs."""

from __future__ import annotations

from monarch_lab.wire.supervision import Message


class LookUp(Message, frozen=True):
    """Kernel to worker (control). ``path``: names with dots between, "" for the namespace itself. ``prefix``: names of
    it that begin so are wanted; None: a description. Answered by LookedUp, beside what the worker runs."""

    ident: int
    path: str
    prefix: str | None = None


class LookedUp(Message, frozen=True):
    """Worker to kernel. ``names``: (name, kind) with jedi's kinds; ``text``: the description. ``found``: whether there
    is such a thing, and it could be looked at without running the user's code."""

    ident: int
    found: bool
    names: list[tuple[str, str]] = []
    text: str = ""
