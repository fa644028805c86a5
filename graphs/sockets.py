"""Where a run's Unix sockets lie: in the run directory, or, when that path is too long for the kernel, under /tmp.

The kernel takes 107 bytes. A checkout some directories deep must not keep a graph from starting.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from components.common.errors import DynamoBlobError

SOCKET_PATH_MOST = 107
LONGEST_NAME = 40  # vLLM's are 36 characters


def socket_directory(run: Path) -> Path:
    """The same answer in every process that knows the run directory."""
    own = run / "s"
    if len(os.fsencode(own)) + 1 + LONGEST_NAME <= SOCKET_PATH_MOST:
        return own
    return Path("/tmp") / f"dynamo-blob-{hashlib.blake2b(os.fsencode(run), digest_size=8).hexdigest()}"


def control_socket(run: Path) -> Path:
    """The launcher's own socket."""
    return socket_directory(run) / "control.sock"


def make_socket_directory(run: Path) -> Path:
    """Create it for this user alone. Raises LAUNCH-SOCKET-DIR when another user's directory, or a link, lies there."""
    path = socket_directory(run)
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise DynamoBlobError(
                "LAUNCH-SOCKET-DIR", "the directory for Unix sockets is not this user's alone", where=str(path),
                why=f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}",
                do="remove it, or use a shorter state directory: --state DIR",
            ) from None  # fmt: skip
    return path
