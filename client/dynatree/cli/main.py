# PYTHON_ARGCOMPLETE_OK
"""The `dynatree` command: a table of subcommands, of which only the chosen one is imported.

A subcommand is a module with `add_arguments(parser)` and `run(options) -> exit status`. For a failure that a user can
expect, `run` raises `SystemExit("what is wrong")` or a `StartupError`, which is printed as one line. What takes time to
import, above all torch, `run` imports once the arguments are right, so that help and mistakes are answered at once.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from dynatree.cli import interrupts
from dynatree.cli.parser import Parser, environment_help, suggestion

# Name -> help line, module.
COMMANDS: dict[str, tuple[str, str]] = {
    "verify": ("serve the target model", "dynatree.cli.verify"),
    "draft": ("serve the draft model, and the completions that clients ask for", "dynatree.cli.draft"),
    "gateway": ("serve OpenAI's HTTP API, and a live page, in front of a draft service", "dynatree.cli.gateway"),
    "serve": ("serve everything on this machine: both models, and the gateway", "dynatree.cli.serve"),
    "generate": ("complete a prompt", "dynatree.cli.generate"),
    "chat": ("talk with the model", "dynatree.cli.chat"),
    "demo": ("run both services on the shipped models, and one completion", "dynatree.cli.demo"),
    "audit": ("prove that the output equals transformers' own generate()", "dynatree.cli.audit"),
    "trace": ("draw a trace as a page", "dynatree.cli.trace"),
    "bench": ("measure and compare decoders", "dynatree.bench.arguments"),
}

# Those whose options may be given in the environment.
SERVICES = ("verify", "draft", "gateway", "serve")

# The extras of commands that need others than [serve].
_EXTRAS = {"gateway": "gateway", "serve": "serve,gateway"}

# The command lines that run models as the services do. Baselines of `bench compare` run as they would without DynaTree.
_RUN_MODELS = (("verify",), ("draft",), ("bench", "costs"))
# What they set before torch is loaded; a user's own choice stands.
_MODEL_ENVIRONMENT = {
    # Weights in huge pages stream faster.
    "THP_MEM_ALLOC_ENABLE": "1",
    # How long OpenMP's idle threads turn for more work before they sleep: the pauses within a forward, and not the
    # milliseconds of the default, in which the other service wants the core.
    "GOMP_SPINCOUNT": "20000",
}

# What a shell reports for a program that the signal ended: 128 + its number.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Command(Protocol):
    """What the module of a subcommand offers.

    Attributes:
        EXAMPLE: A command line, for its help.
    """

    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it; the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return the exit status.

    0 is success, 1 a failure, 2 a wrong command line, 130 an interrupt, 141 an output that nobody reads any more.
    """
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except SystemExit as exit_:
        status = _exit_status(exit_)
    except _expected_errors() as error:
        status = _fail(str(error))
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        status = _BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _drop_output()
        status = _fail(f"cannot write the output: {error.strerror}")
    finally:
        interrupts.finish()
    return status


def _expected_errors() -> tuple[type[Exception], ...]:
    """Those of the client library and of services' starts, where a command has imported them."""
    homes = (("dynatree.client", "DynaTreeError"), ("dynatree.common.errors", "StartupError"))
    return tuple(getattr(sys.modules[module], name) for module, name in homes if module in sys.modules)


def _run(argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ.get("COMP_LINE", ""))
    name = argv[0] if argv and argv[0] in COMMANDS else None
    if any(tuple(argv[: len(words)]) == words for words in _RUN_MODELS):
        for variable, value in _MODEL_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    if name is None and argv and not argv[0].startswith("-"):
        hint = suggestion(argv[0], COMMANDS)
        _parser(None, None)[0].error(f"there is no command {argv[0]!r}{hint or '; dynatree --help lists them'}")
    try:
        command = _load(name)
        parser, own = _parser(name, command)
        options, unknown = parser.parse_known_args(argv)
        if unknown:
            own.refuse(unknown)
        return command.run(options) if command else 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "dynatree":  # a fault of this package, not of its installation
            raise
        extra = _EXTRAS.get(name or "", "serve")
        words = (
            f"dynatree {name} needs the {'HTTP' if extra == 'gateway' else 'serving'} packages (no module {missing})"
        )
        raise SystemExit(f"{words}: pip install 'dynatree[{extra}]'") from None


def _complete(line: str) -> None:
    """Answer a shell that completes `line` (extra `completion`), and end; what is printed goes to the shell."""
    command = next((word for word in line.split()[1:] if word in COMMANDS), None)
    import_module("argcomplete").autocomplete(_parser(command, _load(command))[0])


def _load(name: str | None) -> Command | None:
    if name is None:
        return None
    _, module = COMMANDS[name]
    return cast(Command, import_module(module))


def _parser(name: str | None, command: Command | None) -> tuple[Parser, Parser]:
    """The parser of the whole command line, in which only the subcommand `name` knows its arguments, and that one's."""
    parser = own = Parser(
        prog="dynatree", description="Lossless tree speculative decoding, as two services.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dynatree {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for each, (help_line, _) in COMMANDS.items():
        subparser = subparsers.add_parser(
            each,
            help=help_line,
            description=help_line,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if each == name and command:
            own = subparser
            command.add_arguments(own)
            own.epilog = f"example:\n  {command.EXAMPLE}"
            if name in SERVICES:
                own.environment = os.environ
                own.epilog += f"\n\n{environment_help()}"
    return parser, own


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dynatree")
    except PackageNotFoundError:
        return "0+source"


def _exit_status(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    return _fail(exit_.code)


def _fail(message: str) -> int:
    print(f"dynatree: error: {message}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Nobody takes standard output any more: whoever read it has gone, as `head` does, or the disk is full."""
    # Python flushes standard output once more at exit, which would fail as well.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
