"""Suffix lookup against a search by hand, over rows that grow, fork, move, join and leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from descant.core.context import RowParams, columns_from_rows
from descant.core.rows import Rows
from descant.decoding.speculative import lookup as suffix_lookup
from descant.decoding.speculative.lookup import SuffixLookup
from tests.unit.decoding.speculative.rig import copied

GARBAGE = 77  # after the final tokens; must never be matched or copied


@dataclass
class Line:
    """The expected state of one row."""

    request: int
    prompt: int
    text: list[int]
    wanted: int = 9
    salt: bytes | None = None


def rows_of(lines):
    length = torch.tensor([len(line.text) for line in lines])
    tokens = torch.full((len(lines), int(length.max()) + 2), GARBAGE)
    for row, line in enumerate(lines):
        tokens[row, : len(line.text)] = torch.tensor(line.text, dtype=torch.long)
    zeros = torch.zeros_like(length)
    prompt = torch.tensor([line.prompt for line in lines])
    request = torch.tensor([line.request for line in lines])
    own = [{"suffix_lookup_num_tokens": line.wanted} for line in lines]
    salts = [{"suffix_lookup_salt": line.salt} if line.salt else {} for line in lines]
    own = [one | salt for one, salt in zip(own, salts, strict=True)]
    params = RowParams(columns_from_rows(own))
    return Rows(tokens, length, zeros, zeros.clone(), prompt, request, zeros.clone(), {"params": params})


def drafted(drafter, lines, parents, most):
    """What is tried for each row, after the promises of a proposal have been looked at."""
    rows, most = rows_of(lines), torch.tensor(most)
    drafter.commit(torch.tensor(parents), rows.length)
    return drafts_of(drafter, rows, most)


def drafts_of(drafter, rows, most):
    return copied(drafter.draft(rows, most, None), rows, most)


def alone(text, most=9, shared=False):
    return drafted(SuffixLookup(shared), [Line(0, 0, text)], [-1], [most])[0]


# ------------------------------------------------------------------- by hand
def sought(text, where):
    """How long the longest end of `text` is that stands in `where` with a token behind it, and the latest."""
    for size in range(min(len(text), len(where)), 0, -1):
        for end in range(len(where) - 1, size - 1, -1):
            if where[end - size : end] == text[-size:]:
                return size, end
    return 0, -1


def searched(text, most, generations=()):
    """What followed the longest end that occurred before: in the row, else in texts, the youngest first."""
    size, end = sought(text, text)
    best = text
    for texts in generations:
        for other in reversed(texts):
            longer = sought(text, other)
            if longer[0] > size:
                (size, end), best = longer, other
    if best is not text:
        return best[end : end + min(most, size)]
    copied = list(text)
    for _ in range(min(most, size)):
        copied.append(copied[end + len(copied) - len(text)])
    return copied[len(text) :]


@dataclass
class Kept:
    """What earlier requests wrote, as the archive should hold it: two generations, the younger first."""

    room: int
    texts: list[list[list[int]]] = field(default_factory=lambda: [[]])

    def add(self, text):
        half = self.room // 2
        text = text[-(half - 1) :]
        if text:
            if sum(len(one) + 1 for one in self.texts[0]) + len(text) + 1 > half:
                self.texts = [[], self.texts[0]]
            self.texts[0].append(text)


# ------------------------------------------------------------------- one row
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 8))
def test_a_row_is_drafted_as_it_is_by_hand(text, most):
    assert alone(text, most) == searched(text, most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 9, 8, 1, 2], [4, 9]),  # the latest, and as many as were matched
        ([1, 2, 5, 7, 2, 6, 8, 1, 2], [5, 7]),  # the longest, though a shorter one is later
        ([4, 7, 7, 7], [7, 7]),  # on into what was copied
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_which_occurrence_is_copied(text, expected):
    assert alone(text) == expected
    assert alone(text, shared=True) == expected


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), max_size=6))
def test_long_runs_are_matched_as_far_as_they_go(runs):
    # Their shortest ends may be copied from an occurrence that is not the latest, but never from none.
    text = [token for token, count in runs for _ in range(count)]
    size, _ = sought(text, text)
    followed = alone(text, most=1)
    assert len(followed) == min(1, size)
    if size:
        places = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        assert followed[0] in {text[end] for end in places}


def test_an_automaton_grows_in_step_with_its_text():
    automaton = suffix_lookup.SuffixAutomaton()
    text = [0] * 300 + [1, 0] * 300 + [at * at % 7 for at in range(600)]
    for at, token in enumerate(text, 1):
        automaton.extend([token])
        assert len(automaton.suffix_link) <= 2 * at


def test_only_new_tokens_are_read():
    drafter = SuffixLookup(False)
    line = Line(0, 3, [1, 2, 3, 4, 1, 2])
    assert drafted(drafter, [line], [-1], [9]) == [[3, 4]]
    line.text = [*line.text, 3]
    rows = rows_of([line])
    rows.tokens[0, :6] = GARBAGE
    drafter.commit(torch.tensor([0]), rows.length)
    assert drafts_of(drafter, rows, torch.tensor([9])) == [[4, 1, 2]]


# ------------------------------------------------------------------- many rows
class Table:
    """A drafter and its rows, moved at random; everything it should know is known here, too."""

    def __init__(self, draw, shared):
        self.draw = draw
        self.letter = st.integers(0, draw(st.integers(0, 2)))
        self.room = draw(st.sampled_from([8, 24, 400]))
        kind = type("Small", (SuffixLookup,), {"SHARED_CAPACITY": self.room})
        self.drafter = kind(shared)
        self.kept = Kept(self.room) if shared else None
        self.lines, self.left, self.requests = [], {}, 0

    def tokens(self, low, high):
        return self.draw(st.lists(self.letter, min_size=low, max_size=high))

    def _write(self, line):
        if line.wanted > 0:
            self.left.setdefault(line.request, []).append(line.text[line.prompt :])

    def round(self):
        """Some rows go on, once, twice or not at all, some come; those of ended requests are closed."""
        before, self.lines, parents = self.lines, [], []
        # A row of 30 tokens has no more ends than recorded for a token.
        places = [place for place, line in enumerate(before) if len(line.text) < 26]
        whence = self.draw(st.lists(st.sampled_from(places), max_size=5)) if places else []
        running = {before[parent].request for parent in whence}
        late = self.draw(st.booleans())
        ended = {line.request for line in before} - running
        if not late:
            self._close(before, ended)
        for parent in whence:
            old = before[parent]
            self.lines.append(Line(old.request, old.prompt, old.text + self.tokens(1, 3), old.wanted))
            parents.append(parent)
        for _ in range(self.draw(st.integers(0 if whence else 1, 2))):
            prompt = self.tokens(0, 8)
            wanted = self.draw(st.sampled_from([-1, 2, 9]))
            self.lines.append(Line(self.requests, len(prompt), prompt, wanted))
            parents.append(-1)
            self.requests += 1
        order = self.draw(st.permutations(range(len(parents))))
        self.lines, parents = [self.lines[at] for at in order], [parents[at] for at in order]
        self.check(before, parents)
        if late:
            self._close([], ended)

    def check(self, before, parents):
        most = [self.draw(st.integers(0, 6)) for _ in parents]
        found = drafted(self.drafter, self.lines, parents, most)
        for place, line in enumerate(before):
            if place not in parents and line is not None:
                self._write(line)
        for line, room, guess in zip(self.lines, most, found, strict=True):
            generations = self.kept.texts if self.kept else ()
            assert guess == searched(line.text, max(0, min(room, line.wanted)), generations)

    def _close(self, standing, ended):
        numbers = sorted(ended)
        self.drafter.remove_requests(numbers)
        for place, line in enumerate(standing):
            if line.request in ended:
                self._write(line)
                standing[place] = None
        for number in numbers:
            for text in self.left.pop(number, ()):
                if self.kept:
                    self.kept.add(text)


@pytest.mark.parametrize("shared", [False, True])
@given(data=st.data())
def test_rows_that_fork_move_join_and_leave_are_drafted_as_by_hand(data, shared):
    rows = Table(data.draw, shared)
    for _ in range(data.draw(st.integers(1, 6))):
        rows.round()


def test_a_row_that_does_not_use_it_tries_nothing_and_is_not_read():
    drafter = SuffixLookup(True)
    lines = [Line(0, 0, [1, 2, 1, 2], wanted=-1), Line(1, 0, [1, 2, 1, 2], wanted=1)]
    assert drafted(drafter, lines, [-1, -1], [9, 9]) == [[], [1]]
    assert [row is None for row in drafter._rows] == [True, False]
    rows = rows_of(lines)
    rows = rows.replace(columns={"params": RowParams(columns_from_rows([{"pad_token_id": 0}] * 2))})
    bare = SuffixLookup(True)  # no limit given: as many as allowed
    bare.commit(torch.tensor([-1, -1]), rows.length)
    assert bare.draft(rows, torch.tensor([9, 9]), None).drafts.tolist() == [[1, 2], [1, 2]]


# ------------------------------------------------------------------- earlier requests
def wrote(drafter, text, request=0, prompt=0, salt=None):
    drafted(drafter, [Line(request, prompt, text, salt=salt)], [-1], [0])
    drafter.remove_requests([request])


def test_outputs_of_a_request_help_later_ones_only_if_shared():
    for shared, expected in ((True, [8, 9]), (False, [])):
        drafter = SuffixLookup(shared)
        wrote(drafter, [5, 6, 7, 8, 9, 5], prompt=1)
        assert drafted(drafter, [Line(1, 2, [6, 7])], [-1], [9]) == [expected]
        # Its prompt is not what it wrote.
        assert drafted(drafter, [Line(2, 2, [4, 5])], [-1], [9]) == [[]]


@pytest.mark.parametrize(
    ("texts", "row", "expected"),
    [
        ([[3, 4, 5, 6]], [4, 9, 4], [9]),  # its own past, unless another has a longer match
        ([[3, 4, 5, 6]], [4, 9, 3, 4], [5, 6]),
        ([[1, 2, 3, 4], [7, 8]], [1, 2, 3], [4]),  # a copy ends where the text it comes from ends
        ([[1, 2, 3, 4], [7, 8]], [3, 4], []),  # nothing follows `3 4`, and `4` neither
        ([[1, 2, 3, 4], [3, 5, 6, 7, 8]], [1, 2, 3, 5], [6, 7]),
    ],
)
def test_what_earlier_texts_give_a_row(texts, row, expected):
    drafter = SuffixLookup(True)
    for text in texts:
        wrote(drafter, text)
    assert drafted(drafter, [Line(9, 0, row)], [-1], [9]) == [expected]


def test_the_shared_index_is_bounded_and_evicts_the_oldest():
    drafter = type("Small", (SuffixLookup,), {"SHARED_CAPACITY": 64})(True)
    for number in range(200):
        wrote(drafter, [10 * number + at for at in range(9)], request=number)
        sizes = [len(one.tokens) for one in drafter._shared_indexes.get(b"").generations]
        assert sum(sizes) <= 64
        assert not drafter._finished_texts
    assert sum(sizes) > 32
    lines = [Line(500, 0, [1990, 1991, 1992]), Line(501, 0, [0, 1, 2])]
    assert drafted(drafter, lines, [-1, -1], [2, 2]) == [[1993, 1994], []]
    wrote(drafter, list(range(5000, 5100)), request=502)
    assert drafted(drafter, [Line(503, 0, [5097, 5098])], [-1], [2]) == [[5099]]
    assert drafted(drafter, [Line(504, 0, [5001, 5002])], [-1], [2]) == [[]]


def test_a_row_is_sought_anew_when_the_archive_has_grown():
    drafter = SuffixLookup(True)
    wrote(drafter, [3, 4])
    lines = [Line(1, 0, [8, 9]), Line(2, 0, [8, 9, 1, 5, 6, 7])]
    assert drafted(drafter, lines, [-1, -1], [9, 9]) == [[], []]
    drafter.remove_requests([2])
    assert drafted(drafter, [Line(1, 0, [8, 9, 1])], [0], [9]) == [[5, 6, 7]]


# ------------------------------------------------------------------- salts
def test_a_request_learns_only_from_those_of_its_salt():
    drafter = SuffixLookup(True)
    wrote(drafter, [5, 6, 7, 8, 9], salt=b"ann")
    wrote(drafter, [5, 6, 3, 4, 2], request=1)
    lines = [
        Line(2, 0, [5, 6], salt=b"ann"),
        Line(3, 0, [5, 6], salt=b"bob"),
        Line(4, 0, [5, 6]),
    ]
    assert drafted(drafter, lines, [-1, -1, -1], [9, 9, 9]) == [[7, 8], [], [3, 4]]
    forks = [Line(2, 0, [5, 6, 7], salt=b"ann"), Line(3, 0, [5, 6, 7], salt=b"bob")]
    assert drafted(drafter, [forks[0], forks[1], forks[1]], [0, 1, 1], [9, 9, 9]) == [[8, 9], [], []]


def test_all_salts_together_are_bounded():
    drafter = type("Small", (SuffixLookup,), {"SHARED_CAPACITY": 64})(True)
    for number in range(50):
        wrote(drafter, [10 * number + at for at in range(9)], request=number, salt=bytes([number]))
        assert drafter._shared_indexes.num_tokens <= 64
    assert len(drafter._shared_indexes) == 6
    lines = [Line(100, 0, [0, 1], salt=bytes([0])), Line(101, 0, [490, 491], salt=bytes([49]))]
    assert drafted(drafter, lines, [-1, -1], [9, 9]) == [[], [492, 493]]
