"""`dynatree bench record` and `bench replay`: recorded rounds, on which policies run without a model."""
