"""Compiles the kernels when the package is built, where a C compiler is at hand; nothing needs it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any
from zlib import crc32

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "common/dynatree/common/engine/native"
SOURCES = ("attention.c", "linear.c", "forward.c")
FLAGS = ("-O3", "-fno-strict-aliasing", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")
# Of each build, in the order of `native.BUILDS`: the instructions that it may use.
TARGETS = {
    "kernels_avx512_bf16.so": ("-march=x86-64-v4", "-mavx512bf16"),
    "kernels_avx512.so": ("-march=x86-64-v4",),
    "kernels_avx2.so": ("-march=x86-64-v3",),
}


class NativeHook(BuildHookInterface[Any]):
    """Puts the builds beside their source; a wheel that holds them is for this platform alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless DYNATREE_NATIVE is 0, as for wheels that shall install everywhere."""
        if self.target_name != "wheel" or os.environ.get("DYNATREE_NATIVE") == "0":
            return
        folder = Path(self.root, FOLDER)
        built = [name for name in TARGETS if self._compile(folder, name)]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/{FOLDER}/{name}" for name in built]

    def _compile(self, folder: Path, name: str) -> bool:
        output = folder / name
        output.unlink(missing_ok=True)
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None or platform.system() != "Linux" or platform.machine() != "x86_64":
            return False
        sources = [str(folder / source) for source in SOURCES]
        command = [
            *compiler.split(),
            *FLAGS,
            f"-DSOURCES={_checksum(folder)}u",
            *TARGETS[name],
            *sources,
            "-lm",
            "-o",
            str(output),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"{name} was not compiled: {error}")
            return False
        if done.returncode:
            self.app.display_warning(f"{name} was not compiled: {done.stderr.strip()[-500:]}")
        return not done.returncode


def _checksum(folder: Path) -> int:
    """Of the sources, as `native.checksum` has it."""
    return crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]"))))
