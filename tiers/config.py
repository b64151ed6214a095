"""The configuration: a typed tree, merged from five sources, each value with where it came from.

Imported inside `import torch`: standard library only, and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from torch_tiers.allocator.sizes import PAGE, Share, format_size
from torch_tiers.config_keys import CONFIG_ENV, KNOWN_POLICIES, ConfigError
from torch_tiers.config_sources import from_arguments, from_environment, from_file, from_user, said

__all__ = [
    "KNOWN_POLICIES",
    "Config",
    "ConfigError",
    "DramConfig",
    "HbmConfig",
    "LinksConfig",
    "MonitorConfig",
    "NvmeConfig",
    "Resolved",
    "flatten",
    "load",
]


@dataclass(frozen=True, slots=True)
class HbmConfig:
    """``[hbm]``: bytes per GPU; None means all that is free less a margin.

    A share is of what an iteration needs with everything kept. Until the first plan tells that, the program has all
    that is free. With `strict` steps take no more than the budget, once it is known, even before they have a plan.
    """

    capacity: int | Share | None = None
    strict: bool = False

    @property
    def nbytes(self) -> int | None:
        """The budget, if bytes were set; None for a share, and for all that is free."""
        return None if isinstance(self.capacity, Share) else self.capacity


@dataclass(frozen=True, slots=True)
class DramConfig:
    """``[dram]``: bytes per node; None means half of what machine and cgroup leave."""

    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """``[nvme]``: bytes per node over all paths; None or 0 means that the tier is off."""

    paths: tuple[Path, ...] = ()
    capacity: int | None = None
    gds: Literal["require", "prefer", "off"] = "prefer"
    checksum: bool = True


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """``[monitor]``: `probe` times a small copy now and then; `calibration` is a report of ``tiers probe``."""

    enabled: bool = True
    probe: bool = True
    calibration: Path | None = None


@dataclass(frozen=True, slots=True)
class LinksConfig:
    """``[links]``: bytes per second of each lane as measured; None means not measured yet."""

    d2h: float | None = None
    h2d: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None
    gds_write: float | None = None
    gds_read: float | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """What the user asked for; ``Config()`` is the defaults.

    With `replay` saved tensors may be dropped, and are made again by the operators that made them; without it nothing
    is recomputed. With `plan_cache` a program begins with the plans of its last run. Processes share the capacities of
    a node with those that name the same `ledger`, a directory; None means the user's own, which all of his processes
    on the node see.
    """

    allocator: Literal["off", "torch", "pages"] = "off"
    policy: str = "auto"
    hbm: HbmConfig = field(default_factory=HbmConfig)
    dram: DramConfig = field(default_factory=DramConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    replay: bool = True
    plan_cache: bool = True
    ledger: Path | None = None
    run: Path | None = None
    run_force: bool = False
    log: str = "warning"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and its provenance.

    Attributes
    ----------
    config
        The effective values.
    origin
        Key (as in tiers.toml) to where its value came from: ``"environment TIERS_HBM"``, ``"./tiers.toml"``,
        ``"argument hbm"``, ``"default"``.
    warnings
        What is allowed but worth saying, one line each.
    """

    config: Config
    origin: dict[str, str]
    warnings: tuple[str, ...]


def flatten(config: Config) -> dict[str, Any]:
    """Every value by its key as in tiers.toml, in the order of the tree."""
    flat: dict[str, Any] = {}
    for top in fields(config):
        value = getattr(config, top.name)
        if is_dataclass(value):
            flat |= {f"{top.name}.{sub.name}": getattr(value, sub.name) for sub in fields(value)}
        else:
            flat[top.name] = value
    return flat


