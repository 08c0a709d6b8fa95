"""The room of NIXL: agents, regions, descriptors, transfers. `agent.Agent` is the contract."""
