# PYTHON_ARGCOMPLETE_OK
"""The `dynatree` command: a table of subcommands, of which only the chosen one is imported.

A subcommand is a module with `add_arguments(parser)` and `run(options) -> exit status`. For a failure that a user can
expect, `run` raises `SystemExit("message")` or a `StartupError`, which is printed as one line. `run` does slow imports,
above all torch, after it has checked the arguments, so that help and errors appear at once.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

from dynatree.cli import interrupts
from dynatree.cli.parser import Parser, environment_help, suggestion

# Name -> help line, module.
COMMANDS: dict[str, tuple[str, str]] = {
    "verify": ("serve the target model", "dynatree.cli.verify"),
    "draft": ("serve the completions that clients request, with a draft model or without one", "dynatree.cli.draft"),
    "gateway": ("serve OpenAI's HTTP API and a live page in front of a draft service", "dynatree.cli.gateway"),
    "serve": ("serve a target, a draft model if there is one, and the gateway on this machine", "dynatree.cli.serve"),
    "generate": ("complete a prompt", "dynatree.cli.generate"),
    "chat": ("chat with the model", "dynatree.cli.chat"),
    "demo": ("run both services on the bundled models and show one completion", "dynatree.cli.demo"),
    "check": ("say whether and how a model or a pair would be served", "dynatree.cli.check"),
    "audit": ("check that the output equals that of transformers' generate()", "dynatree.cli.audit"),
    "trace": ("draw a trace as an HTML page", "dynatree.cli.trace"),
    "rank": ("rank drafts for a target by their measured speed on your prompts", "dynatree.bench.rank.arguments"),
    "distill": (
        "make a draft for a target that has none, from its layers and your texts",
        "dynatree.distill.arguments",
    ),
    "bench": ("measure and compare decoders", "dynatree.bench.arguments"),
}

# The commands whose options may be given in the environment.
SERVICES = ("verify", "draft", "gateway", "serve")

# The extras of the commands that need another extra than [serve].
_EXTRAS = {"gateway": "gateway", "serve": "serve,gateway"}

# The commands that run models as the services do; not `bench compare`, whose baselines run without these settings.
_RUN_MODELS = (("verify",), ("draft",), ("bench", "costs"))
# Environment variables that these commands set before torch loads, unless the user has set them.
MODEL_ENVIRONMENT = {
    # Weights in huge pages are read faster.
    "THP_MEM_ALLOC_ENABLE": "1",
    # How long OpenMP's idle threads spin before they sleep. This bridges the pauses within a forward pass; the default
    # of some milliseconds would take the core from the other service.
    "GOMP_SPINCOUNT": "20000",
}

# Exit statuses that a shell reports for a program ended by a signal: 128 + the signal's number.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Command(Protocol):
    """The interface of a subcommand's module.

    Attributes:
        EXAMPLE: An example command line for the help.
    """

    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the subcommand; return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words and words[0] in COMMANDS else None
    return finished(name, lambda: _run(name, words))


def finished(name: str | None, work: Callable[[], int]) -> int:
    """Do the work of the command `name`, and return the exit status; an error is printed as one line.

    0 is success, 1 a failure, 2 a wrong command line, 130 an interrupt, 141 a closed output pipe.
    """
    try:
        status = work()
        sys.stdout.flush()
    except SystemExit as exit_:
        status = _exit_status(exit_)
    except _expected_errors() as error:
        status = _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "dynatree":  # a bug in this package, not a missing extra
            raise
        extra = _EXTRAS.get(name or "", "serve")
        packages = "HTTP" if extra == "gateway" else "serving"
        needs = f"dynatree {name} needs the {packages} packages (no module {missing})"
        status = _fail(f"{needs}: pip install 'dynatree[{extra}]'")
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        status = _BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:
            status = _fail(f"{error.filename}: {error.strerror}")
        elif error.errno in (errno.ENOSPC, errno.EIO):
            _drop_output()
            status = _fail(f"cannot write the output: {error.strerror}")
        else:
            raise
    finally:
        interrupts.forget()
        interrupts.finish()
    return status


def _expected_errors() -> tuple[type[Exception], ...]:
    """The error classes of the client library and of the services' startup, if a command has imported them."""
    homes = (("dynatree.client", "DynaTreeError"), ("dynatree.common.errors", "StartupError"))
    return tuple(getattr(sys.modules[module], name) for module, name in homes if module in sys.modules)


def _run(name: str | None, argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ.get("COMP_LINE", ""))
    if any(tuple(argv[: len(words)]) == words for words in _RUN_MODELS):
        for variable, value in MODEL_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    if name is None and argv and not argv[0].startswith("-"):
        hint = suggestion(argv[0], COMMANDS)
        _parser(None, None)[0].error(f"there is no command {argv[0]!r}{hint or '; dynatree --help lists them'}")
    command = _load(name)
    parser, own = _parser(name, command)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        own.refuse(unknown)
    return command.run(options) if command else 0


def _complete(line: str) -> None:
    """Print the completions of `line` for the shell (extra `completion`), and exit."""
    command = next((word for word in line.split()[1:] if word in COMMANDS), None)
    import_module("argcomplete").autocomplete(_parser(command, _load(command))[0])


def _load(name: str | None) -> Command | None:
    if name is None:
        return None
    _, module = COMMANDS[name]
    return cast(Command, import_module(module))


def _parser(name: str | None, command: Command | None) -> tuple[Parser, Parser]:
    """Return the parser of the whole command line and that of the subcommand `name`, the only one with its options."""
    parser = own = Parser(
        prog="dynatree", description="Lossless tree speculative decoding as two services.", allow_abbrev=False
    )
    suppress = argparse.SUPPRESS
    parser.add_argument("--version", action=_Version, nargs=0, dest=suppress, default=suppress, help=_Version.HELP)
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


class _Version(argparse.Action):
    """Prints the version; only then is it looked up, because `importlib.metadata` takes 20 ms to import."""

    HELP = "show program's version number and exit"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        print(f"dynatree {_version()}")
        parser.exit()


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
    """Discard standard output, whose reader (such as `head`) has gone or whose disk is full."""
    # Python flushes standard output again at exit, which would fail too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
