"""One part of a session on one GPU: `benchmarks/gpu/session.sh PART [OUTPUT_FOLDER]` runs it.

A part is a list of steps. Each is kept in one JSON file when it ends, and is not run again. No step is begun that
the part's time does not hold. The steps run in a process of their own: if one takes it down, as a fault on the device
does, the next process goes on after it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import interpreted
import sanitized
from keeping import (
    FAILED,
    NOT_MEASURED,
    OF_SERVICES,
    Measured,
    NotMeasuredError,
    Step,
    Store,
    absent,
    commit,
    ending,
    surroundings,
    to_record,
    version_of,
)

if TYPE_CHECKING:
    from pair import Models, Sizes

PART_SECONDS = 480.0  # in which steps begin: a command has 600 s, and the last process may have to load the pair again
OVERTIME = 60.0  # that the last step may take longer
LOADING = 150.0  # seconds: growing and loading the pair, capturing its graphs
BROKEN = 70  # the exit status of a process whose device has failed
NEEDED = ("torch", "transformers", "safetensors", "numpy", "grpc", "google.protobuf")
LEAST = {"grpcio": (1, 76), "protobuf": (6, 31)}  # that the code of protos/ runs with
PRINTED = ("torch", "triton", "transformers", "numpy", *LEAST, "grpcio-health-checking", "grpcio-reflection")
WITHOUT = {
    NEEDED: "the models cannot be run",
    ("triton",): "no kernel of the project runs, and no graph is captured",
    OF_SERVICES: "no services run over sockets",
}
POLICIES = (
    *("throughput", "linear", "dynatree", "dyspec", "fixed", "sequoia", "opt-tree", "specinfer"),
    *("dyspec-threshold", "hybrid", "ngram"),
)
FIRST_POLICIES = 4  # whose equality is shown before sessions are put together


def _equalities(policies: Sequence[str]) -> Iterator[Step]:
    for policy in policies:
        for mode in ("greedy", "sampled"):
            yield Step(f"3-{policy}-{mode}", "equality:compared", 15, needs=(f"3-plain-{mode}",), models=True)


PARTS: dict[int, tuple[Step, ...]] = {
    1: (
        Step("1-linear-bits", "bits:linear_bits", 30),
        Step("1-attention-bits", "bits:attention_bits", 100),
        Step("1-rows", "costs:rows", 60, models=True),
        Step("1-plain", "speed:policy", 15, models=True),
        Step("1-default", "speed:policy", 15, models=True),
        Step("1-attention-float64", "bits:attention_in_float64", 40),
        Step("1-noise", "bits:noise", 20),
        Step("1-choices", "bits:choices", 20),
        Step("1-sanitizer", "sanitized:sanitizer", 120),
    ),
    2: (
        Step("2-linear", "speed:policy", 15, models=True),
        Step("2-dynatree", "speed:policy", 15, models=True),
        Step("2-dyspec", "speed:policy", 15, models=True),
        Step("2-transformers", "speed:transformers", 60, models=True),
        Step("2-transformers-assisted", "speed:transformers", 60, models=True),
        Step("2-compiled", "costs:compiled", 100, models=True),
        Step("2-trace", "speed:trace", 30, models=True),  # last: a profiler may slow down what follows
    ),
    3: (
        Step("3-plain-greedy", "equality:compared", 20, models=True),
        Step("3-plain-sampled", "equality:compared", 20, models=True),
        *_equalities(POLICIES[:FIRST_POLICIES]),
        *(
            Step(f"3-sessions-{count}", "equality:together", 20, needs=("3-plain-greedy",), models=True)
            for count in (1, 4, 16, 32)
        ),
        *_equalities(POLICIES[FIRST_POLICIES:]),
        Step("3-offloaded", "equality:offloaded", 60),
        Step("3-services", "equality:services", 120, needs=("3-plain-greedy",)),
    ),
}


@dataclass
class Context:
    """What a step works with."""

    step: Step
    device: str  # "cuda" or "cpu"
    device_name: str  # the card's, or "a CPU"
    sizes: Sizes
    models: Models
    store: Store

    @property
    def on_gpu(self) -> bool:
        """Whether there is one."""
        return self.device == "cuda"

    @cached_property
    def policy(self) -> str:
        """The policy that the step's name names."""
        return self.step.name.split("-", 1)[1].rsplit("-", 1)[0]


def expected(step: Step, loaded: bool) -> float:
    """Seconds that a step takes at most, and with it what must be loaded for it."""
    return step.seconds + (LOADING if step.models and not loaded else 0.0)


def begins(step: Step, loaded: bool, left: float) -> bool:
    """Whether a step can still begin in the seconds that are left."""
    return expected(step, loaded) <= left


