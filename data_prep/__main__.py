"""`python -m data_prep build | verify | inspect | convert`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

COMMANDS = {
    "build": "turn text into shards of sentence pairs",
    "verify": "check shards against their manifest and their rules",
    "inspect": "show instances, decoded, with their masks",
    "convert": "turn other tools' files into shards",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; `only` fills in one command's arguments, since each brings its own imports."""
    parser = argparse.ArgumentParser(prog="python -m data_prep", description="Prepare pretraining data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description.capitalize() + ".")
        if name == only:
            importlib.import_module(f"data_prep.{name}").add_arguments(command)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; exit code 0 done, 1 failed (or problems found), 2 the user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    only = next((argument for argument in arguments if argument in COMMANDS), None)
    parsed = build_parser(only).parse_args(arguments)
    module = importlib.import_module(f"data_prep.{parsed.command}")
    try:
        return module.run(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left; Python would complain again while flushing at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
