"""Options that several commands share, and their types; imports nothing slow."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

SCHEMES = ("gumbel", "independent", "residual")


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; expected at least 1")
    return number


positive.__name__ = "whole number"  # argparse names the type in its message


def threads(text: str) -> int:
    """An argparse type: a whole number from 1 to the number of the machine's cores."""
    number, cores = positive(text), os.cpu_count()
    if cores is not None and number > cores:
        raise argparse.ArgumentTypeError(f"{text} is more than the {cores} cores of this machine")
    return number


threads.__name__ = positive.__name__


def not_negative(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; expected at least 0")
    return number


not_negative.__name__ = positive.__name__


def device(text: str) -> str:
    """An argparse type: `auto`, or the name of a torch device; torch itself checks whether the device exists."""
    if not re.fullmatch(r"[a-z]+(:\d+)?", text) or text == "gpu":
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; expected auto, cpu, cuda or cuda:N")
    return text


class Keyed(argparse.Action):
    """An action that collects the (key, value) pairs from its type in a dict; a repeated key is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Add one pair to the dict.

        Raises:
            argparse.ArgumentError: The key is repeated.
        """
        assert isinstance(values, tuple)  # one argument per use, as converted by the type
        key, value = values
        pairs = getattr(namespace, self.dest)
        if key in pairs:
            raise argparse.ArgumentError(self, f"{key} is given twice")
        setattr(namespace, self.dest, {**pairs, key: value})


def add_channel_arguments(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Add the options for the TLS certificates of a connection to a server; return their group."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--ca", metavar="FILE", help="PEM file of the authorities that may sign the server's certificate; enables TLS"
    )
    group.add_argument("--cert", metavar="FILE", help="PEM file of the certificate chain to present to the server")
    group.add_argument("--key", metavar="FILE", help="PEM file of the private key of --cert")
    return group


def add_policy_settings(parser: argparse._ActionsContainer) -> None:
    """Add the option `--set`, which fills `policy_settings`: name -> a number, a word or a tuple of numbers."""
    parser.add_argument(
        "--set",
        dest="policy_settings",
        type=_setting,
        action=Keyed,
        default={},
        metavar="NAME=VALUE",
        help="setting of the policy: a number (depth=8), a word (root=single) or a list (widths=1,1,3); repeatable",
    )


Setting = float | str | tuple[float, ...]  # the value of a policy's setting on the command line


def _setting(text: str) -> tuple[str, Setting]:
    name, _, value = text.partition("=")
    try:
        setting = setting_value(value)
    except ValueError:
        name = ""
    if not name:
        known = "a number, a word of small letters and hyphens, or numbers with commas between them"
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with {known}")
    return name, setting


def setting_value(text: str) -> Setting:
    """Parse a number, a word of lower-case letters and hyphens, or comma-separated numbers (a tuple).

    Raises:
        ValueError: The text is none of these.
    """
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", text):
            raise
        return text
    return values if len(values) > 1 else values[0]
