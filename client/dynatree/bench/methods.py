"""What is measured: policies with their settings, baselines, and the labels under which tables show them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynatree.client import SamplingScheme


@dataclass(frozen=True)
class Method:
    """A policy and its settings; those left out keep the server's defaults. A baseline has no policy."""

    label: str
    policy: str | None
    settings: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Case:
    """A method at one temperature. Where that is 0 nothing is drawn, and there is no scheme."""

    method: Method
    temperature: float
    scheme: SamplingScheme | None

    @property
    def equals_plain_decoding(self) -> bool:
        """Whether its tokens must be those of plain decoding; residual sampling only keeps their distribution."""
        return self.scheme != "residual"


PLAIN = Method("autoregressive", "autoregressive")

# The rows of DynaTree's Tables 3 and 4. What a row claims is set, so that a server's own defaults cannot change it.
LINEAR = Method("linear (K = 8)", "linear", (("depth", 8.0),))
FIXED = Method("fixed (D = 8, B = 3, tau = 0.1)", "fixed", (("depth", 8.0), ("breadth", 3.0), ("tau", 0.1)))
SMALL_FIXED = Method("fixed (D = 5, B = 2, tau = 0.1)", "fixed", (("depth", 5.0), ("breadth", 2.0), ("tau", 0.1)))
BACKBONE = Method(
    "fixed (D = 5, B = 2, tau = 0.05)",
    "dynatree",
    (
        ("dynamic_breadth", 0.0),
        ("dynamic_depth", 0.0),
        ("history", 0.0),
        ("breadth_mid", 2.0),
        ("base_depth", 5.0),
        ("tau", 0.05),
    ),
)
_DYNAMIC = (("dynamic_breadth", 1.0), ("dynamic_depth", 1.0))
DYNAMIC = Method("+ dynamic tree breadth and depth", "dynatree", (*_DYNAMIC, ("history", 0.0)))
DYNATREE = Method("+ history adaptation (DynaTree)", "dynatree", (*_DYNAMIC, ("history", 1.0)))

ABLATION = (PLAIN, LINEAR, FIXED, SMALL_FIXED, BACKBONE, DYNAMIC, DYNATREE)
COUPLING = (LINEAR, FIXED, Method("dynatree", "dynatree"), Method("dyspec", "dyspec"))
SCHEMES: tuple[SamplingScheme, ...] = ("gumbel", "independent", "residual")

RANKS = 8  # of the settings p1 to p8 of policy `sequoia`
GUESSES = Method(
    f"the draft's {RANKS} first guesses", "fixed", (("depth", 1.0), ("breadth", float(RANKS)), ("tau", 0.0))
)

# transformers' own `generate()` by itself, with an assistant model, and with prompt lookup.
ASSISTED = Method("transformers assisted", None)
PROMPT_LOOKUP = Method("transformers prompt lookup", None)
BASELINES = {
    "transformers": Method("transformers", None),
    "transformers-assisted": ASSISTED,
    "transformers-prompt-lookup": PROMPT_LOOKUP,
}


def parse_method(text: str) -> Method:
    """An argparse type: `NAME[:setting=number,...]`."""
    name, colon, rest = text.partition(":")
    settings: dict[str, float] = {}
    for part in rest.split(",") if colon else ():
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            key = ""
        if not key or key in settings:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME[:setting=value,...] with a number for each setting, and each setting once"
            )
        settings[key] = number
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no policy")
    return Method(text, name, tuple(settings.items()))


def parse_methods(text: str) -> list[Method]:
    """An argparse type: `NAME[:setting=number/number...,...]`, every combination of the settings' alternatives."""
    name, colon, rest = text.partition(":")
    settings = [_alternatives(part) for part in rest.split(",")] if colon else []
    return [parse_method(name + colon + ",".join(combination)) for combination in product(*settings)]


def _alternatives(setting: str) -> list[str]:
    """`name=a/b` as `name=a` and `name=b`."""
    name, _, values = setting.partition("=")
    return [f"{name}={value}" for value in values.split("/")]
