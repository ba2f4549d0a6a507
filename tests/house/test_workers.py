"""Tests which test files `make test` gives to one worker."""

from __future__ import annotations

import pytest
from conftest import Scheduling


def test_files_that_use_the_sessions_services_or_fork_others_are_one_unit_of_work(
    pytestconfig: pytest.Config,
) -> None:
    scheduling = object.__new__(Scheduling)  # without the nodes that it would schedule
    scheduling.config = pytestconfig
    files = ("bench/test_embedded.py", "bench/test_bench_runs.py", "gateway/test_gateway.py")
    files += ("cli/test_processes.py", "draft/test_no_model.py", "draft/test_sighup.py", "gateway/test_structured.py")
    assert len({scheduling._split_scope(f"tests/{file}::test") for file in files}) == 1
    assert scheduling._split_scope("tests/common/test_tree.py::test") == "tests/common/test_tree.py"
    assert scheduling._split_scope("tests/engine/test_census.py::test[a]") == "tests/engine/test_census.py::test[a]"
