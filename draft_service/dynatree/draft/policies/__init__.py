"""How a tree grows: one small class for each policy, and their registry."""

from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.registry import DEFAULT_POLICY, create_policy, policy_names

__all__ = ["DEFAULT_POLICY", "Policy", "create_policy", "policy_names"]
