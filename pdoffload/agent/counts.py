"""What an agent made and gave back: the books that show a leak."""

from __future__ import annotations

import msgspec


class AgentCounts(msgspec.Struct, frozen=True):
    """NIXL objects this agent made and gave back since it was created."""

    transfers_made: int = 0
    transfers_released: int = 0
    registrations_made: int = 0
    registrations_released: int = 0
    peers_added: int = 0
    peers_removed: int = 0

    @property
    def balanced(self) -> bool:
        """Whether everything made was given back."""
        return (
            self.transfers_made == self.transfers_released
            and self.registrations_made == self.registrations_released
            and self.peers_added == self.peers_removed
        )
