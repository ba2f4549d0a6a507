"""`dynatree trace`: draw the rounds of a trace as one HTML page that needs nothing else."""

from dynatree.cli.trace.draw import EXAMPLE, add_arguments, run

__all__ = ["EXAMPLE", "add_arguments", "run"]
