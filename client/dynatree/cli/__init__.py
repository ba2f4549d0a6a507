"""The `dynatree` command."""

import os
import sys

from dynatree.cli import interrupts

# gRPC's core reads this once, when it is first imported, and otherwise writes lines of its own to standard error beside
# the one that the command prints. Whoever sets it keeps what they set.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") == "dynatree":  # it is the program
    interrupts.end_at_once()
