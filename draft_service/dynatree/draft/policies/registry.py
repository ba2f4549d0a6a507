"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.costs import Costs
from dynatree.draft.policies.autoregressive import Autoregressive, AutoregressiveSettings
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.dynatree import DynaTree, DynaTreeSettings
from dynatree.draft.policies.dyspec import DySpec, DySpecSettings, DySpecThreshold, DySpecThresholdSettings
from dynatree.draft.policies.fixed import Fixed, FixedSettings, Linear, LinearSettings
from dynatree.draft.policies.hybrid import Hybrid, HybridSettings
from dynatree.draft.policies.ngram import NGram, NGramSettings
from dynatree.draft.policies.opt_tree import OptTree, OptTreeSettings
from dynatree.draft.policies.sequoia import Sequoia, SequoiaSettings
from dynatree.draft.policies.specinfer import SpecInfer, SpecInferSettings
from dynatree.draft.policies.throughput import Throughput, ThroughputSettings

DEFAULT_POLICY = "throughput"
DRAWING_POLICY = "dyspec"  # the default under residual sampling, where the other does not apply


@dataclass(frozen=True)
class _Entry:
    settings: type[Any]
    policy: Callable[..., Policy]
    takes_costs: bool = False


_REGISTRY = {
    "autoregressive": _Entry(AutoregressiveSettings, Autoregressive),
    "dynatree": _Entry(DynaTreeSettings, DynaTree),
    "dyspec": _Entry(DySpecSettings, DySpec),
    "dyspec-threshold": _Entry(DySpecThresholdSettings, DySpecThreshold),
    "fixed": _Entry(FixedSettings, Fixed),
    "hybrid": _Entry(HybridSettings, Hybrid),
    "linear": _Entry(LinearSettings, Linear),
    "ngram": _Entry(NGramSettings, NGram),
    "opt-tree": _Entry(OptTreeSettings, OptTree),
    "sequoia": _Entry(SequoiaSettings, Sequoia),
    "specinfer": _Entry(SpecInferSettings, SpecInfer),
    "throughput": _Entry(ThroughputSettings, Throughput, takes_costs=True),
}


def policy_names() -> tuple[str, ...]:
    """Every policy, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def policies_that_take_draws() -> tuple[str, ...]:
    """The policies that residual sampling admits."""
    return tuple(name for name in policy_names() if create_policy(name, {}).takes_draws)


def create_policy(name: str, settings: Mapping[str, float], costs: Costs | None = None) -> Policy:
    """A policy for one session; settings left out keep their defaults. `costs` is what all sessions have measured.

    Raises:
        InvalidArgumentError: An unknown policy or setting (the message lists the known ones), or a value out of range.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        raise InvalidArgumentError(f"unknown policy {name!r}, expected one of {', '.join(policy_names())}")
    types = {field.name: field.type for field in fields(entry.settings)}
    unknown = sorted(set(settings) - set(types))
    if unknown:
        known = ", ".join(types) or "none"
        raise InvalidArgumentError(f"policy {name} has no setting {', '.join(unknown)}; its settings: {known}")
    checked = entry.settings(**{key: _typed(key, value, types[key]) for key, value in settings.items()})
    return entry.policy(checked, costs or Costs()) if entry.takes_costs else entry.policy(checked)


def _typed(name: str, value: float, kind: object) -> float:
    """The wire carries every setting as a double; whole numbers must be whole, and switches 0 or 1."""
    if kind == "float":
        return value
    if kind == "bool":
        if value not in (0.0, 1.0):
            raise InvalidArgumentError(f"{name} is {value:g}, expected 0 (off) or 1 (on)")
        return bool(value)
    if not float(value).is_integer():
        raise InvalidArgumentError(f"{name} is {value:g}, expected a whole number")
    return int(value)
