"""Do the campaigns notice a missing limit? `python -m tests.campaigns.limit_mutants [--jobs N] [LIMIT ...]`.

The campaign removes each limit of the table in docs/guides/security.md in a copy of the project: the limit becomes a
hundred times as large, also where a test sets a limit itself. It then sends the copy the hostile traffic that the limit
is for, or runs the limit's tests. It prints the limits whose removal goes unnoticed. Before that, it checks that an
unchanged copy passes.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.paths import ROOT

ROOMS = ("protos", "common", "verify_service", "draft_service", "client", "benchmarks")
TABLE = ROOT / "docs" / "guides" / "security.md"
FACTOR = 100
SECONDS = 8  # duration of hostile traffic
TIMEOUT = 300.0  # time limit of one campaign
# For each limit, how its removal is noticed: a site and parts of the names of kinds of hostile traffic, or tests.
_TRANSPORT, _GATEWAY = "tests/serving/test_transport.py", "tests/gateway/test_gateway_limits.py"
_FILES = f"{_GATEWAY}::test_connections_leave_files_to_the_gateway_and_requests_leave_connections_to_health"
_BODIES, _REFUSALS = "tests/gateway/test_gateway_bodies.py", "tests/gateway/test_gateway_refusals.py"
_OPTIONS, _PARSING = "tests/cli/test_bad_options.py", "tests/cli/test_parsing.py"
_REQUESTS = "tests/resilience/test_bad_input.py::test_a_request_that_cannot_be_served"
NOTICED: dict[str, tuple[str, str] | str] = {
    "HANDSHAKE_SECONDS": ("tcp", "silent connections"),
    "TLS_SECONDS": ("tls", "silent connections"),
    "FIRST_MESSAGE_SECONDS": ("tcp", "without a message"),
    "MAX_MESSAGE_BYTES": ("tcp", "huge messages"),
    "MAX_METADATA_BYTES": ("tcp", "huge messages"),
    **dict.fromkeys(("SCRAPE_SECONDS", "MAX_SCRAPES"), ("tcp", "silent connections,scrapes")),  # tests set both
    "HEAD_SECONDS": ("tcp", "dripping heads"),
    "BODY_SECONDS": ("tcp", "dripping bodies"),
    "MAX_BODY_BYTES": ("tcp", "huge bodies"),
    "MAX_PROMPT_LOG_PROBS": "tests/common/test_log_probs.py",
    **dict.fromkeys(("MAX_VALUES", "MAX_STRINGS", "MAX_CONTAINERS"), f"{_BODIES}::test_counts_have_bounds"),
    **dict.fromkeys(("MAX_OPENINGS", "MAX_STANDARD_CALLS", "MAX_CONNECTIONS", "IDLE_CONNECTION_SECONDS"), _TRANSPORT),
    **dict.fromkeys(("MAX_STREAMS", "PING_SECONDS", "FREE_CALLS", "OWN_FILES", "LONGEST_DETAILS"), _TRANSPORT),
    **dict.fromkeys(("REST_SECONDS", "TAKING_SECONDS", "CLOSING_SECONDS", "KEEP_ALIVE_SECONDS"), _GATEWAY),
    **dict.fromkeys(("MAX_AHEAD_BYTES", "FREE_CHUNKS", "MAX_HELD_BYTES", "MAX_KNOWN"), _GATEWAY),
    **dict.fromkeys(("TAKING_RATE", "BYTES_A_CHUNK", "BODY_RATE"), _GATEWAY),
    **dict.fromkeys(("MAX_HTTP_CONNECTIONS", "SPARE_FILES", "KEPT_FOR_HEALTH"), _FILES),
    **dict.fromkeys(("LONGEST_MESSAGE", "LONGEST_PARAM"), f"{_REFUSALS}::test_what_an_error_quotes_is_cut"),
    "LONGEST_PRINCIPAL": f"{_BODIES}::test_the_name_of_a_user_is_hashed_where_it_is_longer_than_a_principal",
    **dict.fromkeys(("MAX_PROMPTS", "MAX_MESSAGES", "MAX_PARTS"), f"{_BODIES}::test_lists_have_a_longest"),
    "MAX_FIELDS": f"{_BODIES}::test_an_object_with_too_many_fields_is_one_error",
    "MAX_WAITING_BYTES": "tests/draft/test_tokenizer_thread.py",
    **dict.fromkeys(("MAX_SESSIONS", "MAX_QUEUED", "MAX_TREE_NODES", "MOST_TREE_NODES", "MAX_FIXED_ROWS"), _PARSING),
    "MAX_PLACES": "tests/draft/test_ngrams.py",
    "MAX_PRINCIPAL_LENGTH": "tests/serving/test_token_files.py",
    "MAX_COMPLETIONS": "tests/cli/test_options.py::test_one_is_the_least_and_64_the_most",
    **dict.fromkeys(("MAX_STOP_STRINGS", "MAX_STOP_LENGTH", "MAX_STOP_TOKENS"), _REQUESTS),
    **dict.fromkeys(("MAX_TEMPERATURE", "MAX_PENALTY", "MAX_COUNT_PENALTY", "MAX_BIASES", "MAX_BIAS"), _OPTIONS),
    **dict.fromkeys(("MAX_NUMBERS", "MAX_RANKS", "MAX_CANDIDATES", "MAX_DRAWS"), _OPTIONS),
    "MAX_TOP_LOG_PROBS": "tests/common/test_log_probs.py::test_more_than_20_are_refused_by_both_services",
    "MOST_FAULTS": "tests/engine/test_not_finite.py::test_a_device_is_tried_after_a_few_faults_with_no_commit_between",
    "MOST_HISTORY_TOKENS": "tests/cli/test_imports.py",
    "MAX_PRINCIPALS": "tests/draft/test_history.py",
    **dict.fromkeys(
        ("MOST_TEXTS", "MOST_TOKENS"),
        "tests/draft/test_reload.py::test_recent_texts_are_the_ends_of_the_last_completions",
    ),
    "MOST_WAITING": "tests/draft/test_recording.py",
    **dict.fromkeys(
        ("MAX_TOOLS", "MAX_CALLS", "MAX_CHOICES"), "tests/gateway/test_calls.py::test_the_limits_of_the_table_hold"
    ),
    "MAX_GRAMMARS": "tests/engine/test_grammar.py::test_the_last_64_grammars_are_kept",
    "MAX_GRAMMAR_BYTES": "tests/engine/test_grammar.py::test_a_grammar_has_at_most_131072_bytes",
}

# Limits from below: a smaller value is no limit.
FLOORS = {
    **dict.fromkeys(("OWN_FILES", "PING_SECONDS", "SPARE_FILES", "KEPT_FOR_HEALTH"), "0"),
    **dict.fromkeys(("TAKING_RATE", "BODY_RATE", "BYTES_A_CHUNK"), "1"),
}
# Not removed: without them the service serves as well, and holds no more for strangers.
KEPT = {
    "CONNECTION_SECONDS": "an older connection is made anew, so that load spreads",
    "KEEPALIVE_SECONDS": "a peer that vanished is found later, by --idle-timeout",
    "PONG_SECONDS": "likewise",
    "IDLE_SECONDS": "tests set --idle-timeout",
    "RESUME_SECONDS": "tests set --resume-timeout",
    "HISTORY_TOKENS": "tests set --history-tokens",
    "RECORD_BYTES": "tests set --record-bytes",
    "MAX_HISTORIES": "of settings that the service's own policies have",
}


def limits() -> list[str]:
    """The names of constants and options in the table of limits."""
    section = TABLE.read_text().partition("## Limits")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    place = next(number for number, title in enumerate(rows[0]) if title.strip() == "set by")
    return [name for row in rows[2:] for name in re.findall(r"`([A-Za-z_]+)`", row[place])]


def remove(copy: Path, limit: str) -> None:
    """Make a limit in a copy so large that it has no effect."""
    without = FLOORS.get(limit, rf"{FACTOR} * (\g<2>)")
    found = _replace(copy, rf"^(\s*{limit}(?:: [^=\n]+)? = )([^#\n]+?)( *#.*)?$", rf"\g<1>{without}\g<3>")
    if not found:
        raise SystemExit(f"{limit} is no constant")
    gateway = copy / "client" / "dynatree" / "gateway"
    field = re.search(rf"^    (\w+): \w+ = {limit}$", (gateway / "limits.py").read_text(), re.MULTILINE)
    if field and limit not in FLOORS:
        _replace(gateway, rf"(?<![\w{{.])((?:self\._|settings\.)?limits\.{field[1]})\b(?!:g)", rf"({FACTOR} * \g<1>)")
    elif field:
        _replace(gateway, rf"(?<![\w{{.])((?:self\._)?limits\.{field[1]})\b(?![:}}])", FLOORS[limit])


def _replace(folder: Path, pattern: str, by: str) -> int:
    """Replace what matches in every file of Python; how often."""
    found = 0
    for path in folder.rglob("*.py"):
        if "tests" not in path.parts:
            code, count = re.subn(pattern, by, path.read_text(), flags=re.MULTILINE)
            if count:
                path.write_text(code)
                found += count
    return found


def notice(copy: Path, by: tuple[str, str] | str) -> tuple[bool, str]:
    """Whether a copy fails, and its first failure message."""
    if isinstance(by, str):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *by.split()]
    else:
        site, kinds = by
        minutes = str(SECONDS / 60)
        campaign = [sys.executable, "-m", "tests.campaigns.hostile"]
        command = [*campaign, "--sites", site, "--kinds", kinds, "--minutes", minutes]
    rooms = os.pathsep.join(str(copy / room) for room in ROOMS)
    environment = {**os.environ, "PYTHONPATH": rooms, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return True, "it hangs"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "E  "))]
    told = [line for line in lines if "times as fast as alone" not in line]  # speed may suffer from other work
    if done.returncode and not lines:
        raise SystemExit(f"{command} in {copy} failed itself:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return bool(told), told[0].removeprefix("FAILED: ") if told else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("limits", nargs="*", metavar="LIMIT", help="part of the name of a limit (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="limits to test at a time (default: 1)")
    options = parser.parse_args(arguments)
    chosen = [name for name in NOTICED if not options.limits or any(part in name for part in options.limits)]
    missing = [name for name in limits() if name not in NOTICED and name not in KEPT]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        ignored = shutil.ignore_patterns(".venv*", "build", "dist", "__pycache__", ".*_cache", "site")
        for number in range(options.jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=ignored, symlinks=True)))

        def tried(limit: str | None, by: tuple[str, str] | str) -> tuple[bool, str]:
            copy = copies.get()
            try:
                if limit:
                    remove(copy, limit)
                return notice(copy, by)
            finally:
                for room in ROOMS if limit else ():
                    shutil.copytree(ROOT / room, copy / room, ignore=ignored, symlinks=True, dirs_exist_ok=True)
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            ways = list(dict.fromkeys(NOTICED[name] for name in chosen))
            for way, (failed, why) in zip(ways, pool.map(lambda way: tried(None, way), ways), strict=True):
                if failed:
                    print(f"without a mutant {way} fails: {why}", flush=True)
                    unnoticed += 1
            results = pool.map(lambda name: tried(name, NOTICED[name]), chosen)
            for name, (failed, why) in zip(chosen, results, strict=True):
                by = NOTICED[name]
                way = by if isinstance(by, str) else f"{by[1]} ({by[0]})"
                print(f"| `{name}` | {way} | {why if failed else 'UNNOTICED'} |", flush=True)
                unnoticed += not failed
    for name, why in KEPT.items():
        print(f"| `{name}` | not removed | {why} |")
    for name in missing:
        print(f"{name} is in the table, and nothing is known that notices it")
    print(f"{len(chosen)} limits removed, {unnoticed} unnoticed; {len(missing)} not tried")
    return 1 if unnoticed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
