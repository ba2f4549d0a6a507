"""Do the tests detect wrong code? `python -m tests.campaigns.mutants [--count N] [--jobs N] [MODULE ...]`.

The campaign changes one operator, number or constant of a module on which exactness depends, and runs the module's
tests. A mutant that passes them survives, and is printed with its difference. With `--all`, survivors also run every
test of `make test`. It needs cosmic-ray, which is not among the project's dependencies: `pip install cosmic-ray`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tests.support.paths import ROOT

ROOMS = ("protos", "common", "verify_service", "draft_service", "client", "benchmarks")
TESTS = {
    "common/dynatree/common/tree.py": "tree wire accept tree_policies bad_input rounds",
    "common/dynatree/common/sampling.py": (
        "sampling options bad_options distribution sampled_equality generation_defaults bad_input"
    ),
    "verify_service/dynatree/verify/accept.py": "accept scheduler rounds distribution",
    "verify_service/dynatree/verify/residual.py": "residual distribution sampled_equality",
    "verify_service/dynatree/verify/log_probs.py": "log_probs options",
    "verify_service/dynatree/verify/session.py": (
        "session scheduler rounds resume bad_input generation_defaults ahead log_probs"
    ),
    "draft_service/dynatree/draft/text/stop_strings.py": "text generation_defaults resume",
    "draft_service/dynatree/draft/policies/growing_tree.py": (
        "tree_policies policies shared_growth throughput distribution"
    ),
    "draft_service/dynatree/draft/control/history.py": "tree_policies policies options",
}
# Modules imported once, in the process from which each test run is forked; none is this project's own.
PRELOADED = ("__main__", "pytest", "torch", "transformers", "grpc")
FORKS = multiprocessing.get_context("forkserver")
TIMEOUT = 300.0  # seconds; a mutant that takes longer is killed
ALL_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    operator: str
    code: str

    @property
    def difference(self) -> str:
        """The change, as a unified diff."""
        before = (ROOT / self.module).read_text().splitlines()
        lines = list(difflib.unified_diff(before, self.code.splitlines(), lineterm="", n=0))[2:]
        return "\n".join(lines)


def meaning(code: str) -> str:
    """The syntax tree of code without annotations, which this project never evaluates."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module whose code differs in more than annotations; duplicates are left out."""
    code = (ROOT / module).read_text()
    seen, found = {meaning(code)}, []
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        count = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(get_ast(code)))
        for occurrence in range(count):
            changed = mutate_code(code, operator, occurrence)
            with suppress(SyntaxError):  # some mutants are invalid Python: 2.0**not 60
                if changed is not None and (meant := meaning(changed)) not in seen:
                    seen.add(meant)
                    found.append(Mutant(module, name.removeprefix("core/"), changed))
    return found


class Copies:
    """Copies of the project; each tests one mutant at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: queue.Queue[Path] = queue.Queue()
        ignored = shutil.ignore_patterns(".venv*", "build", "dist", "__pycache__", ".*_cache", "site")
        for number in range(count):
            self._free.put(Path(shutil.copytree(ROOT, folder / str(number), ignore=ignored, symlinks=True)))

    def passes(self, mutant: Mutant | None, tests: Sequence[str], timeout: float) -> bool:
        """Whether the tests pass with the mutant, or with the original code if `mutant` is None."""
        copy = self._free.get()
        try:
            if mutant:
                (copy / mutant.module).write_text(mutant.code)
            testing = FORKS.Process(target=run_tests, args=(copy, tests))
            testing.start()
            testing.join(timeout)
            with suppress(ProcessLookupError):
                os.killpg(testing.pid or 0, signal.SIGKILL)  # with its child processes
            testing.join()
            return testing.exitcode == 0
        finally:
            if mutant:
                shutil.copy(ROOT / mutant.module, copy / mutant.module)
            self._free.put(copy)


def run_tests(copy: Path, tests: Sequence[str]) -> None:
    """Run the tests of a copy until one fails, and exit this process."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.chdir(copy)
    rooms = [str(copy / room) for room in ROOMS]
    sys.path[:0] = rooms
    os.environ |= {"PYTHONPATH": os.pathsep.join(rooms), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True  # stale bytecode would hide a mutant of equal size within a second
    preloaded = "ignore::pytest.PytestAssertRewriteWarning"
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", preloaded, "-m", "not long", *tests]))


def tests_of(module: str) -> list[str]:
    """The files with the tests of a module."""
    found = [[str(path) for path in Path("tests").rglob(f"test_{name}.py")] for name in TESTS[module].split()]
    return [path for [path] in found]


def survivors(copies: Copies, jobs: int, mutants: Sequence[Mutant], *, everything: bool) -> Iterator[Mutant]:
    """The mutants that pass the tests."""

    def survives(mutant: Mutant) -> bool:
        if not copies.passes(mutant, tests_of(mutant.module), TIMEOUT):
            return False
        return not everything or copies.passes(mutant, ["tests"], ALL_TIMEOUT)

    with ThreadPoolExecutor(jobs) as pool:
        for mutant, survived in zip(mutants, pool.map(survives, mutants), strict=True):
            if survived:
                yield mutant


def main() -> int:
    """Run the campaign and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="part of the name of a module (default: all)")
    parser.add_argument("--count", type=int, default=25, metavar="N", help="mutants of each module (default: 25)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of mutants (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants to test at a time (default: 2)")
    parser.add_argument("--all", action="store_true", help="run every test of `make test` on survivors")
    options = parser.parse_args()
    FORKS.set_forkserver_preload(list(PRELOADED))
    chosen = [module for module in TESTS if not options.modules or any(part in module for part in options.modules)]
    tested: Counter[str] = Counter()
    lived: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder), options.jobs)
        for module in chosen:
            if not copies.passes(None, tests_of(module), TIMEOUT):
                raise SystemExit(f"{module}: its tests fail without a mutant")
            every = mutants_of(module)
            some = random.Random(options.seed).sample(every, min(options.count, len(every)))
            tested[module] = len(some)
            for mutant in survivors(copies, options.jobs, some, everything=options.all):
                lived[module] += 1
                print(f"{module}: {mutant.operator} survives\n{mutant.difference}", flush=True)
            print(f"{module}: {tested[module] - lived[module]} of {tested[module]} ({len(every)}) killed", flush=True)
    killed = tested.total() - lived.total()
    print(f"{killed} of {tested.total()} mutants killed ({killed / tested.total():.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
