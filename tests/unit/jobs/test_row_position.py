"""Rows from a position are the rows that a reading from the start gives, in every format."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant.jobs.source import JobSource, RowPosition, RowPositions
from descant.jobs.source_files import BLOCK_BYTES

FILES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.sampled_from('ab,"\n\r é\u2028\U0001f40d\x00'), max_size=6)
JSON_LINES = st.lists(
    st.one_of(
        st.builds(lambda text: json.dumps({"x": text}, ensure_ascii=False).encode(), TEXT),
        st.sampled_from(
            [b"", b"  ", b"\r", b"{torn", b"3", b"\xff\xfe", b'\xef\xbb\xbf{"x": 1}', b'{"x": 1}\r']
        ),
    ),
    max_size=12,
)
CSV_FIELD = st.one_of(
    TEXT.map(lambda text: '"' + text.replace('"', '""') + '"'),
    st.sampled_from(["1", "", "é", 'a"b', '"a"b', "\udcff", '"']),
)
CSV_ROWS = st.lists(
    st.one_of(st.lists(CSV_FIELD, min_size=2, max_size=2), st.lists(CSV_FIELD, max_size=3)), max_size=12
)


def seen(rows: Any) -> list[tuple[Any, ...]]:
    """What a row is, its error as text."""
    return [(row.index, row.id, dict(row.data), row.is_text, str(row.error)) for row in rows]


def check_positions(source: JobSource, shard_rows: int) -> None:
    """Every shard of a source begins at its position."""
    whole, summary = list(source), source.scan(shard_rows)
    assert summary.rows == len(whole)
    assert len(summary.positions) == -(-len(whole) // shard_rows)
    for shard, position in enumerate(summary.positions):
        position = RowPosition(*json.loads(json.dumps(position)))
        start = shard * shard_rows
        count = min(shard_rows, len(whole) - start)
        assert seen(source.rows_at(position, start, count)) == seen(whole[start : start + count])
        rest = source.rows_at(position, start, len(whole) - start)  # over the ends of files
        assert seen(rest) == seen(whole[start:])


def paths_of(folder: Path, contents: list[bytes], ending: str) -> list[str]:
    paths = []
    for number, content in enumerate(contents):
        (folder / f"{number}.{ending}").write_bytes(content)
        paths.append(str(folder / f"{number}.{ending}"))
    return paths


@FILES
@given(
    st.lists(JSON_LINES, min_size=1, max_size=3), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.data()
)
def test_json_lines(tmp_path: Path, files: list[list[bytes]], newline: bytes, ends: bool, data: Any) -> None:
    contents = [newline.join(lines) + (newline if ends else b"") for lines in files]
    check_positions(JobSource(paths_of(tmp_path, contents, "jsonl")), data.draw(st.integers(1, 5)))


@FILES
@given(
    st.lists(CSV_ROWS, min_size=1, max_size=3),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.booleans(),
    st.data(),
)
def test_csv(
    tmp_path: Path, files: list[list[list[str]]], newline: str, mark: bytes, ends: bool, data: Any
) -> None:
    texts = [
        newline.join(["x,y", *(",".join(row) for row in rows)]) + (newline if ends else "") for rows in files
    ]
    contents = [mark + text.encode("utf-8", "surrogateescape") for text in texts]
    check_positions(JobSource(paths_of(tmp_path, contents, "csv")), data.draw(st.integers(1, 5)))


def test_an_error_of_csv_does_not_depend_on_where_the_reading_began(tmp_path: Path) -> None:
    [path] = paths_of(tmp_path, [b'x\n1\n\n"2"3\n4\n'], "csv")
    source = JobSource([path])
    [row] = source.rows_at(source.scan(1).positions[1], 1, 1)
    assert str(row.error).endswith("got 'the row at byte 5'")


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """The blocks before that of a position may be anything of the same length."""
    padding = b"y" * 2 * BLOCK_BYTES
    [lines] = paths_of(tmp_path, [b'{"x": "%s"}\n{"x": 2}\n' % padding], "jsonl")
    [table] = paths_of(tmp_path, [b"x\n%s\n2\n" % padding], "csv")
    for path, expected in ((lines, 2), (table, "2")):
        source = JobSource([path])
        position = source.scan(1).positions[1]
        with open(path, "r+b") as file:
            file.seek(BLOCK_BYTES)  # after that of the header
            file.write(b"\xff" * (BLOCK_BYTES - 10))
        [row] = source.rows_at(position, 1, 1)
        assert row.data == {"x": expected}


def test_any_byte_of_a_source_decides_its_content(tmp_path: Path) -> None:
    many = b"".join(b'{"x": "%d"}\n' % number for number in range(100_000))
    paths = paths_of(tmp_path, [many, b'{"x": 2}', b""], "jsonl")
    whole = JobSource(paths).scan(1000)
    assert (whole.rows, JobSource(paths, "x").scan(1000).content) == (100_001, whole.content)
    for path in map(Path, paths):
        kept = path.read_bytes()
        for change in (kept + b" ", kept[:-1] + b" ", b" " + kept[1:], kept[:-1]):
            if change != kept:
                path.write_bytes(change)
                assert JobSource(paths).scan(1000).content != whole.content
        path.write_bytes(kept)
    assert JobSource(paths).scan(1000).content == whole.content


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40), st.sampled_from([0, 0, 7])), max_size=20))
def test_positions_are_kept_in_few_bytes(found: list[tuple[int, int, int]]) -> None:
    expected = [RowPosition(*one) for one in sorted(found)]
    positions = RowPositions()
    for one in expected:
        positions.append(one)
    assert list(positions) == expected
    if expected:
        assert positions[-1] == expected[-1]
    assert list(pickle.loads(pickle.dumps(positions))) == expected
    with pytest.raises(IndexError):
        positions[len(expected)]


def test_a_position_takes_few_bytes() -> None:
    positions = RowPositions()
    tracemalloc.start()
    for number in range(100_000):
        positions.append(RowPosition(number // 50_000, number * 1000))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 100_000 * 30
