"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from typing import Any

from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.policies.autoregressive import Autoregressive, AutoregressiveSettings
from dynatree.draft.policies.base import MAX_NUMBERS, DrawingSettings, Policy, check_length
from dynatree.draft.policies.calibrated import Calibrated, CalibratedValue
from dynatree.draft.policies.lookup import NGramSettings
from dynatree.draft.policies.papers.dynatree import DynaTree, DynaTreeSettings
from dynatree.draft.policies.papers.dyspec import DySpec, DySpecSettings, DySpecThreshold, DySpecThresholdSettings
from dynatree.draft.policies.papers.fixed import Fixed, FixedSettings, LinearSettings, linear
from dynatree.draft.policies.papers.hybrid import Hybrid, HybridSettings
from dynatree.draft.policies.papers.ngram import NGram
from dynatree.draft.policies.papers.opt_tree import OptTree, OptTreeSettings
from dynatree.draft.policies.papers.sequoia import Sequoia, SequoiaSettings
from dynatree.draft.policies.papers.specinfer import SpecInfer, SpecInferSettings
from dynatree.draft.policies.throughput import Throughput, ThroughputSettings

Setting = float | str | Sequence[float]

DEFAULT_POLICY = "throughput"
# Defaults under residual sampling, which `throughput` does not support, by whether there is a draft model.
_RESIDUAL_POLICIES = {True: "dyspec", False: "autoregressive"}


@dataclass(frozen=True)
class _Entry:
    """A policy's settings class, and its factory from settings, shared costs and tuned constants.

    `without_model` has the settings with which the policy needs no draft model; None means that it always needs one.
    """

    settings: type[Any]
    create: Callable[[Any, Costs, ControlSettings], Policy]
    without_model: Mapping[str, Setting] | None = None


_REGISTRY = {
    "autoregressive": _Entry(AutoregressiveSettings, lambda *_: Autoregressive(), {}),
    "dynatree": _Entry(DynaTreeSettings, lambda settings, costs, _: DynaTree(settings, costs.track_record)),
    "dyspec": _Entry(DySpecSettings, lambda settings, *_: DySpec(settings)),
    "dyspec-threshold": _Entry(DySpecThresholdSettings, lambda settings, *_: DySpecThreshold(settings)),
    "fixed": _Entry(FixedSettings, lambda settings, *_: Fixed(settings)),
    "hybrid": _Entry(HybridSettings, lambda settings, _, control: Hybrid(settings, control)),
    "linear": _Entry(LinearSettings, lambda settings, *_: linear(settings)),
    "ngram": _Entry(NGramSettings, lambda settings, _, control: NGram(settings, control), {}),
    "opt-tree": _Entry(OptTreeSettings, lambda settings, *_: OptTree(settings)),
    "sequoia": _Entry(SequoiaSettings, lambda settings, costs, _: Sequoia(settings, costs)),
    "specinfer": _Entry(SpecInferSettings, lambda settings, *_: SpecInfer(settings)),
    "throughput": _Entry(ThroughputSettings, Throughput, {"breadth": 0}),
}


def policy_names(*, has_model: bool = True) -> tuple[str, ...]:
    """The names of all policies, or of those that can do without a draft model, in alphabetical order."""
    return tuple(sorted(name for name, entry in _REGISTRY.items() if has_model or entry.without_model is not None))


def residual_policies(*, has_model: bool = True) -> tuple[str, ...]:
    """The names of those of these policies that support residual sampling."""
    return tuple(name for name in policy_names(has_model=has_model) if create_policy(name, {}).supports_residual)


def default_policy(name: str, *, residual: bool, has_model: bool) -> str:
    """The policy of requests that name none: `name`, or one that supports residual sampling if that is required."""
    return name if not residual or name in residual_policies(has_model=has_model) else _RESIDUAL_POLICIES[has_model]


def create_policy(
    name: str,
    settings: Mapping[str, Setting],
    costs: Costs | None = None,
    *,
    control: ControlSettings = DEFAULT_CONTROL,
    has_model: bool = True,
) -> Policy:
    """Create a policy for one session.

    Args:
        name: One of `policy_names`.
        settings: Settings by name, each a number, a word or a sequence of numbers. Settings that are not named keep
            their defaults. A single number is accepted for a list of one, and 0 or 1 for the words "0" and "1".
        costs: The costs and the track record that all sessions of the service share.
        control: The tuned constants of the policy; `costs` has its own.
        has_model: Whether the service has a draft model.

    Raises:
        InvalidArgumentError: The policy or a setting is unknown (the message lists the known ones), a value is out of
            range, or the policy needs a draft model and there is none.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        raise InvalidArgumentError(
            f"unknown policy {name!r}, expected one of {', '.join(policy_names(has_model=has_model))}"
        )
    if not has_model:
        if entry.without_model is None:
            usable = ", ".join(policy_names(has_model=False))
            raise InvalidArgumentError(
                f"policy {name} needs a draft model, and there is none; expected one of {usable}"
            )
        settings = {**entry.without_model, **settings}
    # settings that policies have in common come last
    known = {field.name: field for field in sorted(fields(entry.settings), key=lambda field: field.kw_only is True)}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise InvalidArgumentError(f"policy {name} has no setting {', '.join(unknown)}; its settings: {names}")
    checked = entry.settings(**{key: _typed(known[key], value) for key, value in settings.items()})
    costs = costs or Costs(control=control)
    policy = entry.create(checked, costs, control)
    if getattr(checked, "calibrated", False):
        policy = Calibrated(policy, CalibratedValue(costs.track_record, control))
    if isinstance(checked, DrawingSettings):
        policy.drawing = checked.drawing
    if not has_model and policy.breadth:
        raise InvalidArgumentError(f"breadth is {policy.breadth}, expected 0, because there is no draft model")
    return policy


def _typed(setting: Field[Any], value: Setting) -> Any:
    """Convert a value to the setting's type: a number, a switch, a word, or a tuple of numbers."""
    name, kind = setting.name, str(setting.type)
    if isinstance(setting.default, StrEnum):
        return _word(name, value, type(setting.default))
    if isinstance(value, str):
        raise InvalidArgumentError(f"{name} is {value!r:.40}, expected a number")
    if not kind.startswith("tuple["):
        if isinstance(value, Sequence):
            raise InvalidArgumentError(f"{name} is a list, expected one number")
        return _number(name, value, kind)
    values = (value,) if isinstance(value, (int, float)) else value
    if len(values) > MAX_NUMBERS:  # checked before the numbers are converted
        check_length(name, values)
    element = kind.removeprefix("tuple[").removesuffix(", ...]")
    return tuple(_number(f"{name}[{index}]", each, element) for index, each in enumerate(values))


def _word(name: str, value: Setting, words: type[StrEnum]) -> StrEnum:
    """Convert a value to one of the words; a number stands for the word with its spelling."""
    word = f"{value:g}" if isinstance(value, (int, float)) else value
    if not isinstance(word, str) or word not in list(words):
        given = f"{word!r:.40}" if isinstance(word, str) else "a list"
        raise InvalidArgumentError(f"{name} is {given}, expected one of {', '.join(words)}")
    return words(word)


def _number(name: str, value: float, kind: str) -> float:
    """Convert a number, which the wire carries as a double: integers must be whole, and switches 0 or 1."""
    if kind == "float":
        return value
    if kind == "bool":
        if value not in (0.0, 1.0):
            raise InvalidArgumentError(f"{name} is {value:g}, expected 0 (off) or 1 (on)")
        return bool(value)
    if not float(value).is_integer():
        raise InvalidArgumentError(f"{name} is {value:g}, expected a whole number")
    return int(value)
