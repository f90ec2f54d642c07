"""Triton's interpreter without what it does again at each call of a device function."""

from typing import Any

from triton.runtime import interpreter


def prepare() -> None:
    """Lets this process, which is to run nothing but the interpreter, replace the functions of triton.language once.

    The interpreter looks through all of the language at every call of a device function, which takes a third of its
    time; and it puts the language back after each kernel.
    """
    patch, done = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
