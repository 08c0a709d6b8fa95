"""What NIXL's driver keeps of a request: the handle of it, or of several that follow one another."""

from __future__ import annotations

from typing import Any

from pdoffload.agent.descriptors import Rows


class Request:
    """NIXL requests that are posted one after the other and are done when the last one is; mostly one.

    Beside them the I/Os they take of the POSIX queue, and file rows where lengths matter.
    """

    __slots__ = ("at", "files", "handles", "ios")

    def __init__(self, handles: list[Any], ios: int, files: Rows | None) -> None:
        self.handles = handles
        self.at = 0
        self.ios = ios
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
