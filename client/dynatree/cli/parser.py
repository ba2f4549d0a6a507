"""An argparse parser with a short usage line, suggestions for misspelled options, and options from the environment."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

PREFIX = "DYNATREE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Names of options in other programs -> names here.
_ELSEWHERE = {
    "--model": "--target-model",
    "--speculative-model": "--draft-model",
    "--max-model-len": "--max-context",
    "--ctx-size": "--max-context",
    "--max-num-seqs": "--max-sessions",
    "--parallel": "--max-sessions",
    "--max-tokens": "--max-new-tokens",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--tensor-parallel-size": "--tensor-parallel",
    "--alias": "--served-model-name",
}


class Parser(argparse.ArgumentParser):
    """A parser of one command; if `environment` is set, its variables may give the options."""

    environment: Mapping[str, str] | None = None

    def format_usage(self) -> str:
        """Return a usage line of the required arguments only; `--help` lists the rest."""
        self.usage = self._short_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """Return the help, with the short usage line."""
        self.usage = self._short_usage()
        return super().format_help()

    def _short_usage(self) -> str:
        words = [self.prog]
        for action in self._actions:
            name = action.metavar or (action.choices and f"{{{','.join(action.choices)}}}") or action.dest.upper()
            if not action.option_strings:
                words += [f"{name}", *(["..."] if isinstance(action, argparse._SubParsersAction) else [])]
            elif action.required:
                words += [action.option_strings[-1], f"{name}"]
        return " ".join([*words, "[OPTIONS]"]).replace("%", "%%")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments; the environment gives options that the command line does not.

        The attribute `from_environment` of the result has the names of these.
        """
        if self.environment is None:
            return super().parse_known_args(args, namespace)
        given = [*self._from_environment(self.environment, args)]
        options, unknown = super().parse_known_args([*given, *args], namespace)
        named = (self._option_string_actions.get(each.partition("=")[0]) for each in given)
        options.from_environment = frozenset(action.dest for action in named if action is not None)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with an error; if a variable gave the option, the message names the variable."""
        named = next((action for action in self._actions if message.startswith(f"argument {_title(action)}:")), None)
        if named is not None and self.environment is not None and (variable := _variable(named)) in self.environment:
            message += f" (set by the environment variable {variable})"
        super().error(message)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error about unknown arguments, and suggest similar options."""
        names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        known = {option for parser in with_commands(self) for option in parser._option_string_actions} - {
            "-h",
            "--help",
        }
        meant = [found for name in names if (found := _meant(name, known))]
        hint = f"; did you mean {' and '.join(dict.fromkeys(meant))}?" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _from_environment(self, environment: Mapping[str, str], args: Sequence[str]) -> Iterator[str]:
        """Yield the arguments given by variables, except those that the command line gives too."""
        given = {arg.partition("=")[0] for arg in args}
        said = {self._option_string_actions[name].dest for name in given & self._option_string_actions.keys()}
        for action in self._actions:
            value = environment.get(_variable(action)) if action.option_strings else None
            if not value or action.dest in said or isinstance(action, argparse._HelpAction):
                continue
            option = action.option_strings[0]
            if option == "--port" and "://" in value:  # Kubernetes sets this for a Service named dynatree
                continue
            if action.nargs == 0:
                if value.lower() not in (*_TRUE, *_FALSE):
                    self.error(f"{_variable(action)} is {value!r}, expected 1 or 0")
                yield from [option] if value.lower() in _TRUE else []
            elif action.nargs == "+":
                yield from (option, *value.split())
            elif isinstance(action.default, (list, dict)):  # may be repeated
                yield from (f"{option}={word}" for word in value.split())
            else:
                yield f"{option}={value}"


def suggestion(word: str, known: Collection[str]) -> str:
    """Return a question that suggests a similar word; "" if none is similar."""
    meant = get_close_matches(word, known, n=1)
    return f"; did you mean {meant[0]}?" if meant else ""


def environment_help() -> str:
    """Return the paragraph about environment variables for a service's help."""
    return (
        f"Every option can also be set by an environment variable, {PREFIX} and its name: {PREFIX}MAX_SESSIONS=8. The\n"
        "command line takes precedence. A switch is 1 or 0; the values of a repeatable option are separated by spaces."
    )


def group(parser: argparse.ArgumentParser, title: str, description: str | None = None) -> argparse._ArgumentGroup:
    """Return the parser's option group with this title; create it if there is none."""
    found = next((each for each in parser._action_groups if each.title == title), None)
    return found or parser.add_argument_group(title, description)


def _variable(action: argparse.Action) -> str:
    name = next((each for each in action.option_strings if each.startswith("--")), "")
    return PREFIX + name.removeprefix("--").replace("-", "_").upper()


def _title(action: argparse.Action) -> str:
    return "/".join(action.option_strings)


def _meant(name: str, known: Collection[str]) -> str:
    other = _ELSEWHERE.get(name, "")
    return other if other in known else next(iter(get_close_matches(name, known, n=1)), "")


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from with_commands(each)
