"""Test every combination of faults in real processes: `python -m tests.campaigns.fault_matrix [--out FILE]` (an hour).

It prints a line for each combination that failed, and then the times that completions took to resume.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import quantiles

from dynatree.bench.environment import environment
from dynatree.client import DynaTreeError
from tests.support.faults import OPTIONS, QUEUED_SECONDS, Fault, combinations, complete, outcome, running_cluster


def run(some: Sequence[tuple[str, str, str, str]], verify_arguments: Sequence[str] = ()) -> Iterator[dict[str, object]]:
    """Test the combinations, and yield a record of each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(Path(folder), verify_arguments=verify_arguments) as cluster,
    ):
        expected, plain = {}, {}
        for name in OPTIONS:
            complete(cluster.client, name)  # warm up caches and costs
            started = time.monotonic()
            expected[name] = complete(cluster.client, name)
            plain[name] = time.monotonic() - started
        for who, where, how, name in some:
            fault = Fault(who, where, how, cluster)
            fault.arm()
            started, error = time.monotonic(), ""
            try:
                completion = complete(cluster.client, name)
                same = outcome(completion) == outcome(expected[name])
                if name == "residual":
                    same = len(completion.token_ids) == len(expected[name].token_ids)
            except DynaTreeError as failure:
                same, error = False, str(failure)
            seconds = time.monotonic() - started - (2 * QUEUED_SECONDS if where == "queue" else 0.0)
            cluster.restore()
            record = {
                **{"who": who, "where": where, "how": how, "options": name},
                **{"happened": fault.at is not None, "same": same, "error": error},
                "extra_seconds": round(seconds - plain[name], 3),
            }
            if not same or not record["happened"]:
                print(json.dumps(record), flush=True)
            yield record


def main() -> int:
    """Run the campaign and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results as JSON")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only every Nth combination")
    parser.add_argument("--only", choices=OPTIONS, metavar="NAME", help="run only the combinations with these options")
    options = parser.parse_args()
    some = [each for each in combinations() if options.only in (None, each[3])][:: options.every]
    queued = [each for each in some if each[1] == "queue"]
    records = list(run([each for each in some if each[1] != "queue"]))
    records += run(queued, ("--max-sessions", "1", "--idle-timeout", "5"))
    if options.out:
        report = {**vars(environment(threads=None, read_bandwidth=None)), "runs": records}
        options.out.write_text(json.dumps(report) + "\n")
    wrong = [record for record in records if not record["same"]]
    times = defaultdict(list)
    for record in records:
        if record["happened"]:
            times[record["who"], record["how"]].append(record["extra_seconds"])
    for (who, how), seconds in times.items():
        cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
        print(f"{who} {how}: {len(seconds)} times, p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s to go on")
    happened = sum(record["happened"] for record in records)
    print(f"{len(records)} combinations, {happened} faults, {len(wrong)} completions that are not what they would be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
