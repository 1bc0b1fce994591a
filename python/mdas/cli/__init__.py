"""The command `mdas`: `mdas bench allreduce`, `mdas bench overlap`, `mdas doctor`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mdas import __version__
from mdas.errors import Error

_COMMANDS = {
    ("doctor",): ("mdas.cli.doctor", "what this machine offers, and what init() would choose and why"),
    ("bench", "allreduce"): ("mdas.cli.bench_allreduce", "time and bandwidth by size, after nccl-tests"),
    ("bench", "overlap"): ("mdas.cli.bench_overlap", "how much communication hides behind computation"),
}
"""Words of a command: the module with its `add_arguments` and `run`, and what it does."""

_GROUPS = {"bench": "measure this machine and its network"}


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Parses `arguments`. Only the module of the command in them is imported: the others may need
    packages that are not installed.
    """
    top = argparse.ArgumentParser(prog="mdas", description="mdas: hides the gradient exchange behind computation")
    top.add_argument("--version", action="version", version=f"mdas {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    groups = {
        name: commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar="WHAT")
        for name, text in _GROUPS.items()
    }
    for words, (module_name, text) in _COMMANDS.items():
        where = commands if len(words) == 1 else groups[words[0]]
        command = where.add_parser(words[-1], help=text, description=text)
        if tuple(arguments[: len(words)]) == words:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. What mdas raises becomes one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(arguments).parse_args(arguments)
    run = options.__dict__.pop("run")
    try:
        return int(run(options))
    except Error as error:
        print(f"mdas: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
