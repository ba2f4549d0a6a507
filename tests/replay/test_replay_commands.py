"""The command line of `dynatree bench replay`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynatree.bench.methods import parse_methods
from dynatree.cli.main import main
from dynatree.replay import recording
from dynatree.replay.machines import to_json
from dynatree.replay.recording import Recording
from dynatree.replay.replay_command import check_methods
from tests.support.recorded import TOY, hand_made


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, machines, out = tmp_path / "some.npz", tmp_path / "costs.json", tmp_path / "out.json"
    recording.save(Recording({}, (hand_made(),)), recorded)
    machines.write_text(to_json([TOY, replace(TOY, name="guessed", measured=False)]))
    policies = ("--policy", "linear:depth=2/4", "--policy", "autoregressive")
    assert main(["bench", "replay", str(recorded), *policies, "--machine", "guessed", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "guessed (expected, not measured), temperature 0, 6 new tokens" in printed
    results = json.loads(out.read_text())["results"]
    assert [(each["label"], each["machine"]) for each in results] == [
        ("linear:depth=2", "guessed"),
        ("linear:depth=4", "guessed"),
        ("autoregressive", "guessed"),
    ]
    assert results[0]["rounds"] == [2]
    assert main(["bench", "replay", str(recorded), "--constants", "--machine", "toy"]) == 0
    assert "What the constants are worth" in capsys.readouterr().out


MISTAKES = [
    (("--machine", "none"), "has no machine none; it has toy"),
    (("--policy", "linear:width=2"), "policy linear has no setting width"),
    (("--temperature", "0.3"), "no recorded run has such a --temperature"),
    (("--machines", "missing.json"), "missing.json cannot be read"),
]


def test_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    recorded = tmp_path / "some.npz"
    recording.save(Recording({}, (hand_made(),)), recorded)
    (tmp_path / "costs.json").write_text(to_json([TOY]))
    code = (
        "import sys; sys.modules['torch'] = None; from dynatree.cli.main import main\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]}:\n"
        f"    assert main(['bench', 'replay', {str(recorded)!r}, *arguments]) == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, (_, message) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert message in line


def test_policies_that_draw_otherwise_are_not_replayed() -> None:
    """A recording contains no draws, and the draft's proposals at only one temperature."""
    check_methods(parse_methods("dyspec:max_nodes=8/64"))
    for text in ("dyspec:draft_temperature=0.6", "specinfer:replacement=1"):
        with pytest.raises(SystemExit, match="a recording contains no draws"):
            check_methods(parse_methods(text))


def test_clients_at_once_are_told_of_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = tmp_path / "some.npz", tmp_path / "out.json"
    recording.save(Recording({}, (hand_made(),)), recorded)
    (tmp_path / "costs.json").write_text(to_json([TOY]))
    arguments = ["--clients", "1,3", "--policy", "linear:depth=2", "--out", str(out)]
    assert main(["bench", "replay", str(recorded), *arguments]) == 0
    assert "row price" in capsys.readouterr().out
    loads = json.loads(out.read_text())["results"]
    assert [(load["clients"], load["policy"]) for load in loads] == [
        (clients, policy) for clients in (1, 3) for policy in ("autoregressive", "linear:depth=2")
    ]


def test_a_missing_recording_is_what_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", str(tmp_path / "missing.npz")]) == 1
    assert "missing.npz" in capsys.readouterr().err
