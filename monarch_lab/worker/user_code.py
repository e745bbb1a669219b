"""What is called on a thread before and after it runs the user's code. Set once, by the debugger."""

from __future__ import annotations

from collections.abc import Callable

begins: Callable[[], None] = lambda: None  # noqa: E731
ends: Callable[[], None] = lambda: None  # noqa: E731
