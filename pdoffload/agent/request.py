"""What NIXL's driver keeps of a request: the handle of it, or of several that follow one another."""

from __future__ import annotations

from typing import Any

from pdoffload.agent.descriptors import Rows


class Request:
    """NIXL requests that are posted one after the other and are done when the last one is; mostly one.

    Beside them its rows of files, if it has any.
    """

    __slots__ = ("at", "files", "handles")

    def __init__(self, handles: list[Any], files: Rows | None) -> None:
        self.handles = handles
        self.at = 0
        self.files = files

    @property
    def handle(self) -> Any:
        """The one that is posted, or is to be."""
        return self.handles[self.at]

    def advance(self) -> bool:
        """Go on to the next one, if there is one."""
        is_last = self.at + 1 == len(self.handles)
        self.at += not is_last
        return not is_last
