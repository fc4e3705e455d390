"""Find the user's own functions by their `package.module:function` references."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from protocol.errors import CoterieError, DataError

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_MESSAGE_CHARACTERS = 300
_NOT_THE_USERS = (
    str(Path(__file__).parent),
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


def is_hook(reference: str) -> bool:
    """Return whether this reads as `package.module:function`."""
    return _REFERENCE.fullmatch(reference) is not None


def load_hook(
    reference: str, import_paths: Sequence[Path] = (), error: type[CoterieError] = DataError
) -> Callable[..., Any]:
    """Import a module and return one of its functions, guarded.

    The returned function passes its arguments on. While the module is imported, and during each
    call, `import_paths` end `sys.path`, so that imports inside the function work too. Whatever the
    user's code raises, or a `sys.exit` in it, becomes one `error` that says what and in which line.

    Args:
        reference: Such as "mypackage.models:build".
        import_paths: Folders to look in after those that Python looks in anyway.
        error: Whom to blame: `DataError` or `ModelError`.

    Raises:
        CoterieError: As `error`: the reference is malformed, the module can't be imported, or it
            has no such function.
    """
    if not is_hook(reference):
        raise error(f"{reference!r} is no reference: write it as package.module:function")
    module_name, _, name = reference.partition(":")
    with _on_path(import_paths, error), ForeignCode(f"importing {module_name}", error):
        module = _import(module_name, import_paths, error)
        function = getattr(module, name, None)
    if not callable(function):
        raise error(_no_function(module, name, function))

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with _on_path(import_paths, error), ForeignCode(reference, error):
            return function(*args, **kwargs)

    return call


def _import(
    module_name: str, import_paths: Sequence[Path], error: type[CoterieError]
) -> ModuleType:
    importlib.invalidate_caches()  # the file may be younger than Python's listing of its folder
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as fault:
        if fault.name is None or not f"{module_name}.".startswith(f"{fault.name}."):
            raise  # the module is there; what it imports is not
        places = ", ".join(str(path) for path in import_paths) or "no further import paths"
        raise error(
            f"there is no module {fault.name!r} (looked in the installed packages and in "
            f"{places}): install it, or add its folder to import_paths"
        ) from fault


def _no_function(module: ModuleType, name: str, found: object) -> str:
    where = getattr(module, "__file__", None) or module.__name__
    if found is not None:
        return f"{name!r} in {where} is a {type(found).__name__}, not a function"
    functions = [key for key, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(name, functions, n=1)
    advice = f"did you mean {near[0]!r}?" if near else "define it there, or correct the reference"
    return f"there is no function {name!r} in {where}: {advice}"


@contextmanager
def _on_path(import_paths: Sequence[Path], error: type[CoterieError]) -> Iterator[None]:
    for path in import_paths:
        if not path.is_dir():
            raise error(f"the import path {path} is no folder: correct import_paths")
    added = [text for path in import_paths if (text := str(path.resolve())) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for text in added:
            if text in sys.path:
                sys.path.remove(text)


class ForeignCode:
    """Tell in one line what the user's own code raised, and in which of its lines.

    That code may raise anything at all, so unlike our own it can't be met with named exceptions.
    """

    def __init__(self, what: str, error: type[CoterieError]) -> None:
        self._what = what
        self._error = error

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(fault, CoterieError) or not isinstance(fault, (Exception, SystemExit)):
            return
        frames = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(trace)
            if not frame.filename.startswith(_NOT_THE_USERS)
        ]
        message = " ".join(str(fault).split())[:_MESSAGE_CHARACTERS]
        where = f" (at {frames[-1]})" if frames else ""
        raise self._error(
            f"{self._what} raised {type(fault).__name__}: {message}{where}"
        ) from fault
