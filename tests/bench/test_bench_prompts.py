"""Tests the prompts of `dynatree bench`: pieces of texts, and entries of JSON Lines files and data sets."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynatree import embedded
from dynatree.bench.prompts import Selection, cut_text, load_tokenizer, read_prompts
from dynatree.engine.model import tokenizer as model_tokenizer

TEXT = "".join(
    f" = Title {part} = \n \n" + " ".join(f"word{part}x{i}" for i in range(60)) + " \n \n" for part in range(4)
)


def encode(text: str) -> list[int]:
    """Encode each character as one token."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


# texts


def test_windows_start_at_paragraphs_and_do_not_overlap() -> None:
    windows = [decode(window) for window in cut_text("\n" + TEXT, 4, 40, encode)]
    assert [window[:12] for window in windows] == [f" = Title {part} =" for part in range(4)]
    assert all(len(window) == 40 for window in windows)


def test_windows_start_at_words_where_there_is_no_paragraph() -> None:
    text = " ".join(f"word{number}" for number in range(1000))
    windows = [decode(window) for window in cut_text(text, 3, 50, encode)]
    assert windows[0].startswith("word0 word1")
    assert all(window.startswith(" word") for window in windows[1:])


def test_windows_of_any_number_of_characters_a_token() -> None:
    """A token of 100 characters needs more text than a first guess; an incomplete window is not used."""
    words = "a" * 99 + " "

    def coarse(text: str) -> list[int]:
        return [len(text[i : i + 100]) for i in range(0, len(text), 100)]

    assert cut_text(words * 60, 2, 20, coarse) == ((100,) * 20,) * 2


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="too short for 5 prompts of 900 tokens"):
        cut_text(TEXT, 5, 900, encode)


# JSON Lines


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"id": 1, "prompt": "Once"}, "prompt"),
        ({"prefix": "Once", "gold_completion": "upon"}, "prefix"),
        ({"text": "Once", "question": "?"}, "text"),
        ({"question_id": 1, "turns": ["Once", "Twice"]}, "turns"),
        ({"question": "Once", "answer": "No"}, "question"),
    ],
)
def test_the_field_of_json_lines_is_found(tmp_path: Path, entry: dict[str, Any], field: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(entry) + "\n\n")
    prompts = read_prompts(path, Selection(1, 3), encode)
    assert (prompts.field, [decode(each) for each in prompts.token_ids]) == (field, ["Onc"])


def test_entries_are_evenly_spaced_and_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(json.dumps({"say": f"entry {number}"}) + "\n" for number in range(10)))
    prompts = read_prompts(path, Selection(4, 100, "jsonl", "say"), encode)
    assert [decode(each) for each in prompts.token_ids] == ["entry 0", "entry 2", "entry 5", "entry 7"]
    assert (prompts.file, len(prompts.sha256)) == ("prompts.txt", 64)


