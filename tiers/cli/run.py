"""``tiers run``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping

from torch_tiers.cli.verb import CliError
from torch_tiers.config import load
from torch_tiers.config_keys import BY_ENV, CONFIG_ENV, PATHS, USUAL_ALLOCATOR, Key

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class RunVerb:
    """Run a program with tiers, such as: tiers run --hbm 20GiB -- python train.py.

    Sets the environment and replaces itself by the program, so process id, signals and exit code are the program's
    own. The allocator is the one configured, or "pages" if that is off. With -v or --json it says on stderr what it
    sets. tiers config lists the values, and tiers report what a run with --run DIR did.
    """

    name = "run"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Give every variable an option of the same name."""
        parser.add_argument("--config", metavar="FILE", help=f"sets {CONFIG_ENV}")
        for env, key in BY_ENV.items():
            option = _option(key)
            text = f"sets {env}: {key.parser.accepts}".replace("%", "%%")  # which argparse formats
            if key.parser is PATHS:
                parser.add_argument(option, action="append", metavar="DIR", help=f"{text}; may be repeated")
            else:
                parser.add_argument(option, metavar="VALUE", help=text)
        parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what is set")
        parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the program")

    def run(self, args: argparse.Namespace) -> int:
        """Check the configuration, then replace this process."""
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            raise CliError("no program to run; write: tiers run -- python train.py")
        refuse_without_autoload(os.environ)
        changes = _changes(args, os.environ)
        if args.verbose or args.json:
            print(_describe(changes, command, as_json=args.json), file=sys.stderr)
        if sys.stdout is not None:  # closed by who started this
            sys.stdout.flush()
        try:
            os.execvpe(command[0], command, {**os.environ, **changes})
        except FileNotFoundError:
            raise CliError(f"{command[0]}: no such program", _NOT_FOUND) from None
        except OSError as error:
            raise CliError(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE) from None


def refuse_without_autoload(environ: Mapping[str, str]) -> None:
    """Raise CliError where PyTorch's own switch keeps the program from having tiers."""
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise CliError("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from loading tiers; unset it")


def _changes(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set, checked together with everything else that the program will see."""
    given = {CONFIG_ENV: args.config} | {env: getattr(args, key.argument) for env, key in BY_ENV.items()}
    changes = {
        env: os.pathsep.join(value) if isinstance(value, list) else value
        for env, value in given.items()
        if value is not None
    }
    config = load(environ={**environ, **changes}, options=options_for(changes)).config
    if changes.get("TIERS_ALLOCATOR", "").strip().lower() == "off":
        if config.run is None:
            raise CliError("--allocator off is to run the program without tiers: leave `tiers run` out, or give --run")
        return {**changes, "TIERS_ALLOCATOR": "off", "TIERS_RUN": str(config.run)}
    allocator = config.allocator
    # The gate looks at the variable alone, so what a file says about the allocator must reach it there.
    return {**changes, "TIERS_ALLOCATOR": USUAL_ALLOCATOR if allocator == "off" else allocator}


def _option(key: Key) -> str:
    return "--" + key.argument.replace("_", "-")


def options_for(variables: Iterable[str]) -> dict[str, str]:
    """The options that set `variables`, as far as there are some: what messages are to speak of."""
    options = {CONFIG_ENV: "--config"} | {env: _option(key) for env, key in BY_ENV.items()}
    return {env: options[env] for env in variables if env in options}


def _describe(changes: Mapping[str, str], command: list[str], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"set": changes, "command": command})
    words = [f"{name}={shlex.quote(value)}" for name, value in changes.items()]
    return "tiers: " + " ".join([*words, shlex.join(command)])