def work(part: int, store: Store, until: float, since: float, models_folder: Path) -> int:
    """Run what is left of a part and fits into its time, in this process; an exit status."""
    # Neither is imported by whoever only asks what is left.
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, and when a kernel runs
        if not store.tiny:
            print("There is no GPU. DYNATREE_TINY=1 runs tiny shapes on a CPU.")
            return 1
        torch.set_num_threads(1)
        interpreted.patch_once()
    from pair import FULL, TINY, Models

    sizes, device = TINY if store.tiny else FULL, "cuda" if on_gpu else "cpu"
    around = surroundings(device)
    print(", ".join(f"{name} {value}" for name, value in around.items() if value is not None))
    if sizes.fixed_rows is None and (rows := store.measured("1-rows")):
        sizes = replace(sizes, fixed_rows=(rows["chosen"]["rows"],))  # bits depend on it
    models = Models(sizes, device, models_folder, sizes.sessions[part])
    for step in PARTS[part]:
        if store.settled(step.name, since) or not all(map(store.read, step.needs)):
            continue
        left = until - time.time()
        if not begins(step, models.loaded, left):
            print(f"{step.name}: not begun, {left:.0f} s are left")
            continue
        limit = min(4 * expected(step, models.loaded), left) + OVERTIME
        context = Context(step, device, around["device"], sizes, models, store)
        if not run(context, around, limit) and not works(device):
            return BROKEN
    return 0


def run(context: Context, around: dict[str, Any], limit: float) -> bool:
    """Run one step and keep what it finds; whether it did not fail. One that hangs ends the process."""
    step, store = context.step, context.store
    print(f"\n== {step.name}")
    began = time.time()
    store.write(step.name, {"status": FAILED, "reason": "its process ended, or hung and was ended", "around": around})
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    try:
        module, function = step.work.split(":")
        measured: Measured = getattr(importlib.import_module(module), function)(context)
        record = to_record(measured)
    except NotMeasuredError as error:
        record = {"status": NOT_MEASURED, "reason": str(error)}
    except (Exception, SystemExit) as error:  # a baseline that cannot be loaded ends the program
        traceback.print_exc()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        record = {"status": FAILED, "reason": reason, "traceback": traceback.format_exc()[-4000:]}
    finally:
        faulthandler.cancel_dump_traceback_later()
    store.write(step.name, {**record, "seconds": round(time.time() - began, 2), "around": around})
    for line in record.get("says", ()):
        print(line)
    for bound in record.get("bounds", ()):
        print(bound["says"])
    if "reason" in record:
        print(f"{record['status']}: {record['reason']}")
    return record["status"] != FAILED


def works(device: str) -> bool:
    """Whether the device still computes; after a fault no later call on it succeeds."""
    import torch

    try:
        return bool(torch.ones(1, device=device).item())
    except RuntimeError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part.

    Returns:
        0 if every step was measured or cannot be measured here, 1 if a step failed, 3 if time ran out before the last.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", type=int, choices=PARTS)
    parser.add_argument("output", type=Path, help="folder of session.json")
    parser.add_argument("--from", dest="bundle", type=Path, metavar="FILE", help="session.json of an earlier machine")
    parser.add_argument("--tiny", action="store_true", default=os.environ.get("DYNATREE_TINY") == "1")
    parser.add_argument("--seconds", type=float, help="seconds within which steps may begin (default: the part's)")
    parser.add_argument("--worker", type=float, nargs=2, metavar=("UNTIL", "SINCE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    store = Store(options.output, tiny=options.tiny)
    if options.bundle:
        store.go_on_from(options.bundle)
    kind = "tiny" if options.tiny else "full"
    models_folder = Path(os.environ.get("DYNATREE_MODELS") or Path(tempfile.gettempdir()) / "dynatree-grown") / kind
    if options.worker:
        until, since = options.worker
        return work(options.part, store, until, since, models_folder)
    return drive(options, store)


def drive(options: argparse.Namespace, store: Store) -> int:
    """Have processes run the part, one after the other until one ends by itself."""
    since = time.time()
    until = since + (options.seconds or PART_SECONDS)
    names = [step.name for step in PARTS[options.part]]
    print(f"part {options.part}: {len(names)} steps, kept in {store.folder}")
    print(", ".join(f"{name} {version_of(name) or 'missing'}" for name in PRINTED))
    for line in missing():
        print(line)
    given = [str(options.part), str(store.folder), *(["--tiny"] if options.tiny else [])]
    command = [sys.executable, sys.argv[0], *given, "--worker", str(until), str(since)]
    status = 0
    while left := [name for name in names if not store.settled(name, since)]:
        status = subprocess.run(command).returncode
        if status == 0 or left == [name for name in names if not store.settled(name, since)]:
            break
        print(f"the process ended with status {status}; another goes on after the step that it was at")
    print(f"\n== part {options.part}: {time.time() - since:.0f} s")
    became, lines = ending({name: store.read(name) for name in names})
    for line in lines:
        print(line)
    return 1 if status else became


def missing() -> list[str]:
    """Return a line for each missing dependency, with the steps that are skipped without it."""
    lines = []
    for name, least in LEAST.items():
        found = version_of(name)
        if found and tuple(int(part) for part in found.split(".")[:2]) < least:
            lines.append(f"too old: {name} {found}, expected at least {'.'.join(map(str, least))}; no services run")
    lines += [f"missing: {names}; {then}" for wanted, then in WITHOUT.items() if (names := absent(wanted))]
    if sanitized.tool() is None:
        lines.append(f"missing: {sanitized.TOOL}; accesses to memory are not checked")
    if commit() is None:
        lines.append("missing: the commit; expected it in DYNATREE_COMMIT")
    return lines or ["nothing is missing"]


if __name__ == "__main__":
    sys.exit(main())
