"""`dynatree bench load`: many clients at once."""
