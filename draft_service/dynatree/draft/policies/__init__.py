"""How a tree grows: one class for each policy, the components they are made of, and their registry."""

from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.policies.registry import (
    DEFAULT_POLICY,
    RESIDUAL_POLICY,
    create_policy,
    policy_names,
    residual_policies,
)

__all__ = [
    "DEFAULT_POLICY",
    "RESIDUAL_POLICY",
    "Outcome",
    "Policy",
    "create_policy",
    "policy_names",
    "residual_policies",
]
