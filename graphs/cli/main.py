"""`dynamo VERB`: every module of graphs.cli is a verb with `add(parser)` and `run(args) -> exit code`.

Every verb takes ``--json`` (its own form, or a flag given here) and exits non-zero on failure. Errors
are printed as what, where, why and what to do; a traceback that reaches a user is a bug.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import pkgutil
import sys

import graphs.cli
from components.common.errors import DynamoBlobError, nearest
from graphs import output

NOT_VERBS = {"main"}


def verbs() -> list[str]:
    return sorted(
        m.name
        for m in pkgutil.iter_modules(graphs.cli.__path__)
        if m.name not in NOT_VERBS and not m.name.startswith("_")
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    wants_json = "--json" in argv or any(a.startswith("--json=") for a in argv)
    _loopback_is_direct()
    logging.getLogger("azure").addHandler(
        logging.NullHandler()
    )  # its errors come back as ours; its log only repeats them
    output.begin()
    try:
        return _dispatch(argv)
    except DynamoBlobError as e:
        if wants_json and argv[0] in ("serve", "bench"):  # their --json names a file: somebody reads along here
            print(e, file=sys.stderr, flush=True)
            if output.on_stdout():
                return 1
        return _failed(e, wants_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        if os.environ.get("DYNAMO_BLOB_TRACEBACK"):
            raise
        return _failed(
            DynamoBlobError(
                "CLI-FAULT",
                "a fault of this program",
                why=f"{type(e).__name__}: {e}",
                do="set DYNAMO_BLOB_TRACEBACK=1 and report what it prints",
            ),
            wants_json,
        )


def _loopback_is_direct() -> None:
    """A user's HTTP proxy is for the world outside; processes of a local graph are asked directly."""
    for name in ("no_proxy", "NO_PROXY"):
        have = [x for x in os.environ.get(name, "").split(",") if x]
        os.environ[name] = ",".join(dict.fromkeys([*have, "127.0.0.1", "localhost", "::1"]))


def _failed(error: DynamoBlobError, as_json: bool) -> int:
    print(
        json.dumps({"error": error.as_json()}) if as_json else str(error),
        file=sys.stdout if as_json else sys.stderr,
        flush=True,
    )
    return 1


def _dispatch(argv: list[str]) -> int:
    names = verbs()
    if argv[:1] == ["help"] and argv[1:]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(names))
        return 0 if argv else 2
    verb = argv[0]
    if verb in ("--version", "version"):
        from importlib.metadata import version

        print(f"dynamo-blob {version('dynamo-blob')}")
        return 0
    if verb not in names:
        raise DynamoBlobError(
            "CLI-VERB-UNKNOWN", f"there is no verb '{verb}'", why=nearest(verb, names), do="dynamo help"
        )
    module = importlib.import_module(f"graphs.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"dynamo {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add(parser)
    if "--json" not in parser._option_string_actions:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return int(module.run(parser.parse_args(argv[1:])) or 0)


def _help(names: list[str]) -> str:
    lines = ["usage: dynamo VERB ...        dynamo VERB --help", ""]
    for name in names:
        lines.append(f"  {name:<10} {_summary(name)}")
    return "\n".join(lines)


def _summary(name: str) -> str:
    """First line of the verb's docstring, read without importing it: help must be quick."""
    import ast
    from pathlib import Path

    path = Path(next(iter(graphs.cli.__path__))) / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.splitlines()[0] if text else ""


if __name__ == "__main__":
    sys.exit(main())
