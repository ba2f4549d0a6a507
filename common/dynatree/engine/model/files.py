"""Checks of a model's files before it is loaded: their existence, format and size.

This module imports neither torch nor transformers, so that mistakes are reported at once.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.engine.model.gguf_header import read_header
from dynatree.engine.settings import is_gguf

HUB_SECONDS = 1.5  # time limit for the hub's answer; after it, transformers asks again and waits longer
_EXPECTED = "expected the folder of a checkpoint, with config.json and *.safetensors, or a .gguf file"
_INDEX = "model.safetensors.index.json"


def is_path(model: str) -> bool:
    """Whether a model names a path on this machine and not a model on the hub (`NAME` or `OWNER/NAME`)."""
    looks = model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.lower().endswith((".gguf", "/"))
    return looks or Path(model).exists()


def folder_of(model: str) -> Path | None:
    """Return the folder of a model's files, or None for a hub name that is not in the local cache."""
    if is_path(model):
        return Path(model)
    return _cached(model)


def check_model(model: str) -> None:
    """Refuse a path without a valid checkpoint, and a hub name that neither the hub nor the local cache has.

    If the hub is unreachable, a model in the local cache is used, and the hub is not asked again.

    Raises:
        StartupError: The model cannot be used; the message says why.
    """
    if model == embedded.NAME:
        return
    if not model.strip():
        raise StartupError(f"the name of the model is empty; {_EXPECTED}, or a name on the hub")
    check_path(model)
    if is_gguf(model):
        read_header(Path(model))
    elif is_path(model):
        _check_config(Path(model))
        _check_weights(Path(model))
    else:
        _check_hub_name(model)


def check_rounding(model: str, weights: str) -> None:
    """Refuse to round weights that a folder on this machine holds in fewer bits already; those of GGUF files may be.

    Raises:
        StartupError: The weights are quantised.
    """
    folder = None if weights == "auto" or model == embedded.NAME else folder_of(model)
    if folder is None or not (folder / "config.json").exists():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if kinds := (config.get("quantization_config") or {}).get("quant_method", ""):
        raise StartupError(f"model {folder.name} has {kinds} weights, which cannot be rounded again to {weights}")


def architecture_of(model: str) -> str | None:
    """Return llama.cpp's name of a GGUF file's architecture, or None for a folder or a hub name.

    Raises:
        StartupError: The file cannot be read.
    """
    return read_header(Path(model)).values["general.architecture"] if is_gguf(model) else None


def checkpoint_of(model: str) -> dict[str, str]:
    """Return the arguments by which transformers finds a model: a folder or a hub name, or a GGUF file in a folder."""
    path = Path(model)
    if is_gguf(model):
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": model}


def check_path(model: str) -> None:
    """Refuse a path at which there is neither a folder nor a file.

    Raises:
        StartupError: There is nothing at the path.
    """
    if is_path(model) and not (is_gguf(model) or Path(model).is_dir()):
        raise StartupError(f"there is no model at {model}: no such folder or file")


def described(model: str) -> str:
    """Describe a model by its name and the size of its weights on the disk."""
    folder = folder_of(model)
    if folder is None or not folder.exists():
        return f"{model}, from the hub"
    files = [folder] if folder.is_file() else _weights(folder)
    if not files or not all(path.exists() for path in files):  # an earlier download was interrupted
        return f"{model}, from the hub"
    size = sum(path.stat().st_size for path in files)
    if folder in (embedded.target_path(), embedded.draft_path()):
        name = embedded.NAME
    else:
        name = folder.resolve().name if is_path(model) else model
    return f"{name}, {size_text(size)} on the disk"


def size_text(size: int) -> str:
    """Write a number of bytes for people."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"


def _check_config(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise StartupError(
            f"model {folder.name} has an adapter (adapter_config.json), which DynaTree does not apply; merge it into "
            "its base model, or take this file away if that is done"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"there is no model at {folder}: it has no config.json; {_EXPECTED}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise StartupError(f"the config.json of model {folder.name} cannot be read: {reason}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise StartupError(f"the config.json of model {folder.name} has no model_type")


def _check_weights(folder: Path) -> None:
    """Refuse a checkpoint without safetensors files, and files that are truncated or only pointers to other files."""
    try:
        files = _weights(folder)
    except (OSError, ValueError, LookupError, AttributeError):
        raise StartupError(f"the {_INDEX} of model {folder.name} cannot be read") from None
    if not files:
        raise StartupError(f"model {folder.name} has no weights in *.safetensors files, which are the only ones read")
    for file in files:
        try:
            with file.open("rb") as opened:
                header = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
        except OSError as error:
            raise StartupError(f"model {folder.name}: {file.name} cannot be read: {error.strerror}") from None
        if size < 8 + header:
            raise StartupError(f"model {folder.name}: {file.name} ends within its header; download it again")


def _weights(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    whole, index = folder / "model.safetensors", folder / _INDEX
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else []
    names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(names.values()))]


def _cached(name: str) -> Path | None:
    """Return the folder of a hub name in the local cache, or None."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _check_hub_name(name: str) -> None:
    if find_spec("huggingface_hub") is None:
        return  # a later import fails with advice on how to install it
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise StartupError(f"there is no model at {name!r}, and it is not a valid name on the hub") from None
    missing = f"there is no model at {name}, nor is it in the local cache"
    cached = _cached(name) is not None
    reason: Any = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
            return
        except GatedRepoError:
            raise StartupError(f"model {name} on the hub requires access; expected an HF_TOKEN that has it") from None
        except EntryNotFoundError:
            if not cached:
                raise StartupError(
                    f"model {name} on the hub has no config.json; expected a whole checkpoint: download a GGUF file "
                    "and name its path, or merge an adapter into its base model"
                ) from None
            return
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 404) and not cached:
                raise StartupError(f"{missing}; the hub has no such model, or keeps it private") from None
            return
        except Exception as error:  # the type depends on the HTTP library of the hub's client
            if "timeout" in type(error).__name__.lower():
                return
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not cached:
        raise StartupError(f"{missing}, and the hub is out of reach ({reason})")
    os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise transformers would retry every file for half a minute
    constants.HF_HUB_OFFLINE = True
