"""Put on PYTHONPATH of one worker: its NIXL refuses every peer, as it does when the network between them is broken."""

import nixl._api as api


def add_remote_agent(self, metadata):
    raise RuntimeError("NIXL_ERR_BACKEND: peers are refused on purpose (tests/faults/nixl_refuses_peers)")


api.nixl_agent.add_remote_agent = add_remote_agent
