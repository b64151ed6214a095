"""The configuration: precedence, provenance, and one clear line for everything that is wrong."""

from __future__ import annotations

import errno
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_tiers import run_directory
from torch_tiers.config import Config, ConfigError, flatten, load
from torch_tiers.config_keys import BY_ARGUMENT, KEYS
from torch_tiers.places import cache_directory

GiB = 1024**3


@pytest.fixture
def resolve(tmp_path: Path) -> Callable[..., object]:
    """`load` in a directory and a home of the test's own; `project` and `user` are texts of the two files."""

    def call(arguments=None, environ=None, project=None, user=None):
        home = tmp_path / "home"
        (home / "tiers").mkdir(parents=True, exist_ok=True)
        if user is not None:
            (home / "tiers" / "tiers.toml").write_text(user)
        if project is not None:
            (tmp_path / "tiers.toml").write_text(project)
        return load(arguments, environ={"XDG_CONFIG_HOME": str(home), **(environ or {})}, cwd=tmp_path)

    return call


def test_nothing_given_is_the_defaults(resolve):
    resolved = resolve()
    assert resolved.config == Config()
    assert set(resolved.origin.values()) == {"default"}
    assert resolved.warnings == ()


def test_the_table_of_keys_is_the_tree():
    assert {key.name for key in KEYS} == set(flatten(Config()))


def test_the_variables_are_frozen():
    assert sorted(key.env for key in KEYS if key.env) == [
        "TIERS_ALLOCATOR",
        "TIERS_DRAM",
        "TIERS_HBM",
        "TIERS_HBM_STRICT",
        "TIERS_LEDGER",
        "TIERS_LOG",
        "TIERS_NVME",
        "TIERS_NVME_PATH",
        "TIERS_PLAN_CACHE",
        "TIERS_POLICY",
        "TIERS_REPLAY",
        "TIERS_RUN",
        "TIERS_RUN_FORCE",
    ]


def test_argument_names_are_frozen():
    assert sorted(BY_ARGUMENT) == [
        "allocator",
        "dram",
        "hbm",
        "hbm_strict",
        "ledger",
        "links_d2h",
        "links_disk_read",
        "links_disk_write",
        "links_gds_read",
        "links_gds_write",
        "links_h2d",
        "log",
        "monitor_calibration",
        "monitor_enabled",
        "monitor_probe",
        "nvme",
        "nvme_checksum",
        "nvme_gds",
        "nvme_path",
        "plan_cache",
        "policy",
        "replay",
        "run",
        "run_force",
    ]


def test_stronger_sources_win_and_say_so(resolve, tmp_path):
    sources = {
        "user": '[hbm]\ncapacity = "1GiB"',
        "project": '[hbm]\ncapacity = "2GiB"',
        "environ": {"TIERS_HBM": "3GiB"},
        "arguments": {"hbm": "4GiB"},
    }
    origins = {
        "user": str(tmp_path / "home/tiers/tiers.toml"),
        "project": "./tiers.toml",
        "environ": "environment TIERS_HBM",
        "arguments": "argument hbm",
    }
    given = {}
    for number, (source, value) in enumerate(sources.items(), start=1):
        given[source] = value
        resolved = resolve(**given)
        assert resolved.config.hbm.capacity == number * GiB
        assert resolved.origin["hbm.capacity"] == origins[source]


@pytest.mark.parametrize("dram", ["0", "1MiB"])
def test_nvme_without_dram_is_refused_before_training(resolve, tmp_path, dram):
    """What goes there lies in dram first: such a run ended in its second step."""
    with pytest.raises(ConfigError, match=r"nvme.capacity is set .* and dram.capacity holds nothing .*TIERS_DRAM"):
        resolve(environ={"TIERS_NVME": "1GiB", "TIERS_NVME_PATH": str(tmp_path), "TIERS_DRAM": dram})


def test_dram_that_holds_no_page_is_said_to_hold_nothing(resolve):
    """It was taken in silence, and a program that did not fit was told to raise TIERS_HBM."""
    resolved = resolve(environ={"TIERS_DRAM": "1MiB"})
    assert any("less than a page" in warning and "TIERS_DRAM" in warning for warning in resolved.warnings)
    assert not resolve(environ={"TIERS_DRAM": "0"}).warnings


