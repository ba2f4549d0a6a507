"""The `dynatree` command."""

import os

# gRPC's core reads this once, when it is first imported, and otherwise writes lines of its own to standard error beside
# the one that the command prints. Whoever sets it keeps what they set.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
