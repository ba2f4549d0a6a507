"""`dynatree trace`: draws the rounds of a trace as one self-contained HTML page."""

from dynatree.cli.trace.draw import EXAMPLE, add_arguments, run

__all__ = ["EXAMPLE", "add_arguments", "run"]
