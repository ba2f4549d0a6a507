"""How a tree grows: one small class for each policy, and their registry."""

from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.policies.registry import (
    DEFAULT_POLICY,
    DRAWING_POLICY,
    create_policy,
    policies_that_take_draws,
    policy_names,
)

__all__ = [
    "DEFAULT_POLICY",
    "DRAWING_POLICY",
    "Outcome",
    "Policy",
    "create_policy",
    "policies_that_take_draws",
    "policy_names",
]
