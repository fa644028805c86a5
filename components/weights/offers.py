"""What a weight service tells a peer about a file that it may read there; and understanding it, whoever sent it."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

_AGENT = 256  # characters
_TEXT = 1 << 19  # characters; NIXL's metadata has some KiB, `have` two characters per 8 ranges


@dataclass(frozen=True, eq=False)
class Offer:
    agent: str  # NIXL's name of the service: another one after each start
    metadata: bytes
    address: int  # of the file's first byte
    have: int = 0  # bit i = range i is verified there

    @classmethod
    def parse(cls, answer: Any) -> Offer:
        """Raises ValueError for whatever is no offer. `have` may be missing: an older service says nothing about it."""
        if not isinstance(answer, dict):
            raise ValueError("an offer is a JSON object")
        agent, metadata, address = answer.get("agent"), answer.get("metadata"), answer.get("address")
        have = answer.get("have", "0")
        if not isinstance(agent, str) or not 0 < len(agent) <= _AGENT:
            raise ValueError("an offer without a name of the agent")
        if type(address) is not int or not 0 <= address < 1 << 64:
            raise ValueError("an offer without an address")
        if not isinstance(metadata, str) or len(metadata) > _TEXT:
            raise ValueError("an offer without metadata")
        if not isinstance(have, str) or len(have) > _TEXT or not re.fullmatch("[0-9a-f]+", have):
            raise ValueError("an offer that does not say what there is")
        return cls(agent, base64.b64decode(metadata, validate=True), address, int(have, 16))