def load(
    arguments: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    options: Mapping[str, str] | None = None,
    trains: bool = True,
) -> Resolved:
    """Merge argument > environment > ``./tiers.toml`` > user config > default.

    Parameters
    ----------
    arguments
        Values by argument name (``hbm``, ``nvme_path``, ``nvme_gds``, ...); None counts as not given.
        ``config`` names a file, as ``TIERS_CONFIG`` does.
    environ
        The environment; `os.environ` if not given. An empty variable counts as not set.
    cwd
        Where ``./tiers.toml`` is looked for; the working directory if not given.
    options
        Of a command, by the variables of `environ` that they set: what messages are to speak of.
    trains
        Whether a program is to train with it. Else NVMe directories need not be there, as on another machine: that is a
        warning.

    Raises
    ------
    ConfigError
        On an unknown key, a value that its key does not accept, a file that cannot be read, or NVMe
        directories that cannot be used. A user config that this user may not read counts as absent: a warning.
    """
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    environ = os.environ if environ is None else environ
    named = given.pop("config", None) or environ.get(CONFIG_ENV)
    values = flatten(Config())
    origin = dict.fromkeys(values, "default")
    unread: list[str] = []
    for source in (
        from_user(environ, unread),
        from_file(Path(str(named)).expanduser() if named else None, cwd or Path(), options or {}),
        from_environment(environ, options or {}),
        from_arguments(given),
    ):
        for entry in source:
            # Parsed even when a stronger source overrides it: a mistake must not wait for that source to go.
            values[entry.key.name] = entry.parse()
            origin[entry.key.name] = entry.origin
    config = _build(values)
    try:
        warnings = _check_nvme(config.nvme, config.dram.capacity, origin)
    except ConfigError as error:
        if trains:
            raise
        warnings = (str(error),)
    if config.dram.capacity and config.dram.capacity < PAGE and not config.nvme.capacity:
        held = f"dram.capacity ({origin['dram.capacity']}) is less than a page of {format_size(PAGE)}"
        warnings += (f"{held}: nothing can move; set TIERS_DRAM to some GiB",)
    return Resolved(config, origin, (*unread, *warnings, *_without_effect(values, origin)))


_EFFECT_NEEDS = {
    "run_force": "run",
    "monitor.probe": "monitor.enabled",
    "monitor.calibration": "monitor.enabled",
    "nvme.gds": "nvme.capacity",
    "nvme.checksum": "nvme.capacity",
}


def _without_effect(values: Mapping[str, Any], origin: Mapping[str, str]) -> Iterator[str]:
    """Yield what was asked for and is not taken, as another key that it goes with is off."""
    usual = flatten(Config())
    for key, needed in _EFFECT_NEEDS.items():
        if values[key] != usual[key] and not values[needed]:
            yield f"{key} is set ({origin[key]}) and has no effect: {needed} is not set, or off"
    if values["hbm.strict"] and isinstance(values["hbm.capacity"], Share):
        why = f"hbm.capacity ({origin['hbm.capacity']}) is a share: until then the program has all of hbm; set bytes"
        yield f"hbm.strict is set ({origin['hbm.strict']}) and begins with the first plan, as {why}"


def _build(values: Mapping[str, Any]) -> Config:
    def table(name: str) -> dict[str, Any]:
        prefix = name + "."
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    return Config(
        hbm=HbmConfig(**table("hbm")),
        dram=DramConfig(**table("dram")),
        nvme=NvmeConfig(**table("nvme")),
        monitor=MonitorConfig(**table("monitor")),
        links=LinksConfig(**table("links")),
        **{key: value for key, value in values.items() if "." not in key},
    )


def _check_nvme(nvme: NvmeConfig, dram: int | None, origin: Mapping[str, str]) -> tuple[str, ...]:
    """Check that the directories can be used; return what is allowed but worth saying."""
    if nvme.capacity is None:
        return ("nvme.paths is set but nvme.capacity is not: the nvme tier is off",) if nvme.paths else ()
    if nvme.capacity == 0:
        return ()
    if dram is not None and dram < PAGE:
        raise ConfigError(
            f"nvme.capacity is set ({origin['nvme.capacity']}) and dram.capacity holds nothing "
            f"({origin['dram.capacity']}): what goes to nvme through host memory lies in dram first; set TIERS_DRAM "
            "to some GiB"
        )
    if not nvme.paths:
        raise ConfigError(
            f"nvme.capacity is set ({origin['nvme.capacity']}) but nvme.paths is not: "
            "name the directories with TIERS_NVME_PATH or in [nvme]"
        )
    warnings = []
    known: dict[Path, Path] = {}
    for path in nvme.paths:
        where = f"nvme.paths ({origin['nvme.paths']}): {path}"
        try:
            warnings += _check_directory(path, where)
            # Named twice it would get twice its share of the capacity, and both halves of what is to be striped.
            if (same := known.setdefault(path.resolve(), path)) is not path:
                raise ConfigError(f"{where} is the same directory as {same}: name it once")
        except (OSError, RuntimeError) as error:  # of a name that is too long, or a directory above that is closed
            raise ConfigError(f"{where} cannot be used: {said(error)}; name another directory") from None
    return tuple(warnings)


def _check_directory(path: Path, where: str) -> list[str]:
    from torch_tiers.topology import filesystem_of

    if not path.exists():
        raise ConfigError(f"{where} does not exist; create it or name another directory")
    if not path.is_dir():
        raise ConfigError(f"{where} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} is not writable by this user")
    filesystem = filesystem_of(path)
    return [f"{where} is on {filesystem.kind}: what is spilled there stays in memory"] if filesystem.in_memory else []
