"""Build hook that compiles the CPU kernels if a C compiler is available; the package also works without them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "common/dynatree/engine/cpu/native"
SOURCES = ("attention.c", "linear.c", "quantized.c", "experts.c", "forward.c", "recurrence.c", "short_conv.c")
OPENMP = b"libgomp.so"  # torch's own OpenMP library, the only one that `torch.set_num_threads` controls


class NativeHook(BuildHookInterface[Any]):
    """Puts the compiled kernels beside their sources; a wheel that contains them is specific to this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, unless DYNATREE_NATIVE is 0, which makes a wheel that installs on every platform."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root, FOLDER)
        # A service compares the instruction sets of each build with those of its CPU.
        settings = json.loads((folder / "builds.json").read_text())
        built = [
            name for name, uses in settings["builds"].items() if self._build(folder / name, settings["flags"], uses)
        ]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/{FOLDER}/{name}" for name in built]

    def _build(self, output: Path, flags: Sequence[str], instructions: Sequence[str]) -> bool:
        """Compile one build and return whether it succeeded; a failure leaves neither an old nor a partial file."""
        compiler = _compiler()
        part = output.with_suffix(f".{os.getpid()}")
        try:
            output.unlink(missing_ok=True)
            if compiler is None:
                return False
            sources = [str(output.parent / source) for source in SOURCES]
            targets = [f"-m{each.replace('_', '')}" for each in instructions]
            checksum = f"-DSOURCES={_checksum(output.parent)}u"
            command = [*compiler, *flags, checksum, *targets, *sources, "-lm", "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise OSError(done.stderr.strip()[-500:])
            if OPENMP not in part.read_bytes():
                raise OSError(f"{shlex.join(compiler)} does not link libgomp, the OpenMP library that torch uses")
            part.replace(output)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"{output.name} was not compiled: {error}")
            return False
        finally:
            if part.exists():
                part.unlink()
        return True


def _compiler() -> list[str] | None:
    """Return the command of $CC or of gcc; None if compilation is disabled, unsupported here, or has no compiler."""
    if os.environ.get("DYNATREE_NATIVE") == "0" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    given = os.environ.get("CC", "")
    if given and shutil.which(given) is None:  # a path may have spaces
        return shlex.split(given)
    found = given or shutil.which("gcc") or shutil.which("cc")
    return [found] if found else None


def _checksum(folder: Path) -> int:
    """Checksum of the sources and of the compiler settings; `native.checksum` computes the same."""
    return crc32(b"".join(path.read_bytes() for path in sorted((*folder.glob("*.[ch]"), folder / "builds.json"))))
