"""The methods that are measured: policies with their settings, baselines, and their labels in tables."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from dynatree.cli.arguments import Setting, setting_value

if TYPE_CHECKING:
    from dynatree.client import SamplingScheme


@dataclass(frozen=True)
class Method:
    """A policy and its settings; settings left out keep the server's defaults. A baseline has no policy.

    A `foreign` method is another program's server, whose tokens may differ.
    """

    label: str
    policy: str | None
    settings: tuple[tuple[str, Setting], ...] = ()
    foreign: bool = False

    @property
    def own_plain(self) -> str | None:
        """Label of the server that decodes plainly for a foreign one that drafts: `NAME` for `NAME, drafting 5`."""
        name, comma, _ = self.label.partition(",")
        return name if self.foreign and comma else None


@dataclass(frozen=True)
class Case:
    """A method at one temperature. At temperature 0 nothing is drawn, and the scheme is None."""

    method: Method
    temperature: float
    scheme: SamplingScheme | None

    @property
    def equals_plain_decoding(self) -> bool:
        """Whether the tokens must equal plain decoding's; residual sampling only preserves their distribution."""
        return self.scheme != "residual"


PLAIN = Method("autoregressive", "autoregressive")

# The rows of DynaTree's Tables 3 and 4. A row sets everything that it claims, so that server defaults cannot change it.
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


def _dynamic(label: str, *, history: bool, over_nodes: bool = False, calibrated: bool = False) -> Method:
    switches = {
        "dynamic_breadth": True,
        "dynamic_depth": True,
        "history": history,
        "acceptance_over_nodes": over_nodes,
        "calibrated": calibrated,
    }
    return Method(label, "dynatree", (("base_depth", 5.0), *((name, float(on)) for name, on in switches.items())))


DYNAMIC = _dynamic("+ dynamic tree breadth and depth", history=False)
DYNATREE = _dynamic("+ history adaptation (DynaTree)", history=True)
# Points that the paper leaves open: the denominator of acceptance, and whether thresholds use calibrated confidence.
READINGS = (
    _dynamic("the same, acceptance over nodes", history=True, over_nodes=True),
    _dynamic("dynamic breadth and depth, calibrated", history=False, calibrated=True),
    _dynamic("DynaTree, calibrated", history=True, calibrated=True),
    _dynamic("the same, acceptance over nodes, calibrated", history=True, over_nodes=True, calibrated=True),
)

ABLATION = (PLAIN, LINEAR, FIXED, SMALL_FIXED, BACKBONE, DYNAMIC, DYNATREE, *READINGS)
COUPLING = (LINEAR, FIXED, Method("dynatree", "dynatree"), Method("dyspec", "dyspec"))
SCHEMES: tuple[SamplingScheme, ...] = ("gumbel", "independent", "residual")

RANKS = 8  # ranks in the setting `rates` of policy `sequoia`
GUESSES = Method(
    f"the draft's {RANKS} first guesses", "fixed", (("depth", 1.0), ("breadth", float(RANKS)), ("tau", 0.0))
)

# transformers' own `generate()`: alone, with an assistant model, and with prompt lookup.
ASSISTED = Method("transformers assisted", None)
PROMPT_LOOKUP = Method("transformers prompt lookup", None)
BASELINES = {
    "transformers": Method("transformers", None),
    "transformers-assisted": ASSISTED,
    "transformers-prompt-lookup": PROMPT_LOOKUP,
}


def parse_method(text: str) -> Method:
    """An argparse type: `NAME[:setting=value,...]`; an item without `=` continues the list of the one before."""
    name, parts = _split(text)
    settings: dict[str, Setting] = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            setting = setting_value(value)
        except ValueError:
            key = ""
        if not key or key in settings:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME[:setting=value,...] with numbers or a word a setting, and each setting once"
            )
        settings[key] = setting
    return Method(text, name, tuple(settings.items()))


def parse_server(text: str) -> tuple[Method, str]:
    """An argparse type: parse `NAME=URL` into a baseline of that name and the URL."""
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL with http:// or https://")
    return Method(name, None, foreign=True), url


def parse_methods(text: str) -> list[Method]:
    """An argparse type: expand `NAME[:setting=value/value...,...]` into every combination of the alternatives."""
    name, parts = _split(text)
    if not parts:
        return [parse_method(text)]
    combinations = product(*map(_alternatives, parts))
    return [parse_method(f"{name}:{','.join(combination)}") for combination in combinations]


def _split(text: str) -> tuple[str, list[str]]:
    """Split `NAME:a=1,2,b=3` into NAME and [`a=1,2`, `b=3`]."""
    name, colon, rest = text.partition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no policy")
    parts: list[str] = []
    for item in rest.split(",") if colon else ():
        if "=" in item or not parts:
            parts.append(item)
        else:
            parts[-1] += "," + item
    return name, parts


def _alternatives(setting: str) -> list[str]:
    """Split `name=a/b` into `name=a` and `name=b`."""
    name, _, values = setting.partition("=")
    return [f"{name}={value}" for value in values.split("/")]
