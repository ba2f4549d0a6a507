"""The tables of a report, made of its records alone.

Unless a title says otherwise a figure is the mean over runs, that is over prompts and repetitions, of the figure of the
same name in `dynatree.client.Statistics`; and the rate of a run is its new tokens / wall-clock seconds, the prompt's
forward included.
"""

from dynatree.bench.figures import unequal
from dynatree.bench.tables.printing import print_report, remarks, tables

__all__ = ["print_report", "remarks", "tables", "unequal"]
