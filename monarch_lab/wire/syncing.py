"""``%mesh sync``: modules of the user's on the workers as their files are now."""

from __future__ import annotations

from monarch_lab.wire.supervision import Message


class SyncModules(Message, frozen=True):
    """Put what is missing of ``path`` into sys.path, and reload the user's modules whose files have changed since they
    were imported, with those that use them. Answered by Fetched, one value: (names of the modules that were reloaded,
    in that order; entries added to sys.path), or FetchFailed."""

    ident: int
    path: list[str]
