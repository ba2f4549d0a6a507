"""What both services hold to."""

MAX_TREE_NODES = 256  # of the largest tree that any policy sends
