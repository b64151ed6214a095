"""Where raw values come from: files, the environment, arguments; each value with its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiers.config_keys import BY_ARGUMENT, BY_ENV, BY_NAME, CONFIG_ENV, ConfigError, Key, nearest

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
        except (ValueError, TypeError):
            parser = self.key.parser
            raise ConfigError(
                f"{self.key.name} = {self.raw!r} ({self.origin}) is not accepted: it must be {parser.accepts}"
                f"{nearest(str(self.raw), parser.choices)}"
            ) from None


def from_files(
    named: Path | None, environ: Mapping[str, str], cwd: Path, options: Mapping[str, str]
) -> Iterator[Given]:
    """Yield what the user config says, then `named` or, without it, ``tiers.toml`` of `cwd`.

    `options` as for `from_environment`.
    """
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config"
    user = Path(base) / "tiers" / "tiers.toml"
    if user.is_file():
        yield from _from_file(user, str(user))
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"{options.get(CONFIG_ENV, CONFIG_ENV)} names {named}, which is not a file")
        yield from _from_file(named, str(named))
    elif (cwd / "tiers.toml").is_file():
        yield from _from_file(cwd / "tiers.toml", "./tiers.toml")


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


def _from_file(path: Path, origin: str) -> Iterator[Given]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{origin} cannot be read: {error}") from error
    for name, value in _leaves(tree):
        if name not in BY_NAME:
            raise ConfigError(f"{origin}: unknown key {name!r}{nearest(name, BY_NAME)}")
        yield Given(BY_NAME[name], value, origin)


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        # A table where a key belongs is left whole: its parser then says what the key accepts.
        known = any(key.startswith(f"{prefix}{name}.") for key in BY_NAME)
        if isinstance(value, dict) and prefix + name not in BY_NAME and (value or known):
            yield from _leaves(value, f"{prefix}{name}.")
        else:  # also an empty table that no key is in
            yield prefix + name, value
