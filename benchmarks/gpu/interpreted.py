"""Triton's interpreter, which runs kernels on a CPU, made faster: it patches its language once for each launch.

It would do so again for each call of a function in a kernel, which takes half of a small kernel's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


def patch_once() -> None:
    """Let the interpreter skip a module of its language that it has patched for the running kernel."""
    from triton import language
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if launch.__module__ == __name__:
        return  # done before
    patched: set[str] = set()

    @cache
    def modules_of(function: Callable[..., Any]) -> frozenset[str]:
        of_language = (language, language.core)
        found = (value for value in function.__globals__.values() if inspect.ismodule(value) and value in of_language)
        return frozenset(module.__name__ for module in found)

    def patched_once(function: Callable[..., Any]) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return None  # the interpreter restores what it patched for the launch alone
        patched.update(modules)
        return patch(function)

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        try:
            launch(self, *arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched_once, launched
