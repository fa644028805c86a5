"""One error type for everything a user can meet.

Every error says *what* happened, *where* (``file:line:column`` or a URI), *why*, and what to *do*,
under a stable code that scripts and dashboards may match on (``KV-HANDOVER-RECOMPUTED``).
Entry points print `DynamoBlobError` as text (or as JSON with ``--json``) and exit non-zero;
a traceback that reaches a user is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DynamoBlobError(Exception):
    """An error with a stable code.

    code   upper-case words joined by dashes, the area first (``WEIGHTS-DIGEST-MISMATCH``).
    what   one sentence: what went wrong.
    where  ``file:line:column``, URI or process name; empty when there is no place.
    why    the cause, with the values that disagree; empty when `what` says it all.
    do     what the reader can do about it.
    data   values for ``--json`` (JSON types only); never a secret.
    """

    def __init__(self, code: str, what: str, *, where: str = "", why: str = "", do: str = "", **data: Any) -> None:
        super().__init__(code, what, where, why, do)
        self.code, self.what, self.where, self.why, self.do = code, what, where, why, do
        self.data = data

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.what}"]
        lines += [f"  {k}: {v}" for k, v in (("where", self.where), ("why", self.why), ("do", self.do)) if v]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # keeps keyword fields across processes
        return (_rebuild, (type(self), self.code, self.what, self.where, self.why, self.do, self.data))

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "do": self.do,
            **self.data,
        }


def _rebuild(
    cls: type[DynamoBlobError], code: str, what: str, where: str, why: str, do: str, data: dict[str, Any]
) -> DynamoBlobError:
    return cls(code, what, where=where, why=why, do=do, **data)


def nearest(word: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'replicas'?"`` for the closest valid name, else the names there are."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "valid here: " + ", ".join(names)
