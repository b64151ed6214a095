"""Feeds hostile inputs to what reads them: ``python -m tests.unit.fuzz.run KIND SEED FIRST END``, a process of its own.

Ends with 0 if each was taken, or refused in one line; else it says which it was, and leaves the files of that one.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.unit.fuzz import mutate
from tests.unit.modelled import gpt
from tests.unit.numbers_of_a_run import STATS
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.cli.main import main
from torch_tiers.config import ConfigError, load
from torch_tiers.config_keys import BY_ENV
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.printable import printable

SECONDS = 5  # of the processor, for one input
MEMORY = 1 * GiB  # for one input

TOML = """\
policy = "auto"
allocator = "pages"
run = "run"
[hbm]
capacity = "20GiB"
[dram]
capacity = "64GiB"
[nvme]
capacity = "1TiB"
paths = ["/tmp", "."]
gds = "off"
checksum = true
[monitor]
enabled = true
[links]
d2h = 55e9
h2d = 55e9
"""
GOOD = ("20GiB", "auto", "1", "off", "/tmp", "55e9", "run", "true")

MODEL = gpt(blocks=1)
CHAIN = chain([4096, MiB, 0, 300 * MiB, 40 * MiB])
PLANS = [POLICIES[name](MODEL, 8 * GiB, PCIE_GEN5) for name in ("move", "flashneuron", "checkpoint")]
QUICK = sorted({*POLICIES} - {"autotm", "swapadvisor"})  # which take a second or more by the clock


class TooSlow(BaseException):
    """An input took longer than any may."""


def configs(place: Path, rng: Random) -> str:
    """A tiers.toml, and variables."""
    file = place / "tiers.toml"
    content = mutate.text(TOML, rng).encode(errors="surrogatepass")
    file.write_bytes(mutate.garbled(content, rng) if rng.random() < 0.1 else content)
    names = rng.sample(sorted(BY_ENV), rng.choice((0, 0, 1, 3)))
    environ = {name: mutate.word(rng.choice(GOOD), rng) for name in names}
    (place / "environ.json").write_text(json.dumps(environ))
    home = {"HOME": str(place), "XDG_CONFIG_HOME": str(place / "none")}
    try:
        load(environ={**home, **environ}, cwd=place, trains=rng.random() < 0.5)
    except ConfigError as error:
        printable(str(error)).encode()  # as it is said
        return "refused"
    return "taken"


def traces(place: Path, rng: Random) -> str:
    """A trace that `tiers plan` is given."""
    good = rng.choice((MODEL, CHAIN))
    data = json.loads(trace_json.write(good))
    content = mutate.written(_odd_trace(data, rng) if rng.random() < 0.5 else _other(data, rng), rng)
    packed = rng.random() < 0.2
    file = place / ("trace.json.gz" if packed else "trace.json")
    file.write_bytes(mutate.garbled(gzip.compress(content), rng) if packed and rng.random() < 0.5 else content)
    budget = rng.choice(("0", "1MiB", "6GiB", "40GiB"))
    words = ["plan", str(file), "--budget", budget, "--policy", ",".join(rng.sample(QUICK, 3))]
    if rng.random() < 0.5:
        words += ["--dram", rng.choice(("0", "1GiB"))]
    if rng.random() < 0.3:
        words += ["--explain", good.sites[0].key]
    return _verb(words + ["--json"] * (rng.random() < 0.5))


def reports(place: Path, rng: Random) -> str:
    """What `tiers report` reads: numbers, plan and trace."""
    files: dict[str, Any] = {"stats.json": STATS, "plan.json": json.loads(rng.choice(PLANS).to_json())}
    files["trace.json"] = json.loads(trace_json.write(MODEL))
    hostile = rng.choice(sorted(files))
    for name, data in files.items():
        content = mutate.written(_other(data, rng), rng) if name == hostile else json.dumps(data).encode()
        (place / name).write_bytes(content)
    return _verb(["report", str(place)] + ["--json"] * (rng.random() < 0.5))


def _odd_trace(data: Any, rng: Random) -> Any:
    """One that no program leaves, though there is little in it that the door could object to."""
    sites, idents = data["sites"], [site["storage"] for site in data["sites"]]
    nbytes = (0, 1, 4096, 3 * MiB, 5 * GiB, 1 << 44)
    for _ in range(rng.choice((1, 2, 8, 40))):
        what = rng.randrange(8)
        if what == 0:
            rng.choice(sites)["nbytes"] = rng.choice(nbytes)
        elif what == 1:
            rng.choice(sites)["storage"] = rng.choice(idents)
        elif what == 2:
            rng.choice(sites)["uses"].clear()
        elif what == 3:
            data["seconds"] = rng.choice((0.0, 1e-9, 1e9))
        elif what == 4 and data["times"]:
            data["times"][rng.randrange(len(data["times"]))] = rng.choice((0.0, -1.0, 1e9))
        elif what == 5 and data["others"]:
            data["others"][rng.randrange(len(data["others"]))] = rng.choice(nbytes)
        elif what == 6:
            source, made = sorted(rng.choices(idents, k=2))
            data["recipes"][str(made)] = {
                "op": "Op",
                "inputs": [source],
                "seconds": rng.choice((0.0, 1e9)),
            }
        else:
            data["held"][str(rng.choice(idents))] = rng.randrange(data["positions"] + 1)
    _close_gaps(data)
    return data


def _close_gaps(data: Any) -> None:
    """Have a trace add up again: without what a change to its sites has left of nobody's."""
    sites, known = data["sites"], {site["storage"] for site in data["sites"]}
    order = {at: n for n, at in enumerate(sorted(at for site in sites for at in (site["birth"], *site["uses"])))}
    for site in sites:
        site["birth"], site["uses"] = order[site["birth"]], [order[at] for at in site["uses"]]
    last = data["positions"] = len(order)
    data["times"], data["others"] = data["times"][:last], data["others"][: last + 1]
    data["held"] = {ident: min(end, last) for ident, end in data["held"].items() if int(ident) in known}
    data["recipes"] = {
        ident: recipe
        for ident, recipe in data["recipes"].items()
        if known >= {int(ident), *recipe["inputs"]} and int(ident) not in recipe["inputs"]
    }


