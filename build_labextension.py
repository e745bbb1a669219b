"""Build step of the wheel: make the side panel, unless it is there and no older than its sources.

An sdist carries the built panel, so installing from one needs no Node.js.
"""

from hatch_jupyter_builder import npm_builder
from hatch_jupyter_builder.utils import is_stale

OUTPUT = "monarch_lab/labextension"
SOURCES = ("labextension/src", "labextension/style", "labextension/package.json")


def build(target_name: str, version: str) -> None:
    # npm_builder asks for npm before it looks whether there is anything to build, hence the check here.
    if any(is_stale(OUTPUT, source) for source in SOURCES):
        npm_builder(
            target_name,
            version,
            path="labextension",
            npm=["npm"],
            build_cmd="build:prod",
            editable_build_cmd="build",
        )
