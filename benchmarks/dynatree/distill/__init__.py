"""`dynatree distill`: makes a draft model for a target that has none."""
