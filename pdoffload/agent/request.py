"""What NIXL's driver keeps of a request: the handle of it, or of several that follow one another."""

from __future__ import annotations

from typing import Any

from pdoffload.agent.descriptors import Descriptors, MemoryKind


class Request:
    """NIXL requests that are posted one after the other and are done when the last one is; mostly one.

    Beside them how many rows they have, and the rows themselves where those are of files.
    """

    __slots__ = ("at", "files", "handles", "rows")

    def __init__(self, handles: list[Any], remote: Descriptors) -> None:
        self.handles = handles
        self.at = 0
        self.rows = len(remote)
        self.files = remote.rows if remote.kind is MemoryKind.FILE else None

    @property
    def handle(self) -> Any:
        """The one that is posted, or is to be."""
        return self.handles[self.at]

    def advance(self) -> bool:
        """Go on to the next one, if there is one."""
        is_last = self.at + 1 == len(self.handles)
        self.at += not is_last
        return not is_last
