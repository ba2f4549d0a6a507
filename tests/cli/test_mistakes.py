"""Tests that mistakes that need no model are reported in one line, before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.mistakes import MOST_SECONDS, mistakes

# Run each command line in its own fork of a process that has imported only the subcommands.
ANSWERS = """
import json, os, sys, time
from importlib import import_module
from dynatree.cli.main import COMMANDS, main

answers, lines = [], json.load(sys.stdin)
for name in {line[0] for line in lines}:
    import_module(COMMANDS[name][1])
for line in lines:
    read, write = os.pipe()
    said, says = os.pipe()
    if os.fork() == 0:
        os.dup2(says, 2)
        began = time.process_time()
        status = main(line)
        with open(write, "w") as answer:
            json.dump([status, time.process_time() - began, "torch" in sys.modules], answer)
        os._exit(0)
    os.close(write)
    os.close(says)
    with open(read) as answer, open(said) as errors:
        answers.append([*json.load(answer), errors.read()])
    os.wait()
print(json.dumps(answers))
"""


@pytest.mark.long
def test_mistakes_that_need_no_model_are_told_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    with mistakes(tmp_path) as all_of_them:
        lines = json.dumps([mistake.command for mistake in all_of_them])
        command = [sys.executable, "-c", ANSWERS]
        result = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    for mistake, (status, seconds, torch, errors) in zip(all_of_them, json.loads(result.stdout), strict=True):
        assert (status, torch) == (1, False), mistake
        assert errors.startswith("dynatree: error: "), mistake
        assert errors.count("\n") == 1, errors
        assert mistake.words in errors, mistake
        assert seconds < MOST_SECONDS, mistake  # seconds of CPU time, since other processes may use the CPU too
