"""The one JSON document of a command. `--json -` must give a reader one, also when the command fails after writing it."""

from __future__ import annotations

import json
from pathlib import Path

from components.common.errors import DynamoBlobError

_written = False


def write(file: str, value: object) -> None:
    """To `file`, "-" for stdout. Raises CLI-WRITE."""
    global _written
    text = json.dumps(value, indent=1)
    if file == "-":
        _written = True
        print(text, flush=True)
        return
    try:
        Path(file).write_text(text + "\n")
    except OSError as e:
        raise DynamoBlobError("CLI-WRITE", "the JSON file cannot be written", where=file, why=str(e.strerror)) from None


def on_stdout() -> bool:
    """Whether this command's document is on stdout already: its error then belongs on stderr alone."""
    return _written


def begin() -> None:
    """A command begins; for programs that run several."""
    global _written
    _written = False
