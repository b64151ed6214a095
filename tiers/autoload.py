"""The entry point that `import torch` calls: it turns tiers on when the environment asks for it.

Every process that imports torch runs it, DataLoader and compile workers among them, which look just like
spawned trainers. So it only registers; the session arms at the first training forward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_tiers.config_keys import ConfigError


def gate() -> None:
    """Install tiers if ``TIERS_ALLOCATOR`` is set to something other than ``off``.

    With ``off`` and ``TIERS_RUN`` the program runs without tiers, and its losses are kept.

    Raises
    ------
    SystemExit
        With code 2, after one line on stderr, if the configuration is wrong, or tiers cannot be active though there
        is a budget: before training starts.
    TiersError
        Instead of that where somebody types: see `refusals.give_up`. PyTorch makes a failure of ``import torch`` of it.
    """
    if "_TORCH_TIERS_WATCH" in os.environ:  # set by `tiers bench` alone
        from torch_tiers.bench import watch

        watch.begin()
    allocator = os.environ.get("TIERS_ALLOCATOR", "").strip().lower()
    if allocator in ("", "off") and not (allocator and os.environ.get("TIERS_RUN")):
        others = [name for name in os.environ if name.startswith("TIERS_") and name != "TIERS_ALLOCATOR"]
        if others and not allocator:
            _tell_off(others)
        return
    session = sys.modules.get("torch_tiers.session")
    if session is not None and not hasattr(session, "install"):
        # It is the session itself that imports torch, and half-made.
        from torch_tiers import put_off

        put_off.until_the_session_is_whole(gate)
        return
    try:
        _install()
    except Exception as error:
        failure = error
    else:
        return
    _failed(failure)  # out here, so that at a prompt there is one traceback and not two


def _failed(error: Exception) -> None:
    """Give up on a wrong configuration. On what is ours to mend only if there is a budget: nothing would keep it."""
    import logging

    from torch_tiers.config_keys import ConfigError
    from torch_tiers.refusals import give_up

    if isinstance(error, ConfigError):
        give_up(_advised(error))
    half_made = _half_made() if "partially initialized" in str(error) else None
    text = f"{type(error).__name__}: {error}{f'; import torch before {half_made}' if half_made else ''}"
    if (budget := _budget()) is None:
        logging.getLogger("tiers").error("tiers is not active, the program runs without it: %s", text)
        return
    kept = f"tiers cannot be active, and nothing else keeps the program within {budget}"
    give_up(_advised(ConfigError(f"{kept}: {text}; unset TIERS_ALLOCATOR to run it without a budget")))


def _advised(error: ConfigError) -> ConfigError:
    """The same, and what else to do where the process goes on: torch cannot be imported a second time."""
    from torch_tiers.refusals import is_interactive

    return type(error)(f"{error}; then restart the kernel, or Python") if is_interactive() else error


def _budget() -> str | None:
    """The budget that was asked for, in words; None without one."""
    from torch_tiers.allocator.errors import TiersError
    from torch_tiers.config import load

    try:
        resolved = load()
    except (TiersError, OSError, RuntimeError):  # what could not be read may well have one
        return "its budget"
    key = "hbm.capacity"
    return None if resolved.config.hbm.capacity is None else f"{key} ({resolved.origin[key]})"


def _half_made() -> str | None:
    """Which module of ours it is that imports torch, if one does: what needs it cannot be imported meanwhile."""
    for name, module in list(sys.modules.items()):  # the outermost comes first
        begun = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if begun and name.startswith("torch_tiers."):
            return name
    return None


def _tell_off(names: Iterable[str]) -> None:
    """Tell that tiers is off though `names` are set: a program that runs without looks as if it ran with them.

    Of names that are none of ours, such as ``TIERS_ALLOCATR``, each; of ours one. At once: who waits hours for a
    program must know before. A session in code may still read them, so that is said, too.
    """
    from torch_tiers.config_keys import BY_ENV, CONFIG_ENV, nearest
    from torch_tiers.printable import printable
    from torch_tiers.refusals import is_new

    if "torch_tiers.session" in sys.modules or "torch_tiers.cli" in sys.modules:  # which reads them
        return
    known = {*BY_ENV, CONFIG_ENV}
    strange = sorted(name for name in names if name not in known)
    wanted = sorted({"TIERS_HBM", "TIERS_POLICY", "TIERS_RUN"}.intersection(names))
    lines = [
        f"tiers is off: TIERS_ALLOCATOR is not set, and {name} is no variable of ours{nearest(name, known)}"
        for name in strange
    ]
    if wanted and not strange:
        lines.append(
            f"tiers is off: {wanted[0]} is set, and TIERS_ALLOCATOR is not: only a tiers.session in code uses it; "
            "set TIERS_ALLOCATOR=pages, or start the program by tiers run"
        )
    if lines and is_new("; ".join(lines)):
        print(*map(printable, lines), sep="\n", file=sys.stderr)


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

    from torch_tiers.config import ConfigError, load
    from torch_tiers.log import set_up
    from torch_tiers.refusals import is_new

    try:
        resolved = load()
    except (OSError, RuntimeError) as error:
        # Not as a failure of ours, with which the program goes on: without its budget it would run out of memory.
        raise ConfigError(f"the configuration cannot be read: {error}; correct it or unset TIERS_ALLOCATOR") from None
    _hand_on_paths()
    set_up(resolved.config.log)
    if resolved.warnings and is_new("; ".join(resolved.warnings)):
        for warning in resolved.warnings:
            logging.getLogger("tiers").warning(warning)

    if resolved.config.allocator == "off":
        from torch_tiers import plain_run

        plain_run.install(resolved.config)
        return
    from torch_tiers.session import install

    install(resolved.config)
