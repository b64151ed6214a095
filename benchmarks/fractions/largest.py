"""The largest batch that each method trains at hardly any loss of speed per sample. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median

from benchmarks.fractions.cells import Method, code, commit, parse
from benchmarks.fractions.driver import LAST, OutOfTime
from benchmarks.fractions.processes import Failed, Setting, TooLong, Worker
from benchmarks.fractions.results import Record, Results

LOSS = 0.10  # of the ideal's best speed per sample


@dataclass
class Largest:
    """Searches over batches; the budget is all of the GPU's memory.

    A method is asked for as much as the plain program trains, and if it is fast enough there, for more: whoever trains
    no more needs none.

    Attributes
    ----------
    multiple, most
        Batches are multiples of the one and never above the other.
    first
        The one that the plain program is tried with first; 0: the smallest.
    """

    results: Results
    machine: str
    setting: Setting
    seconds: float
    timeout: float
    multiple: int = 8
    most: int = 1024
    first: int = 0
    start: Callable[[str, Setting, int], Worker] = Worker
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], object] = lambda line: print(line, flush=True)
    _end: float = field(default=0.0, init=False)

    def all(self, workload: str, methods: Sequence[str]) -> None:
        """Search for each method, and first of all for the ideal."""
        self._end = self.clock() + self.seconds - LAST
        try:
            plain = self._search(workload, "ideal", 0)
            if not plain:
                return  # there is no speed to compare with
            for name in methods:
                if name != "ideal":
                    self._search(workload, name, plain)
        except OutOfTime:
            self.say("the time is over: the next run goes on")

    def _search(self, workload: str, name: str, known: int) -> int:
        good = partial(self._good, workload, parse(name))
        found = known
        if not known or good(known):
            found = largest(good, self.multiple, self.most, known=known, first=self.first)
        self.say(f"{workload} {name}: largest batch {found if found > known else f'no more than {known}'}")
        return found

    def _good(self, workload: str, method: Method, batch: int) -> bool:
        speed, best = self._speed(workload, method, batch), best_speed(self._tried(), workload)
        return speed is not None and best is not None and speed >= (1 - LOSS) * best

    def _tried(self) -> list[Record]:
        codes = (code(ours=True), code(ours=False))
        return [r for r in self.results.tries if r["machine"] == self.machine and r["code"] in codes]

    def _speed(self, workload: str, method: Method, batch: int) -> float | None:
        """Samples a second; None if that batch cannot be trained."""
        known = self.results.find_try(self.machine, code(ours=method.ours), workload, method.name, batch)
        # What took too long once may be trained by whoever has more time.
        record = known if known and known.get("limit", self.timeout) >= self.timeout else None
        record = record or self._try(workload, method, batch)
        speed: float | None = record["speed"]
        return speed

    def _try(self, workload: str, method: Method, batch: int) -> Record:
        started = self.clock()
        left = self._end - started
        if left <= 0:
            raise OutOfTime
        record: Record = {
            "machine": self.machine,
            "code": code(ours=method.ours),
            "commit": commit(),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "workload": workload,
            "method": method.name,
            "batch": batch,
            "speed": None,
        }
        worker = self.start(workload, self.setting, batch)
        try:
            why_not = method.obstacle(cuda=self.machine != "cpu", trl=self.setting.trl is not None)
            if why_not is not None:
                raise Failed(why_not)
            measured = worker.ask(method.name, None, min(self.timeout, left))
        except Failed as failed:
            if isinstance(failed, TooLong) and left < self.timeout:
                raise OutOfTime from None
            record["reason"] = str(failed)
            if isinstance(failed, TooLong):
                record["limit"] = self.timeout
        else:
            step = median(measured["steps"])
            record |= {"speed": measured["batch"] / step, "step": step}
            record |= {name: measured[name] for name in ("reserved", "allocated", "sm_clock")}
        finally:
            worker.close()
        record["took"] = self.clock() - started
        self.results.put_try(record)
        said = f"{record['speed']:.2f} samples/s" if record["speed"] is not None else record["reason"]
        self.say(f"{workload} {method.name} batch {batch}: {said}  ({record['took']:.0f} s)")
        return record


def largest(good: Callable[[int], bool], multiple: int, most: int, *, known: int = 0, first: int = 0) -> int:
    """The largest batch that is good: grown by half while it is, then bisected; 0 if none is.

    Parameters
    ----------
    good
        Of a batch; what is not good is taken not to be good when larger.
    multiple
        That batches are multiples of.
    most
        No batch above is tried.
    known
        A batch that is good, a multiple. Without one the `first` is tried first, or what is a multiple below it.
    """

    def more(batch: int) -> int:
        return max(batch + multiple, batch * 3 // 2 // multiple * multiple)

    low, high = known, more(known) if known else max(multiple, first // multiple * multiple)
    while high <= most and good(high):
        low, high = high, more(high)
    high = min(high, most // multiple * multiple + multiple)
    while high - low > multiple:
        middle = (low + high) // 2 // multiple * multiple
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def best_speed(tries: Iterable[Record], workload: str) -> float | None:
    """The ideal's best speed, in samples a second, at whatever batch."""
    speeds = [
        r["speed"] for r in tries if (r["workload"], r["method"]) == (workload, "ideal") and r["speed"] is not None
    ]
    return max(speeds, default=None)
