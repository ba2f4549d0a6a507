"""The figures of operation: faults, costs of operation and of the gateway, and a target larger than memory."""

from __future__ import annotations

import gzip
import json
from statistics import median
from typing import Any

from figures import HERE, markdown
from pandas import json_normalize


def operated(name: str) -> dict[str, Any]:
    """A file of what operation was measured by: tests/campaigns/fault_matrix.py, benchmarks/operation.py."""
    found: dict[str, Any] = json.loads(gzip.decompress((HERE / "operated" / f"{name}.json.gz").read_bytes()))
    return found


def offloaded() -> str:
    """A target that does not fit the memory: what each policy gives."""
    report = operated("streamed-12b")
    runs = json_normalize(report["runs"])
    plain = runs[runs["policy"] == "plain"]["tokens/s"].median()
    rows = []
    for policy, each in runs.groupby("policy", sort=False):
        middle = each.median(numeric_only=True)
        rows.append(
            {
                "policy": str(policy),
                "tokens/s": f"{middle['tokens/s']:.3f}",
                "x plain": f"{middle['tokens/s'] / plain:.2f}",
                "tokens a round": f"{middle['tokens a round']:.1f}",
                "nodes a round": f"{middle['nodes a round']:.0f}",
                "round, s": f"{middle['round, s']:.1f}",
                "GB read a forward": f"{middle['bytes read a forward'] / 1e9:.2f}",
                "prompts": str(len(each)),
                "equal outputs": str(each["tokens equal the default's"].sum()),
            }
        )
    return markdown(rows)


def offloaded_disk() -> str:
    """What the disk gives, what a plain step takes, and what accelerate's takes."""
    report = operated("streamed-12b")
    plain = median(run["round, s"] for run in report["runs"] if run["policy"] == "plain")
    offloaded = median(report["accelerate, s a step"][1:])
    before, after = (report[f"disk {when}, bytes/s"] / 1e9 for when in ("before", "after"))
    size = report["streamed bytes"] / 1e9
    return (
        f"{size:.2f} GB are offloaded. fio read the same files at {before:.2f} GB/s before and {after:.2f} GB/s after, "
        f"a plain step at {size / plain:.2f} GB/s. Accelerate's disk offload takes {offloaded:.1f} s a step in a group "
        f"of the same size, a plain step {plain:.1f} s: {offloaded / plain:.2f} times less. The service's group held "
        f"{report['peak of the group, bytes'] / 2**30:.2f} GiB at most."
    )


def operated_on(*names: str) -> str:
    """A sentence on what such files were measured on."""
    found = [operated(name) for name in names]
    [cpu] = {f"{each['machine']['cpu_count']} cores of {each['machine']['cpu']}" for each in found}
    commits = sorted({each["git"]["commit"][:12] for each in found})
    return f"Measured on {cpu}, at commit {', '.join(commits)}."
