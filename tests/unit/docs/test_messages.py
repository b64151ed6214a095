"""The guides' pages of messages have each that a user can meet, and none that the code does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.said import Said, everything, matches, said

GUIDES = Path(__file__).parents[3] / "docs/guides"
PAGES = ("messages.md", "messages-of-commands.md")
ELSEWHERE = {
    "allocator/host/ledger.py: text": "of `_say_once`",
    "allocator/nvme/cufile.py: _FORKED": "met by who forks within a transfer alone",
    "allocator/nvme/volume.py: '%s'": "of `to_say`",
    "migrator/controller/in_force.py: '%s'": "of `_warn_once`",
    "migrator/controller/in_force.py: f'{why}; {stays}'": "of PlanningFailed, and `stays`",
    "migrator/model/fields.py: f'{where} {what}'": "a reason within others",
    "migrator/runtime/devices.py: shared.beside": "of `TakesAll`",
    "migrator/runtime/devices.py: way.nbytes": "of `TakesAll`",
    "migrator/saved/dropped.py: f'{error} {FOR_RECOMPUTING}'": "of replays.py, with advice",
    "tiers/autoload.py: warning": "of config.py and config_sources.py",
    "tiers/cli/bench.py: f'{error.filename or command[0]}: {error.strerror}'": "what the system says",
    "tiers/cli/plan.py: f'{part.strip()!r}: {RATE.accepts}'": "config_keys.py",
    "tiers/cli/run.py: f'{command[0]}: {error.strerror}'": "what the system says",
    "tiers/cli/verb.py: str(error)": "sizes.py",
    "tiers/session.py: warning": "of config.py and config_sources.py",
}
"""What is said by an expression without words, and where these come from. A new one needs a look at the pages."""


def messages(page: str) -> list[str]:
    """The messages of a page: what stands between backticks in the first column of its tables."""
    rows = [line.split("|")[1] for line in (GUIDES / page).read_text().splitlines() if line.startswith("| ")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def found() -> Said:
    return said()


def test_each_message_of_a_page_is_in_the_code() -> None:
    known = everything()
    told = [message for page in PAGES for message in messages(page)]
    assert len(told) > 100
    assert [message for message in told if not any(matches(message, text) for text in known)] == []


def test_each_message_tells_enough_to_be_found() -> None:
    told = [message for page in PAGES for message in messages(page)]
    assert [message for message in told if len(re.sub(r"[^a-z]", "", message.lower())) < 6] == []
    assert sorted(told) == sorted(set(told))


def test_each_warning_and_error_is_on_a_page(found: Said) -> None:
    told = [message for page in PAGES for message in messages(page)]
    assert len(found.texts) > 100
    missing = {where: text for where, text in found.texts.items() if not any(matches(each, text) for each in told)}
    assert missing == {}


def test_it_is_known_where_words_come_from_that_are_written_elsewhere(found: Said) -> None:
    assert found.unknown == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("message", "text", "same"),
    [
        ("a ... b", "it says a ... b, and more", True),
        ("a ... b", "a c b", False),
        ("... b", "a b", True),
        ("a ...", "a b", True),
        ("a: ... b", "a: ... ...... b", True),
    ],
)
def test_a_message_leaves_values_out(message: str, text: str, same: bool) -> None:
    assert matches(message, text) == same
