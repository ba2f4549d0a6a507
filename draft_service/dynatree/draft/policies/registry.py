"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.policies.autoregressive import Autoregressive, AutoregressiveSettings
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.dynatree import DynaTree, DynaTreeSettings
from dynatree.draft.policies.fixed import Fixed, FixedSettings, Linear, LinearSettings

DEFAULT_POLICY = "dynatree"


@dataclass(frozen=True)
class _Entry:
    settings: type[Any]
    policy: Callable[[Any], Policy]


_REGISTRY = {
    "autoregressive": _Entry(AutoregressiveSettings, Autoregressive),
    "dynatree": _Entry(DynaTreeSettings, DynaTree),
    "fixed": _Entry(FixedSettings, Fixed),
    "linear": _Entry(LinearSettings, Linear),
}


def policy_names() -> tuple[str, ...]:
    """Every policy, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def create_policy(name: str, settings: Mapping[str, float]) -> Policy:
    """A policy for one session; settings left out keep their defaults.

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
    return entry.policy(entry.settings(**{key: _typed(key, value, types[key]) for key, value in settings.items()}))


def _typed(name: str, value: float, kind: object) -> float:
    """The wire carries every setting as a double; whole numbers must be whole."""
    if kind != "int":
        return value
    if not float(value).is_integer():
        raise InvalidArgumentError(f"{name} is {value:g}, expected a whole number")
    return int(value)
