"""The entry point that `import torch` calls: it turns tiers on when the environment asks for it.

Every process that imports torch runs it, DataLoader and compile workers among them, which look just like
spawned trainers. So it only registers; the session arms at the first training forward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

_put_off = False


def gate() -> None:
    """Install tiers if ``TIERS_ALLOCATOR`` is set to something other than ``off``.

    Raises
    ------
    SystemExit
        With code 2, after one line on stderr, if the configuration is wrong: before training starts. Nothing
        else is raised, as PyTorch would turn it into a failure of ``import torch``.
    """
    allocator = os.environ.get("TIERS_ALLOCATOR", "").strip().lower()
    if allocator in ("", "off"):
        others = [name for name in os.environ if name.startswith("TIERS_") and name != "TIERS_ALLOCATOR"]
        if others and not allocator:
            _tell_off(others)
        return
    session = sys.modules.get("torch_tiers.session")
    if session is not None and not hasattr(session, "install"):
        # It is the session itself that imports torch, and half-made: it calls `catch_up` when it is whole.
        global _put_off
        _put_off = True
        return
    import logging

    try:
        _install()
    except Exception as error:
        half_made = _half_made() if "partially initialized" in str(error) else None
        logging.getLogger("tiers").error(
            "tiers is not active, the program runs without it: %s: %s%s",
            type(error).__name__,
            error,
            f"; import torch before {half_made}" if half_made else "",
        )


def _half_made() -> str | None:
    """Which module of ours it is that imports torch, if one does: what needs it cannot be imported meanwhile."""
    for name, module in list(sys.modules.items()):  # the outermost comes first
        begun = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if begun and name.startswith("torch_tiers."):
            return name
    return None


def _tell_off(names: Iterable[str]) -> None:
    """Tell that tiers is off though `names` are set: a program that runs without looks as if it ran with them.

    Of names that are none of ours, such as ``TIERS_ALLOCATR``, each; of ours one.
    """
    import multiprocessing

    from torch_tiers.config_keys import BY_ENV, CONFIG_ENV, nearest

    known = {*BY_ENV, CONFIG_ENV}
    if multiprocessing.parent_process() is not None:
        return
    strange = sorted(name for name in names if name not in known)
    for name in strange:
        text = f"tiers is off: TIERS_ALLOCATOR is not set, and {name} is no variable of ours{nearest(name, known)}"
        print(text, file=sys.stderr)
    wanted = sorted({"TIERS_HBM", "TIERS_POLICY", "TIERS_RUN"}.intersection(names))
    if wanted and not strange:
        import atexit

        # At the end: until then a session in code may read it.
        atexit.register(_tell_unread, wanted[0])


def _tell_unread(name: str) -> None:
    if "torch_tiers.session" not in sys.modules and "torch_tiers.cli" not in sys.modules:
        print(f"tiers was off: {name} is set, and TIERS_ALLOCATOR is not", file=sys.stderr)


def catch_up() -> None:
    """Go through the gate now, if it came too early."""
    global _put_off
    if _put_off:
        _put_off = False
        gate()


def _hand_on_paths() -> None:
    """Have the processes that this one starts, in whatever directory by then, find the same files."""
    from torch_tiers.config_keys import BY_ENV, CONFIG_ENV, PATH, PATHS

    parsers = {CONFIG_ENV: PATH} | {name: key.parser for name, key in BY_ENV.items() if key.parser in (PATH, PATHS)}
    for name, parser in parsers.items():
        if os.environ.get(name):
            found = parser.parse(os.environ[name])
            os.environ[name] = os.pathsep.join(map(str, found if isinstance(found, tuple) else (found,)))


def _install() -> None:
    import logging
    import multiprocessing

    from torch_tiers.config import ConfigError, load
    from torch_tiers.log import set_up

    try:
        try:
            resolved = load()
        except (OSError, RuntimeError) as error:
            # Not as a failure of ours, with which the program goes on: without its budget it would run out of memory.
            raise ConfigError(
                f"the configuration cannot be read: {error}; correct it or unset TIERS_ALLOCATOR"
            ) from None
        _hand_on_paths()
        set_up(resolved.config.log)
        # A child of multiprocessing inherited the variable from a process that has said all this already.
        if multiprocessing.parent_process() is None:
            for warning in resolved.warnings:
                logging.getLogger("tiers").warning(warning)

        from torch_tiers.session import install

        install(resolved.config)
    except ConfigError as error:
        print(f"tiers: {error}", file=sys.stderr)
        raise SystemExit(2) from None
