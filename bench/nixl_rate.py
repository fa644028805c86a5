"""NIXL's own rate between two processes of this machine: `ceiling_nixl`. No digest, no copy after landing.

python -m bench.nixl_rate BYTES        prints {"seconds": s} for reading BYTES out of another process's memory
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

PIECE = 8 * 2**20
IN_FLIGHT = 4


def _agent(name: str, nbytes: int):  # type: ignore[no-untyped-def]
    import numpy as np
    from nixl._api import nixl_agent, nixl_agent_config

    from components.common.transfer.progress import wait_for_events

    wait_for_events()
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(nbytes, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    return agent, memory


def offer(nbytes: int) -> None:
    agent, memory = _agent("source", nbytes)
    print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": int(memory.ctypes.data)}), flush=True)
    sys.stdin.read()  # until the reader is done


def read(nbytes: int) -> float:
    """Seconds for `nbytes`, pieces of 8 MiB, four in flight, the metadata exchanged before the clock starts."""
    source = subprocess.Popen(
        [sys.executable, "-m", "bench.nixl_rate", "offer", str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert source.stdout is not None
        while not (line := source.stdout.readline()).startswith(b"{"):
            assert source.poll() is None, "the source ended"
        offered = json.loads(line)
        agent, memory = _agent("reader", nbytes)
        agent.add_remote_agent(bytes.fromhex(offered["metadata"]))
        for _ in range(2):  # the first pass connects
            began, at, flying = time.perf_counter(), 0, []
            while at < nbytes or flying:
                while at < nbytes and len(flying) < IN_FLIGHT:
                    n = min(PIECE, nbytes - at)
                    local = agent.get_xfer_descs([(memory.ctypes.data + at, n, 0)], "DRAM")
                    remote = agent.get_xfer_descs([(offered["address"] + at, n, 0)], "DRAM")
                    handle = agent.initialize_xfer("READ", local, remote, "source")
                    agent.transfer(handle)
                    flying.append(handle)
                    at += n
                left = []
                for handle in flying:
                    state = agent.check_xfer_state(handle)
                    if state == "PROC":
                        left.append(handle)
                    elif state != "DONE":
                        raise RuntimeError(f"NIXL: {state}")
                    else:
                        agent.release_xfer_handle(handle)
                if len(left) == len(flying):
                    time.sleep(0.0002)
                flying = left
            seconds = time.perf_counter() - began
        return seconds
    finally:
        source.stdin.close()  # type: ignore[union-attr]
        source.wait(60)


if __name__ == "__main__":
    if sys.argv[1] == "offer":
        offer(int(sys.argv[2]))
    else:
        print(json.dumps({"seconds": read(int(sys.argv[1]))}))
