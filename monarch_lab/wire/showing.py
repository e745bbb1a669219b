"""Rich output of code on a worker: ``display``, figures, HTML, images."""

from __future__ import annotations

from monarch_lab.wire.supervision import Message


class Displayed(Message, frozen=True):
    """Worker to kernel. ``bundle``: JSON of [data by mime type, metadata], images in base64. ``display_id``: how the
    code calls it on this rank, if it does; ``update``: what it showed under that name becomes this."""

    cell: int
    bundle: str
    display_id: str = ""
    update: bool = False


class Cleared(Message, frozen=True):
    """Worker to kernel: ``clear_output()``. ``wait``: when this rank shows the next thing."""

    cell: int
    wait: bool = False
