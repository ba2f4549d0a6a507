"""The kinds of measurement that run decoders."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Measurement:
    """A kind of measurement: its help, its temperatures, and the options that it takes besides the common ones."""

    help: str
    temperatures: tuple[float, ...]
    takes_policies: bool = False
    default_policies: str = "every policy of the server"
    takes_alternatives: bool = False  # whether policies, then required, may list alternative values of settings
    takes_baselines: bool = False
    takes_scheme: bool = True
    takes_repetitions: bool = True
    takes_loads: bool = False


MEASUREMENTS = {
    "compare": Measurement(
        "compare policies with plain decoding", (0.0, 0.7), takes_policies=True, takes_baselines=True
    ),
    "sweep": Measurement(
        "measure every combination of a policy's settings, to find the fastest for a pair and a machine",
        (0.0,),
        takes_policies=True,
        takes_alternatives=True,
        takes_baselines=True,
    ),
    "ablation": Measurement("measure the contribution of each component of DynaTree (its Tables 3 and 4)", (0.0,)),
    "coupling": Measurement(
        "measure tokens per round by sampling scheme: gumbel, independent, residual",
        (0.7, 1.0),
        takes_policies=True,
        default_policies="linear, fixed, dynatree and dyspec",
        takes_scheme=False,
    ),
    "load": Measurement(
        "measure throughput, waiting and shared passes under many clients or requests per second",
        (0.0,),
        takes_policies=True,
        default_policies="the server's default; autoregressive is always measured",
        takes_baselines=True,
        takes_scheme=False,
        takes_loads=True,
    ),
    "ranks": Measurement(
        "measure how often the target chooses the draft's first, second ... guess", (0.0,), takes_repetitions=False
    ),
}
