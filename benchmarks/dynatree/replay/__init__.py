"""`dynatree bench record` and `bench replay`: record rounds once, then run policies on them without a model."""
