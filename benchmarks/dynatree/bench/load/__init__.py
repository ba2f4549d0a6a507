"""`dynatree bench load`: measure many concurrent clients."""