def test_every_key_can_stand_in_the_file(resolve, tmp_path):
    config = resolve(
        project=f"""
        allocator = "pages"
        policy = "flashneuron"
        replay = false
        plan_cache = false
        ledger = "ledger"
        run = "out"
        run_force = true
        log = "debug"
        [hbm]
        capacity = "24GiB"
        strict = true
        [dram]
        capacity = 4194304
        [nvme]
        paths = ["{tmp_path}"]
        capacity = "1GiB"
        gds = "off"
        checksum = false
        [monitor]
        enabled = false
        probe = false
        calibration = "{tmp_path}/probe.json"
        [links]
        d2h = 55.0e9
        h2d = 55_100_000_000
        disk_write = 2.9e9
        disk_read = 2.8e9
        gds_write = 2.7e9
        gds_read = 2.6e9
        """
    ).config
    assert config.dram.capacity == 4194304
    assert config.nvme.paths == (tmp_path,)
    assert config.links.h2d == 55.1e9
    assert [key for key, value in flatten(config).items() if value == flatten(Config())[key]] == []


def test_a_named_file_replaces_the_one_in_the_directory(resolve, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('policy = "keep"')
    resolved = resolve(project='log = "debug"', environ={"TIERS_CONFIG": str(other)})
    assert resolved.config.policy == "keep"
    assert resolved.origin["policy"] == str(other)
    assert resolved.config.log == Config().log


def test_a_named_file_may_lie_in_the_home_directory(resolve, tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text('policy = "keep"')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(environ={"TIERS_CONFIG": "~/own.toml"}).config.policy == "keep"


def test_an_argument_of_none_counts_as_not_given(resolve):
    assert resolve({"hbm": None}).origin["hbm.capacity"] == "default"


def test_an_empty_variable_counts_as_not_set(resolve):
    assert resolve(environ={"TIERS_HBM": ""}).origin["hbm.capacity"] == "default"


def test_several_nvme_directories_are_separated_as_in_path(resolve, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    config = resolve(environ={"TIERS_NVME": "1GiB", "TIERS_NVME_PATH": f"{first}:{second}"}).config
    assert config.nvme.paths == (first, second)


def test_all_of_hbm_can_be_asked_for_where_a_file_says_less(resolve):
    files = {"project": '[hbm]\ncapacity = "1GiB"'}
    assert resolve(**files).config.hbm.capacity == GiB
    assert resolve(**files, environ={"TIERS_HBM": "all"}).config.hbm.capacity is None


def test_paths_do_not_depend_on_a_later_chdir(resolve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve({"run": "out"}).config.run == tmp_path / "out"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"project": '[hbm]\ncapacty = "1GiB"'},
            "./tiers.toml: unknown key 'hbm.capacty'; did you mean hbm.capacity?",
        ),
        ({"project": "[hmb]"}, "./tiers.toml: unknown key 'hmb'"),
        ({"project": "[hbm.x]"}, "./tiers.toml: unknown key 'hbm.x'"),
        ({"project": 'hbm = "1GiB"'}, "unknown key 'hbm'; did you mean hbm.capacity?"),
        ({"project": "[allocator]\nkind = 1"}, "allocator = {'kind': 1} (./tiers.toml) is not accepted"),
        ({"project": "hbm ="}, "./tiers.toml cannot be read"),
        ({"environ": {"TIERS_HMB": "1"}}, "environment: unknown variable TIERS_HMB; did you mean TIERS_HBM?"),
        ({"arguments": {"hmb": 1}}, "unknown argument 'hmb'; did you mean hbm?"),
        (
            {"arguments": {"policy": "best"}},
            "policy = 'best' (argument policy) is not accepted: it must be one of auto,",
        ),
        ({"arguments": {"policy": "capuchn"}}, "vdnn-dyn; did you mean capuchin?"),
        ({"environ": {"TIERS_ALLOCATOR": "on"}}, "it must be one of off, torch, pages"),
        ({"environ": {"TIERS_HBM": "lots"}}, "hbm.capacity = 'lots' (environment TIERS_HBM) is not accepted"),
        ({"environ": {"TIERS_DRAM": "-1GiB"}}, "dram.capacity = '-1GiB'"),
        ({"arguments": {"dram": -1}}, "dram.capacity = -1"),
        ({"project": "[hbm]\ncapacity = 1.5"}, "hbm.capacity = 1.5"),
        ({"project": "[hbm]\ncapacity = true"}, "hbm.capacity = True"),
        ({"environ": {"TIERS_HBM": "120%"}}, 'a share of what the program needs, such as "60%"; or "all"'),
        ({"environ": {"TIERS_DRAM": "60%"}}, "dram.capacity = '60%'"),
        ({"environ": {"TIERS_DRAM": "9" * 400}}, "it must be a size"),
        ({"project": f"[links]\nd2h = {'9' * 400}"}, "bytes per second, at least 1e6"),
        ({"project": '[nvme]\nchecksum = "maybe"'}, "it must be true or false"),
        ({"project": "[links]\nd2h = 55"}, "55e9 for 55 GB/s"),
        ({"project": "[links]\nd2h = 0"}, "bytes per second, at least 1e6"),
        ({"project": "[links]\nd2h = nan"}, "bytes per second, at least 1e6"),
        ({"project": "[nvme]\npaths = [1]"}, "nvme.paths = [1]"),
        (
            {"environ": {"TIERS_CONFIG": "/no/such.toml"}},
            "TIERS_CONFIG names /no/such.toml, which is not a file",
        ),
    ],
)
def test_what_is_wrong_gets_one_clear_line(resolve, given, expected):
    with pytest.raises(ConfigError) as error:
        resolve(**given)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_weaker_source_is_not_masked(resolve):
    with pytest.raises(ConfigError, match=r"\./tiers\.toml"):
        resolve(project='[hbm]\ncapacity = "lots"', environ={"TIERS_HBM": "1GiB"})


