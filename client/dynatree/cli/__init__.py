"""The `dynatree` command."""

import os
import sys

from dynatree.cli import interrupts

# gRPC's core reads this variable once, at its first import. Without it, gRPC writes its own lines to standard error
# next to the command's error message. A value that the user has set is kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") == "dynatree":  # run as the program
    interrupts.end_at_once()