def _other(data: Any, rng: Random) -> Any:
    return (mutate.nearly if rng.random() < 0.4 else mutate.mutated)(data, rng)


def _verb(words: list[str]) -> str:
    out, said = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = main(words)
        out.flush()
    lines = said.getvalue().count("\n")
    if code not in (0, 1, 2) or lines != (code == 2):
        raise AssertionError(f"exit code {code}, and {lines} lines on stderr: {said.getvalue()[:500]}")
    return ("taken", "no plan", "refused")[code]


KINDS: dict[str, Callable[[Path, Random], str]] = {"configs": configs, "traces": traces, "reports": reports}


def run(kind: str, seed: int, numbers: range) -> int:
    """Feed so many inputs of a kind; exit code 1 at the first that does harm."""
    signal.signal(signal.SIGPROF, _too_slow)
    _bound_memory()
    for name in [name for name in os.environ if name.startswith("TIERS_")]:
        del os.environ[name]
    ends: Counter[str] = Counter()
    for number in numbers:
        place = Path(tempfile.mkdtemp(prefix="tiers-fuzz-"))
        os.chdir(place)
        os.environ["XDG_CONFIG_HOME"] = str(place / "none")
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            ends[KINDS[kind](place, Random(f"{seed}:{number}"))] += 1
        except (Exception, TooSlow, SystemExit):
            traceback.print_exc()
            print(f"{kind}, seed {seed}, input {number}, left in {place}", file=sys.stderr)
            return 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        os.chdir("/")
        shutil.rmtree(place)
    print(json.dumps(ends))
    return 0


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _bound_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


if __name__ == "__main__":
    kind, seed, first, end = sys.argv[1], *map(int, sys.argv[2:5])
    raise SystemExit(run(kind, seed, range(first, end)))