def test_an_nvme_capacity_needs_directories(resolve):
    with pytest.raises(ConfigError, match="TIERS_NVME_PATH"):
        resolve({"nvme": "1GiB"})


def test_an_nvme_capacity_of_zero_needs_none(resolve):
    assert resolve({"nvme": 0, "nvme_path": "/no/such"}).warnings == ()


def test_nvme_directories_without_a_capacity_are_said_to_be_unused(resolve, tmp_path):
    assert "nvme tier is off" in resolve({"nvme_path": tmp_path}).warnings[0]


def test_an_nvme_directory_must_exist(resolve, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        resolve({"nvme": "1GiB", "nvme_path": tmp_path / "absent"})


def test_an_nvme_directory_must_be_one(resolve, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        resolve({"nvme": "1GiB", "nvme_path": tmp_path / "file"})


def test_an_nvme_directory_is_named_once(resolve, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"/link is the same directory as .*/disk: name it once"):
        resolve({"nvme": "1GiB", "nvme_path": [tmp_path / "disk", tmp_path / "link"]})
    with pytest.raises(ConfigError, match="name it once"):
        resolve({"nvme": "1GiB", "nvme_path": [tmp_path / "disk", tmp_path / "disk"]})


def test_an_nvme_directory_must_be_writable(resolve, tmp_path, monkeypatch):
    # Root may write anywhere, so permissions cannot show it in a container.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="is not writable"):
        resolve({"nvme": "1GiB", "nvme_path": tmp_path})


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_an_nvme_directory_in_memory_is_allowed_but_said(resolve):
    (warning,) = resolve({"nvme": "1GiB", "nvme_path": "/dev/shm"}).warnings
    assert "/dev/shm is on tmpfs" in warning


def test_a_directory_that_is_not_there_is_an_error_only_where_a_program_trains(tmp_path):
    """A run is looked at on another machine than the one it is configured for."""
    environ = {"TIERS_NVME": "1GiB", "TIERS_NVME_PATH": str(tmp_path / "elsewhere")}
    with pytest.raises(ConfigError, match="does not exist"):
        load(environ=environ, cwd=tmp_path)
    (warning,) = load(environ=environ, cwd=tmp_path, trains=False).warnings
    assert "does not exist" in warning


# -------------------------------------------------------------------------------- what this user may not look at

TOO_LONG = "x" * 300


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A directory that this user may not look into; root may, so permissions alone cannot show it."""
    folder, stat = tmp_path / "closed", os.stat

    def refuse(path, *words, **names):
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *words, **names)

    monkeypatch.setattr(os, "stat", refuse)
    return folder


def test_a_user_config_that_this_user_may_not_read_counts_as_absent_and_is_said_once(resolve, closed):
    resolved = resolve({"hbm": "1GiB"}, environ={"XDG_CONFIG_HOME": str(closed)})
    assert resolved.config.hbm.capacity == GiB
    (warning,) = resolved.warnings
    assert f"{closed}/tiers/tiers.toml cannot be read: Permission denied; it counts as absent" in warning
    assert "XDG_CONFIG_HOME" in warning


def test_a_user_without_a_home_has_no_user_config(tmp_path, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    (warning,) = load(environ={}, cwd=tmp_path).warnings
    assert warning.startswith("the user config cannot be looked for: ")
    assert cache_directory().is_absolute()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"run": "~nosuchuser/x"}, "run = '~nosuchuser/x' (argument run) cannot be used"),
        ({"ledger": "~nosuchuser/x"}, "name an absolute path"),
        ({"config": TOO_LONG}, "TIERS_CONFIG names xxx"),
        ({"nvme": "1GiB", "nvme_path": TOO_LONG}, "cannot be used: File name too long; name another directory"),
        ({"nvme": "1GiB", "nvme_path": "{closed}/x"}, "closed/x cannot be used: Permission denied"),
        ({"config": "{closed}/tiers.toml"}, "tiers.toml, which cannot be read: Permission denied; name a file that"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_clear_line(resolve, closed, given, expected):
    given = {name: value.format(closed=closed) for name, value in given.items()}
    with pytest.raises(ConfigError) as error:
        resolve(given)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_project_s_file_that_cannot_be_looked_at_is_no_file_that_is_absent(closed):
    """It may hold the budget."""
    with pytest.raises(ConfigError, match=r"^\./tiers\.toml cannot be read: Permission denied; work in a directory"):
        load(environ={"XDG_CONFIG_HOME": "/nonexistent"}, cwd=closed)


def test_a_relative_path_where_the_directory_is_gone_is_one_clear_line(resolve, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match=r"run = 'out' .* cannot be used: No such file or directory; name an absolute"
    ):
        resolve({"run": "out"})


def test_a_run_directory_that_cannot_be_looked_at_is_refused(closed):
    for path in (closed / "run", closed.parent / TOO_LONG):
        with pytest.raises(
            ConfigError, match=r"TIERS_RUN: .* cannot be written: .*; name a directory that you may write"
        ):
            run_directory.find(Config(run=path))


@pytest.mark.parametrize(
    ("text", "key", "needed"),
    [
        ("run_force = true", "run_force", "run"),
        ("[monitor]\nenabled = false\nprobe = false", "monitor.probe", "monitor.enabled"),
        ("[monitor]\nenabled = false\ncalibration = 'x'", "monitor.calibration", "monitor.enabled"),
        ("[nvme]\nchecksum = false", "nvme.checksum", "nvme.capacity"),
        ("[nvme]\ngds = 'off'", "nvme.gds", "nvme.capacity"),
    ],
)
def test_a_key_that_has_no_effect_as_another_is_off_is_told(resolve, text, key, needed):
    told = f"{key} is set (./tiers.toml) and has no effect: {needed} is not set, or off"
    assert told in resolve(project=text).warnings


def test_a_strict_budget_that_is_a_share_begins_late_which_is_told(resolve):
    (told,) = resolve(project="[hbm]\ncapacity = '60%'\nstrict = true").warnings
    assert "begins with the first plan" in told and told.endswith("set bytes")
    assert resolve(project="[hbm]\ncapacity = '24GB'\nstrict = true").warnings == ()


def test_the_usual_value_of_a_key_that_has_no_effect_is_not_worth_a_word(resolve):
    assert resolve(project="run_force = false\n[nvme]\ngds = 'prefer'").warnings == ()


# ------------------------------------------------------------------------------ files of directories that are anybody's

GUARDED = {"run_force": "run_force = true", "nvme.checksum": "[nvme]\nchecksum = false", "ledger": 'ledger = "x"'}
LEADING = {
    "nvme.paths": '[nvme]\npaths = ["x"]',
    "monitor.calibration": '[monitor]\ncalibration = "x"',
    "run": 'run = "x"',
}


def test_guarded_are_the_keys_that_destroy_or_weaken():
    assert {key.name for key in KEYS if key.leads} == set(LEADING)
    assert {key.name for key in KEYS if key.guarded} == set(GUARDED)


@pytest.mark.parametrize(("name", "text"), LEADING.items())
def test_what_is_written_or_read_no_file_names_that_others_may_write_and_nobody_has_named(
    resolve, tmp_path, name, text
):
    (tmp_path / "tiers.toml").touch()
    (tmp_path / "tiers.toml").chmod(0o646)
    with pytest.raises(
        ConfigError, match=rf"^\./tiers\.toml: {name} is not taken from a file that others may write to"
    ):
        resolve(project=text)
    environ = {"TIERS_CONFIG": str(tmp_path / "tiers.toml")}
    assert name in resolve(environ=environ).origin


@pytest.mark.parametrize(("name", "text"), GUARDED.items())
def test_what_destroys_or_weakens_is_not_taken_from_a_file_that_others_may_write(resolve, tmp_path, name, text):
    file = tmp_path / "tiers.toml"
    file.touch()
    for mode in (0o664, 0o646):
        file.chmod(mode)
        expected = (
            rf"^\./tiers\.toml: {name} is not taken from a file that others may write to: chmod go-w .*/tiers\.toml"
        )
        with pytest.raises(ConfigError, match=expected):
            resolve(project=text)
    file.chmod(0o644)
    assert name in {key for key, origin in resolve(project=text).origin.items() if origin == "./tiers.toml"}


@pytest.mark.parametrize(("name", "text"), GUARDED.items())
def test_what_destroys_or_weakens_is_not_taken_from_another_user_s_file(resolve, monkeypatch, name, text):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=rf"{name} is not taken from a file that belongs to another user: set it in"):
        resolve(project=text)


def test_it_is_not_taken_from_them_whatever_names_the_file(resolve, tmp_path):
    (tmp_path / "other.toml").write_text("run_force = true")
    (tmp_path / "other.toml").chmod(0o666)
    with pytest.raises(ConfigError, match=r"other\.toml: run_force is not taken .*, or TIERS_RUN_FORCE in the envir"):
        resolve(environ={"TIERS_CONFIG": str(tmp_path / "other.toml")})
    (tmp_path / "home" / "tiers" / "tiers.toml").touch()
    (tmp_path / "home" / "tiers" / "tiers.toml").chmod(0o666)
    with pytest.raises(ConfigError, match="run_force is not taken"):
        resolve(user="run_force = true")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_nor_through_another_user_s_link_to_a_file_of_ours(resolve, tmp_path):
    (tmp_path / "ours.toml").write_text("run_force = true")
    link = tmp_path / "tiers.toml"
    link.symlink_to("ours.toml")
    assert resolve().config.run_force
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match="run_force is not taken from a file that belongs to another user"):
        resolve()


def test_all_else_may_come_from_anybody_s_file(resolve, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert resolve(project='[hbm]\ncapacity = "1GiB"').config.hbm.capacity == GiB


def test_a_file_larger_than_any_configuration_is_refused(resolve):
    with pytest.raises(ConfigError, match=r"^\./tiers\.toml is larger than 64 KiB"):
        resolve(project="#" * (64 << 10) + "\n")
    assert resolve(project="#" * (64 << 10)).config == Config()


MANY = ".".join("a" * 15_000)
EXPLODING = {
    "a key": f"{MANY} = 1",
    "a table": f"[{MANY}]",
    "an array of tables": f"[[{MANY}]]",
    "a key within braces": f"x = {{{MANY} = 1}}",
    "behind a text that ends in four quotes": f'x = {{y = """text"""", {MANY} = 1}}',
    "behind one that ends in five": f"x = {{y = '''text''''', {MANY} = 1}}",
    "behind a text that ends in a backslash": rf'x = {{y = "\\", {MANY} = 1}}',
    "behind a quote that is part of the text": rf'x = {{y = "\"", {MANY} = 1}}',
    "with spaces": " . ".join(["a"] * 15_000) + " = 1",
    "in quotes": ".".join(['"a"'] * 15_000) + " = 1",
    "brackets": "x = " + "[" * 60_000,
    "brackets on a line each": "x = " + "[\n" * 30_000,
    "braces": "x = " + "{a=" * 20_000,
    "quotes": '"' * 60_000,
    "single quotes": "'" * 60_000,
    "what may close but does not": '"""' + '\\"""' * 15_000 + "\\",
    "an endless number": "x = " + "9" * 60_000,
    "an endless hexadecimal number, which Python reads but does not write": "[hbm]\ncapacity = 0x" + "F" * 60_000,
    "many tables": "".join(f"[{'.'.join('abcdefgh')}.k{n}]\n" for n in range(2500)),
}


@pytest.mark.parametrize("text", EXPLODING.values(), ids=EXPLODING)
def test_no_file_takes_long_or_much_memory(resolve, text):
    """200 KB of dots took tomllib 23 GB."""
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"^\./tiers\.toml") as error:
            resolve(project=text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "larger" not in str(error.value)
    assert most < 32 << 20
    assert time.process_time() - began < 10


def test_where_a_file_has_too_much_is_told_by_the_line(resolve):
    text = 'log = """\n#\n"""\n# a.b.c\na' + ".a" * 17 + " = 1"
    with pytest.raises(ConfigError, match="line 5 has a name of more parts than any key"):
        resolve(project=text)


def test_dots_and_brackets_in_texts_and_comments_are_no_names(resolve):
    many = "." * 100 + "[" * 100
    config = resolve(project=f'run = \'{many}\'  # {many} " {many}\n#\'\nledger = "{many}\\"{many}"').config
    assert many in str(config.run)
    assert f'{many}"{many}' in str(config.ledger)
