"""The shipped model pair: a small GPT-NeoX target and its distilled draft, trained on public-domain books.

See `MODEL_CARD.md` beside this file. The paths load with transformers' `from_pretrained`; on the command line,
`--target-model embedded` and `--draft-model embedded` name them.
"""

from pathlib import Path

NAME = "embedded"
_FOLDER = Path(__file__).resolve().parent


def target_path() -> Path:
    """The folder of the large model of the pair."""
    return _FOLDER / "target"


def draft_path() -> Path:
    """The folder of the small model of the pair."""
    return _FOLDER / "draft"
