"""Growth of trees: one class for each policy, the components that policies share, and their registry."""

from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.policies.registry import (
    DEFAULT_POLICY,
    Setting,
    create_policy,
    default_policy,
    policy_names,
    residual_policies,
)

__all__ = [
    "DEFAULT_POLICY",
    "Outcome",
    "Policy",
    "Setting",
    "create_policy",
    "default_policy",
    "policy_names",
    "residual_policies",
]
