"""Fuzz the loading of GGUF files: `python -m tests.campaigns.fuzz_gguf [--count N] [--first N] [--seed N]`.

Every file is a harmed copy of a small valid one (tests/support/gguf_mutants.py). It is either refused in one line that
names it, or served with the weights that transformers reads from it. Files are opened in a process of their own, so
that a crash, a hang and the memory that a file takes are seen. The campaign prints what went wrong with the file's
number, by which `--first N --count 1` repeats it. `--reasons` counts the reasons of refusals.
An interrupt ends it early.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from dynatree.common.errors import StartupError
from dynatree.engine import loading
from dynatree.engine.examined import examined
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.loading import load_engine
from dynatree.engine.model.files import check_model
from dynatree.engine.model.gguf_config import config_of, has_own_config
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import load_tokenizer
from dynatree.engine.quantized.gguf_file import GGUFFile
from dynatree.engine.settings import ModelSettings
from tests.support.forked import context
from tests.support.gguf_mutants import Parts, families, mutant

SECONDS = 20  # time limit of a file; a valid one takes a fraction of a second
MOST_BYTES = 256 << 20  # of memory that opening a file takes; a valid one takes a few MiB
ADDRESSES = 16 << 30  # bytes of addresses beyond those of the libraries; protects the machine
WHOLE = 10  # every tenth file is loaded with all probes, which take ten times as long as reading it
SERVED, REFUSED = "served", "refused"
NAME = "mutant.gguf"
_ERRORS = "errors"


@dataclass(frozen=True)
class Outcome:
    """The end of one file: served, refused by a message, or a fault with its description.

    Attributes:
        number: Number of the file.
        kind: Kind of its harm.
        end: `SERVED`, `REFUSED`, or the fault.
        told: Message of the refusal, or the fault's description.
    """

    number: int
    kind: str
    end: str
    told: str = ""


def outcomes(first: int, count: int, seed: int = 0) -> Iterator[Outcome]:
    """Open files by their numbers, in a process that is replaced when it ends."""
    with tempfile.TemporaryDirectory(prefix="fuzz-gguf-") as name:
        folder, number = Path(name), first
        valid, forking = families(folder), context()
        while number < first + count:
            reports, writing = forking.Pipe(duplex=False)
            process = forking.Process(target=_work, args=(folder, valid, range(number, first + count), seed, writing))
            process.start()
            writing.close()
            with suppress(EOFError):
                while True:
                    yield reports.recv()
                    number += 1
            process.join()
            if number < first + count:
                told = f"status {process.exitcode}: {(folder / _ERRORS).read_text()[-2000:]}"
                yield Outcome(number, mutant(valid, number, seed)[0], "crash or hang", told)
                number += 1


def _work(folder: Path, valid: list[Parts], numbers: range, seed: int, reports: Connection) -> None:
    """Open files, and report each one's outcome."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
    path = folder / NAME
    with (folder / _ERRORS).open("w") as errors:
        for stream in (1, 2):
            os.dup2(errors.fileno(), stream)
        for number in numbers:
            kind, raw = mutant(valid, number, seed)
            path.write_bytes(raw)
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=errors)
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident size
            end, told = opened(path, whole=number % WHOLE == 0)
            taken = _memory("VmHWM") - before
            faulthandler.cancel_dump_traceback_later()
            if taken > MOST_BYTES:
                end, told = "memory", f"{taken >> 20} MiB, {end}: {told}"
            reports.send(Outcome(number, kind, end, told))


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def opened(path: Path, whole: bool) -> tuple[str, str]:
    """Open a file as `dynatree verify` does, with its probes if `whole`; return how it ended, and a message."""
    settings = ModelSettings(str(path), sessions=1, max_context=64)
    try:
        check_model(settings.model)
        if whole:
            load_engine(settings)
        else:
            found = examined(settings, probes=False)
            load_tokenizer(settings.model)
            model, *_ = loading._load_model(settings, path.name, found.config, None)
            check_weights(path.name, model.named_parameters())
    except StartupError as error:
        message = str(error)
        return (REFUSED if message.count("\n") == 0 and path.name in message else "unclear refusal"), message
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        return "exception", "".join(traceback.format_exception(error))
    try:
        own = {"config": config_of(str(path))} if has_own_config(str(path)) else {}
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **own)
    except Exception as error:
        return "served but unreadable for transformers", "".join(traceback.format_exception(error))
    theirs = read.state_dict()
    model = skeleton(read.config, torch.float32)
    GGUFFile(path, model, native=False).fill(model)
    ours = model.state_dict()
    if ours.keys() != theirs.keys():
        return "served with other tensors", str(sorted(ours.keys() ^ theirs.keys()))
    other = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    return ("served with other weights", str(other)) if other else (SERVED, "")


def main() -> int:
    """Run the campaign; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20000, help="number of files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasons", action="store_true", help="count the reasons of refusals")
    options = parser.parse_args()
    ends: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    faults = 0
    with suppress(KeyboardInterrupt):  # ends the campaign early
        for outcome in outcomes(options.first, options.count, options.seed):
            ends[outcome.kind, outcome.end] += 1
            reasons[re.sub(r"\d+", "N", outcome.told)] += outcome.end == REFUSED
            if outcome.end not in (SERVED, REFUSED):
                faults += 1
                print(f"{outcome.number} ({outcome.kind}): {outcome.end}\n{outcome.told}", flush=True)
    for (kind, end), count in sorted(ends.items()):
        print(f"{kind}: {count} {end}")
    if options.reasons:
        for reason, count in reasons.most_common():
            print(f"{count} {reason}")
    print(f"{sum(ends.values())} files, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
