"""Where raw values come from: files, the environment, arguments; each value with its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_tiers.config_file import NO_FILE, File, parse, read
from torch_tiers.config_keys import BY_ARGUMENT, BY_ENV, BY_NAME, CONFIG_ENV, ConfigError, Key, nearest

_PREFIX = "TIERS_"


@dataclass(frozen=True, slots=True)
class Given:
    """A raw value that a source gives to a key."""

    key: Key
    raw: object
    origin: str

    def parse(self) -> object:
        """The typed value; ConfigError if the key does not accept it."""
        try:
            return self.key.parser.parse(self.raw)
        except (ValueError, TypeError, OverflowError):  # the last of a number too large for a float
            parser = self.key.parser
            raise ConfigError(
                f"{self.key.name} = {self.raw!r} ({self.origin}) is not accepted: it must be {parser.accepts}"
                f"{parser.guess(self.raw)}"
            ) from None
        except (OSError, RuntimeError) as error:  # nobody's home, or a relative path where the directory is gone
            raise ConfigError(
                f"{self.key.name} = {self.raw!r} ({self.origin}) cannot be used: {said(error)}; name an absolute path"
            ) from None


def said(error: Exception) -> str:
    """What the system said, without the path that our lines name anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")


def from_user(environ: Mapping[str, str], warnings: list[str]) -> Iterator[Given]:
    """Yield what the user config says.

    One that this user cannot read counts as absent, which goes into `warnings`: where a job runs as somebody without a
    home, or with another's, that is nobody's mistake.
    """
    advice = "it counts as absent; XDG_CONFIG_HOME may name another place"
    try:
        base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    except RuntimeError as error:
        warnings.append(f"the user config cannot be looked for: {said(error)}; {advice}")
        return
    user = Path(base) / "tiers" / "tiers.toml"
    try:
        file = read(user, str(user)) if user.is_file() else NO_FILE
    except OSError as error:
        warnings.append(f"the user config {user} cannot be read: {said(error)}; {advice}")
        return
    yield from _from(file, str(user))


def from_file(named: Path | None, cwd: Path, options: Mapping[str, str]) -> Iterator[Given]:
    """Yield what `named` says or, without it, ``tiers.toml`` of `cwd`.

    `options` as for `from_environment`.
    """
    path, origin = (cwd / "tiers.toml", "./tiers.toml") if named is None else (named, str(named))
    subject = origin if named is None else f"{options.get(CONFIG_ENV, CONFIG_ENV)} names {origin}, which"
    try:
        there = path.is_file()
        file = read(path, origin) if there else NO_FILE
    except OSError as error:
        advice = "work in a directory that" if named is None else "name a file that"
        raise ConfigError(f"{subject} cannot be read: {said(error)}; {advice} this user may read") from None
    if named is not None and not there:
        raise ConfigError(f"{subject} is not a file")
    yield from _from(file, origin, unasked=named is None)


def from_environment(environ: Mapping[str, str], options: Mapping[str, str]) -> Iterator[Given]:
    """Yield what the variables say; an empty one counts as not set, an unknown one is an error.

    `options` names those that options of a command stand for.
    """
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name == CONFIG_ENV or not environ[name]:
            continue
        if name not in BY_ENV:
            raise ConfigError(f"environment: unknown variable {name}{nearest(name, {*BY_ENV, CONFIG_ENV})}")
        yield Given(BY_ENV[name], environ[name], options.get(name, f"environment {name}"))


def from_arguments(arguments: Mapping[str, object]) -> Iterator[Given]:
    """Yield what Python arguments say."""
    for name, value in arguments.items():
        if name not in BY_ARGUMENT:
            raise ConfigError(f"unknown argument {name!r}{nearest(name, {*BY_ARGUMENT, 'config'})}")
        yield Given(BY_ARGUMENT[name], value, f"argument {name}")


def _from(file: File, origin: str, *, unasked: bool = False) -> Iterator[Given]:
    """Yield what a file says; `unasked` is one that is read for where it lies."""
    for name, value in _leaves(parse(file.text, origin)):
        if name not in BY_NAME:
            raise ConfigError(f"{origin}: unknown key {name!r}{nearest(name, BY_NAME)}")
        key = BY_NAME[name]
        if file.not_ours and (key.guarded or (key.leads and unasked)):
            instead = f", or {key.env} in the environment" if key.env else ""
            raise ConfigError(f"{origin}: {name} is not taken from a file that {file.not_ours}{instead}")
        yield Given(key, value, origin)


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        # A table where a key belongs is left whole: its parser then says what the key accepts.
        known = any(key.startswith(f"{prefix}{name}.") for key in BY_NAME)
        if isinstance(value, dict) and prefix + name not in BY_NAME and (value or known):
            yield from _leaves(value, f"{prefix}{name}.")
        else:  # also an empty table that no key is in
            yield prefix + name, value
