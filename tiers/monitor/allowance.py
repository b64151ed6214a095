"""How much of a core may be taken. Pure."""

from __future__ import annotations


class Allowance:
    """Processor time that is a part of one core on average, of which some may be taken at once.

    To wait after every look for as long as it took, so many times over, is the same on average; but who sees little for
    seconds after the one look that is dear, as the first is, sees a load that begins then too late.

    Parameters
    ----------
    part
        Of one core.
    most
        Processor seconds that may be saved up.
    """

    def __init__(self, part: float, most: float) -> None:
        self._part = part
        self._most = self._left = most
        self._at: float | None = None

    def take(self, spent: float, now: float) -> float:
        """Take so many processor seconds; for how many seconds to take none.

        Parameters
        ----------
        now
            By a clock that does not go back.
        """
        since = 0.0 if self._at is None else now - self._at
        self._at = now
        self._left = min(self._left + self._part * since, self._most) - spent
        return max(-self._left / self._part, 0.0)
