"""The tenants file as it is now: workers and the sweeper look at it every few seconds, by its content.

A file that is broken, or gone, leaves the last good one in force; `problem` says so until it is good again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from components.common.errors import DynamoBlobError
from components.common.kv.classes import Classes
from components.common.messages.tenants import TenantsFile

log = logging.getLogger(__name__)


class Watched:
    """`classes` of a tenants file ("" = none: one built-in class). Raises as TenantsFile.load at the start only."""

    def __init__(self, path: str, kv_container: str) -> None:
        self._path, self._container = path, kv_container
        self.problem = ""
        self._good = self._bad = self._content() if path else b""
        self.classes = self._load()

    def look(self) -> bool:
        """One look; True when other classes are in force than before."""
        if not self._path:
            return False
        try:
            content = self._content()
            if content == self._good:
                self._say("")
                return False
            if content == self._bad:
                return False
            self._bad = content
            classes = self._load()
            if self._content() != content:  # it changed under the reader: the next look decides
                self._bad = self._good
                return False
        except Exception as e:  # whatever it is: a file that somebody edits must not end its readers
            kind = "" if isinstance(e, OSError | DynamoBlobError) else f"{type(e).__name__}: "
            self._say(f"the last good one stays in force: {kind}{e}")
            return False
        self._good = self._bad = content
        changed = classes != self.classes
        self.classes = classes
        self._say("")
        if changed:
            log.info("%s changed: retention classes %s", self._path, ", ".join(n for n, _ in classes.items()))
        return changed

    def _content(self) -> bytes:
        return Path(self._path).read_bytes()

    def _load(self) -> Classes:
        if not self._path:
            return Classes.single(self._container)
        return Classes.of_file(TenantsFile.load(self._path), self._container)

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("KV-TENANTS-FILE: %s: %s", self._path, problem)
        self.problem = problem


class Follower:
    """Looks every `every_s` in a thread; `enter(classes)` brings new ones into force, and is tried again when it fails."""

    def __init__(self, watched: Watched, enter: Callable[[Classes], object], every_s: float) -> None:
        self._watched, self._enter, self._every_s = watched, enter, every_s
        self._in_force, self._why = watched.classes, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-classes", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why what stands in the file is not in force; empty when it is."""
        return self._watched.problem or self._why

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._every_s + 5)

    def turn(self) -> None:
        self._watched.look()
        if self._watched.classes == self._in_force:
            return
        try:
            self._enter(self._watched.classes)
            self._in_force, self._why = self._watched.classes, ""
        except DynamoBlobError as e:
            if not self._why:
                log.warning("KV-TENANTS-FILE: new classes are not in force yet: %s", e)
            self._why = f"not in force yet: {e}"

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.turn()
            except Exception:  # the thread stays; what is in force stays too
                log.exception("KV-TENANTS-FILE")
