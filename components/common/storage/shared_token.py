"""One Entra token for all processes of one user on one node: eight ranks that start together ask the token service once.

The token lies in a directory of the user's own (0700) on tmpfs, in a file of mode 0600 under a name made of everything
that decides who asks. Whoever finds none that will last asks for one while the others wait. Anything odd about the
directory, or a lock that does not come, means: no sharing, never an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from azure.core.credentials import AccessToken

from components.common.storage.credentials import RENEW_AT

DIRECTORY = Path("/dev/shm")
WAIT_S = 20.0  # for another process's token request, which has its own limits
_LOOK_S = 0.02
_ENVIRONMENT = (
    "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST", "AZURE_POD_IDENTITY_AUTHORITY_HOST",
    "IDENTITY_ENDPOINT", "AZURE_USERNAME", "AZURE_CLIENT_CERTIFICATE_PATH",
)  # fmt: skip


class SharedToken:
    """`who`: what of the configuration decides the identity; the environment's part is added here."""

    def __init__(self, who: str, directory: Path | None = None) -> None:
        root = directory or DIRECTORY
        self.directory = root / f"dynamo-blob-tokens-{os.geteuid()}"
        parts = [who, *(f"{n}={os.environ.get(n, '')}" for n in _ENVIRONMENT)]
        self._path = self.directory / hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def get(self, request: Callable[[], AccessToken], refused: str = "") -> AccessToken:
        """A token past no renewal time and other than `refused`; `request` makes one. Raises what `request` raises."""
        with self._alone() as shared:
            found = self._read() if shared else None
            if found is not None and found.token != refused:
                return found
            now = time.time()
            token = request()
            if shared:
                self._write(token, now)
            return token

    def _read(self) -> AccessToken | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd) as f:
                info = os.fstat(fd)
                if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o600:
                    return None
                found = json.load(f)
            token = AccessToken(str(found["token"]), int(found["expires_on"]))
            return token if found["issued"] <= time.time() < float(found["renew_at"]) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, token: AccessToken, issued: float) -> None:
        work = self._path.with_suffix(f".{os.getpid()}")
        value = {
            "token": token.token, "expires_on": token.expires_on, "issued": issued, "renew_at": issued + (token.expires_on - issued) * RENEW_AT,
        }  # fmt: skip
        try:
            fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w") as f:
                json.dump(value, f)
            os.replace(work, self._path)
        except OSError:
            work.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock; False = go on without sharing."""
        fd = self._open_lock()
        try:
            end = time.monotonic() + WAIT_S
            while fd >= 0:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= end:
                        os.close(fd)
                        fd = -1
                    time.sleep(_LOOK_S)
            yield fd >= 0
        finally:
            if fd >= 0:
                os.close(fd)

    def _open_lock(self) -> int:
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            info = self.directory.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o700:
                return -1
            return os.open(
                self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError:
            return -1