@pytest.mark.parametrize(
    ("name", "content", "selection", "message"),
    [
        ("a.txt", b"\xff", Selection(1, 1), "is not UTF-8: invalid start byte at byte 0"),
        ("a.txt", b"word", Selection(1, 1, field="x"), "--field is for JSON Lines"),
        ("a.txt", b"word", Selection(2, 4), "too short for 2 prompts of 4 tokens"),
        ("a.jsonl", b'{"text": "a"}', Selection(2, 1), "it has 1 prompts, expected at least 2"),
        ("a.jsonl", b'\n{"text": "a"', Selection(1, 1), "line 2 is not JSON"),
        ("a.jsonl", b"[]", Selection(1, 1), "line 1 is not a JSON object"),
        (
            "a.jsonl",
            b'{"id": 1}',
            Selection(1, 1),
            "line 1 has none of prompt, prefix, text, turns, question, messages",
        ),
        ("a.jsonl", b'{"text": 1}', Selection(1, 1), "line 1: text is neither a text nor a list that starts with one"),
        (
            "a.jsonl",
            b'{"turns": []}',
            Selection(1, 1),
            "line 1: turns is neither a text nor a list",
        ),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', Selection(1, 1), "line 1: messages is neither a text nor"),
        ("a.jsonl", b'{"text": ""}', Selection(1, 1), "line 1: text is empty"),
        ("a.jsonl", b'{"text": "a"}\n{}', Selection(2, 1), "line 2 has no text"),
    ],
)
def test_files_that_have_no_such_prompts(
    tmp_path: Path, name: str, content: bytes, selection: Selection, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        read_prompts(tmp_path / name, selection, encode)
    assert message in str(error.value)
    assert name in str(error.value)


def test_a_chat_is_written_by_the_template_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before the assistant's last message, and the name of a special token in a message is text."""
    tokenizer = model_tokenizer.load_tokenizer(str(embedded.target_path()))
    monkeypatch.setattr(model_tokenizer, "load_tokenizer", lambda model: tokenizer)
    tokenizer.chat_template = (
        "{% for each in messages %}<{{ each.role }}>{{ each.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    end = tokenizer.eos_token
    chat = [{"role": "user", "content": f"Hi {end}"}, {"role": "assistant", "content": "Oh!"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": chat[1:]}))
    encode = load_tokenizer("embedded").encode
    found = read_prompts(path, Selection(1, 2), encode)
    (token_ids,) = found.token_ids
    assert (found.field, tokenizer.decode(token_ids)) == ("messages", f"<user>Hi {end}{end}<assistant>")
    assert token_ids.count(tokenizer.eos_token_id) == 1
    with pytest.raises(SystemExit, match=r"chats\.jsonl: the chat has no messages"):
        read_prompts(path, Selection(2, 2), encode)
    tokenizer.chat_template = None
    with pytest.raises(SystemExit, match="the tokenizer has no chat template"):
        read_prompts(path, Selection(1, 2), encode)


# data sets


def save_rows(folder: Path, split: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Save a data set as a folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the library's cache out of the home folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_rows_of_a_data_set(tmp_path: Path) -> None:
    folder = save_rows(tmp_path / "tales", "test", [{"id": n, "question": f"row {n}"} for n in range(10)])
    save_rows(folder, "train", [{"id": 0, "question": "other"}])
    prompts = read_prompts(folder, Selection(4, 100), encode)
    assert [decode(each) for each in prompts.token_ids] == ["row 0", "row 2", "row 5", "row 7"]
    assert (prompts.file, prompts.field, len(prompts.sha256)) == ("tales", "question", 64)
    other = read_prompts(folder, Selection(1, 100, split="train"), encode)
    assert [decode(each) for each in other.token_ids] == ["other"]
    assert other.sha256 != prompts.sha256


def test_lines_of_a_data_set_joined_to_one_text(tmp_path: Path) -> None:
    lines = [line for part in range(3) for line in ("", f" = Title {part} = ", "", "some words " * 30)]
    folder = save_rows(tmp_path / "wiki", "test", [{"line": line} for line in lines])
    prompts = read_prompts(folder, Selection(3, 50, "text", "line"), encode)
    assert [decode(window)[:12] for window in prompts.token_ids] == [f" = Title {part} =" for part in range(3)]
    assert {len(window) for window in prompts.token_ids} == {50}
    assert prompts.field == "line"


@pytest.mark.parametrize(
    ("rows", "selection", "message"),
    [
        ([{"id": 1}], Selection(1, 1), "row 0 has none of prompt, prefix, text, turns, question"),
        ([{"text": "a"}], Selection(2, 1), "it has 1 prompts, expected at least 2"),
        ([{"text": "a"}], Selection(1, 1, field="x"), "row 0 has no x"),
        ([{"text": "a"}], Selection(1, 5, "text"), "too short for 1 prompts of 5 tokens"),
        ([{"text": ""}], Selection(1, 1), "row 0: text is empty"),
        ([{"text": "a"}], Selection(1, 1, split="dev"), "no data set of this name could be loaded: Unknown split"),
    ],
)
def test_data_sets_that_have_no_such_prompts(
    tmp_path: Path, rows: list[dict[str, Any]], selection: Selection, message: str
) -> None:
    folder = save_rows(tmp_path / "tales", "test", rows)
    with pytest.raises(SystemExit) as error:
        read_prompts(folder, selection, encode)
    assert message in str(error.value)
    assert "tales" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"there is no file nowhere; .* install dynatree with its extra \[bench\]"):
        read_prompts(Path("nowhere"), Selection(1, 1), encode)


@pytest.mark.parametrize("name", ["nofile.txt", "texts/nofile.jsonl", "/no/such", "../nowhere", "a/b/c"])
def test_what_can_only_be_a_file_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynatree.bench.prompts.load_data_set", lambda *_: pytest.fail("it was looked for"))
    with pytest.raises(SystemExit, match=f"^there is no file {name}$"):
        read_prompts(Path(name), Selection(1, 1), encode)


def test_the_configuration_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*names: str | None, split: str) -> list[dict[str, str]]:
        asked.extend((*names, split))
        return [{"text": "Once"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    prompts = read_prompts(Path("someone/tales:raw"), Selection(1, 9), encode)
    assert (asked, prompts.file) == (["someone/tales", "raw", "test"], "someone/tales:raw")


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", "Hi \ud800 there"), ("messages", [{"role": "user", "content": "Hi \ud800 there"}])],
)
def test_half_of_a_surrogate_pair_is_one_line(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(SystemExit, match=f"line 1: {field} is not valid Unicode"):
        read_prompts(path, Selection(1, 8), load_tokenizer("embedded").encode)
