"""Rows of Parquet, of Arrow streams and files, and of dataset folders."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant import InputError, MissingExtra
from descant.jobs.source import JobSource
from tests.unit.jobs.test_row_position import check_positions

FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GROUPS = st.lists(st.integers(0, 7), max_size=5)  # rows of each row group or record batch


def batches_of(sizes: list[int], start: int = 0, schema: pa.Schema | None = None) -> list[pa.RecordBatch]:
    """Record batches whose rows are numbered."""
    schema = schema or pa.schema([("k", pa.int64()), ("text", pa.string())])
    found = []
    for size in sizes:
        rows = [{"k": row, "text": f"é {row}" if row % 3 else None} for row in range(start, start + size)]
        found.append(pa.RecordBatch.from_pylist(rows, schema))
        start += size
    return found


def write_parquet(path: Path, batches: list[pa.RecordBatch]) -> str:
    schema = batches[0].schema if batches else batches_of([0])[0].schema
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(batch, max(1, batch.num_rows))
    return str(path)


def write_arrow(path: Path, batches: list[pa.RecordBatch], is_stream: bool) -> str:
    schema = batches[0].schema if batches else batches_of([0])[0].schema
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(str(path), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return str(path)


def write(path: Path, table: pa.Table) -> str:
    """A table in the format of a file's name."""
    if path.suffix == ".parquet":
        return write_parquet(path, table.to_batches())
    return write_arrow(path, table.to_batches(), path.suffix == ".arrow")


@FILES
@given(
    st.lists(GROUPS, min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["parquet", "stream", "file"]),
)
def test_shards_begin_at_their_positions(
    tmp_path: Path, files: list[list[int]], rows: int, kind: str
) -> None:
    paths, start = [], 0
    for number, sizes in enumerate(files):
        batches = batches_of(sizes, start)
        if kind == "parquet":
            paths.append(write_parquet(tmp_path / f"{number}.parquet", batches))
        else:
            paths.append(write_arrow(tmp_path / f"{number}.arrow", batches, kind == "stream"))
        start += sum(sizes)
    for source in (JobSource(paths), JobSource(paths, "k"), JobSource(paths, "k", columns=("text",))):
        assert [row.data["k"] for row in source] == list(range(start))
        assert all(row.error is None for row in source)
        check_positions(source, rows)


@FILES
@given(GROUPS, st.integers(1, 6))
def test_a_stream_with_dictionaries_is_read_from_its_start(
    tmp_path: Path, sizes: list[int], rows: int
) -> None:
    words = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("k", pa.int64()), ("text", words), ("deep", pa.list_(words))])
    path = write_arrow(tmp_path / "a.arrow", batches_of(sizes or [0], schema=schema), is_stream=True)
    source = JobSource([path])
    assert [row.data["text"] for row in source] == [
        f"é {row}" if row % 3 else None for row in range(sum(sizes))
    ]
    check_positions(source, rows)


def test_large_batches_are_read_in_parts(tmp_path: Path) -> None:
    batches = batches_of([2500, 1, 3000])
    for path in (
        write_parquet(tmp_path / "a.parquet", batches),
        write_arrow(tmp_path / "a.arrow", batches, is_stream=True),
        write_arrow(tmp_path / "b.feather", batches, is_stream=False),
    ):
        source = JobSource([path], columns=("k",))
        positions = source.scan(700).positions
        for shard, position in enumerate(positions):
            count = min(700, 5501 - shard * 700)
            rows = list(source.rows_at(position, shard * 700, count))
            assert [row.data for row in rows] == [
                {"k": row} for row in range(shard * 700, shard * 700 + count)
            ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_values_are_those_of_json(tmp_path: Path, name: str) -> None:
    day = datetime.date(2026, 1, 2)
    zone = datetime.UTC
    values: dict[str, tuple[Any, Any, Any]] = {
        "int": (pa.uint8(), 7, 7),
        "big": (pa.uint64(), 2**64 - 1, 2**64 - 1),
        "half": (pa.float16(), np.float16(1.5), 1.5),
        "float": (pa.float32(), 0.25, 0.25),
        "flag": (pa.bool_(), True, True),
        "text": (pa.large_string(), "é", "é"),
        "none": (pa.null(), None, None),
        "list": (pa.list_(pa.list_(pa.int32())), [[1], [], None], [[1], [], None]),
        "struct": (
            pa.struct([("role", pa.string()), ("days", pa.list_(pa.date32()))]),
            {"role": "user", "days": [day]},
            {"role": "user", "days": ["2026-01-02"]},
        ),
        "map": (pa.map_(pa.string(), pa.int64()), {"a": 1}, {"a": 1}),
        "time": (pa.time64("us"), datetime.time(1, 2, 3), "01:02:03"),
        "stamp": (pa.timestamp("ms"), datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        "nanoseconds": (pa.timestamp("ns"), datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        "zoned": (
            pa.timestamp("us", "UTC"),
            datetime.datetime(2026, 1, 2, tzinfo=zone),
            "2026-01-02T00:00:00+00:00",
        ),
        "decimal": (pa.decimal128(10, 2), decimal.Decimal("1.50"), "1.50"),
    }
    if name != "a.arrow":  # read in another way
        values["word"] = (pa.dictionary(pa.int8(), pa.string()), "w", "w")
    arrays = {key: pa.array([value, None], kind) for key, (kind, value, _) in values.items()}
    first, second = JobSource([write(tmp_path / name, pa.table(arrays))])
    assert (first.error, second.error) == (None, None)
    assert first.data == {key: expected for key, (_, _, expected) in values.items()}
    assert second.data == dict.fromkeys(values)
    assert json.loads(json.dumps(first.data)) == first.data
    assert not first.is_text


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (pa.binary(), b"x", "'bytes'"),
        (pa.struct([("bytes", pa.binary()), ("path", pa.string())]), {"bytes": b"x"}, "'bytes'"),
        (pa.duration("s"), 3, "'timedelta'"),
        (pa.map_(pa.int64(), pa.int64()), {1: 2}, "'a map whose keys are no texts'"),
        (pa.timestamp("ns"), 1, "nanosecond"),
    ],
)
def test_a_row_with_another_value_is_refused_alone(tmp_path: Path, kind: Any, value: Any, found: str) -> None:
    table = pa.table({"x": pa.array([None, value, None], kind), "text": ["a", "b", "c"]})
    path = write(tmp_path / "a.arrow", table)
    rows = list(JobSource([path]))
    assert [row.error is None for row in rows] == [True, False, True]
    assert str(rows[1].error).startswith("`x` must hold values that JSON has, got ")
    assert found.lower() in str(rows[1].error).lower()
    assert "leave the column out" in str(rows[1].error)
    assert [row.data for row in JobSource([path], columns=("text",))] == [{"text": one} for one in "abc"]


def test_text_that_is_no_utf8_is_refused_alone(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
    )
    first, second = JobSource([write(tmp_path / "a.parquet", pa.table({"x": texts}))])
    assert (first.data, first.error) == ({"x": "a"}, None)
    assert "`x` must hold values that JSON has" in str(second.error)


def test_columns_that_are_nowhere_leave_rows_without_data(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow", "a.feather"):
        path = write(tmp_path / name, pa.table({"x": [1, 2], "y.z": [3, 4]}))
        assert [row.data for row in JobSource([path], columns=("no",))] == [{}, {}]
        assert [row.data for row in JobSource([path], columns=("y.z",))] == [{"y.z": 3}, {"y.z": 4}]
        assert [row.error is None for row in JobSource([path], "no")] == [False, False]
        assert JobSource([path], "no").scan(1).rows == 2


def test_ids_are_unique_and_all_bytes_decide_the_content(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow", "a.feather"):
        path = write(tmp_path / name, pa.table({"k": ["a", "b", "a"], "image": [b"", b"", b""]}))
        with pytest.raises(InputError, match=r"\(rows 0 and 2 share one\)"):
            JobSource([path], "k").scan(1)
        whole = JobSource([path]).scan(1).content
        assert JobSource([path]).scan(1).content == whole
        if name == "a.arrow":
            with open(path, "ab") as file:  # what follows a stream counts too
                file.write(b"more")
            assert JobSource([path]).scan(1).content != whole


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.parquet", "a Parquet file"), ("a.arrow", "an Arrow stream"), ("b.arrow", "an Arrow file")],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = Path(write(tmp_path / name, pa.table({"x": ["ship"] * 5000})))
    if name == "b.arrow":
        write_arrow(path, batches_of([5000]), is_stream=False)
    whole = path.read_bytes()
    for broken in (
        b"",
        b"nothing of it",
        whole[: len(whole) // 2],
        whole[:-20] if kind != "an Arrow stream" else b"x",
    ):
        path.write_bytes(broken)
        for read in (lambda: JobSource([str(path)]).scan(10), lambda: list(JobSource([str(path)]))):
            with pytest.raises(InputError, match=r"`source` must be an? (Parquet|Arrow) (file|stream)"):
                read()
    path.write_bytes(whole)
    assert JobSource([str(path)]).scan(10).rows == 5000


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(InputError, match="must have columns of different names"):
        list(JobSource([write(tmp_path / "a.arrow", table)]))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write(tmp_path / name, pa.table({"x": [1]}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for read in (lambda: JobSource([path]).scan(10), lambda: list(JobSource([path]))):
        with pytest.raises(MissingExtra, match=r"pip install descant\[parquet\]"):
            read()


# ------------------------------------------------------------------------ dataset folders
def save_dataset(folder: Path, files: list[list[int]]) -> None:
    """What `Dataset.save_to_disk` writes; the order of the files is that of state.json."""
    folder.mkdir(parents=True)
    names, start = [], 0
    for number, sizes in enumerate(files):
        names.append(f"data-{len(files) - number:05}-of-{len(files):05}.arrow")
        write_arrow(folder / names[-1], batches_of(sizes, start), is_stream=True)
        start += sum(sizes)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_dataset_folder_stands_for_its_files(tmp_path: Path) -> None:
    save_dataset(tmp_path / "data", [[3, 4], [], [5]])
    source = JobSource([str(tmp_path / "data")])
    assert [row.data["k"] for row in source] == list(range(12))
    check_positions(source, 5)
    source.scan(5)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"k": -1}\n')
    assert [row.data["k"] for row in JobSource([str(lines), str(tmp_path / "data")])] == list(range(-1, 12))
    save_dataset(tmp_path / "empty", [])  # which has no files
    assert JobSource([str(tmp_path / "empty")]).scan(1).rows == 0
    assert list(JobSource([str(tmp_path / "empty")])) == []


def test_a_folder_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save_dataset(tmp_path / "train", [[1]])
    with pytest.raises(InputError) as caught:
        JobSource([str(tmp_path)]).scan(1)
    assert "must be one split of a dataset" in str(caught.value)
    assert str(caught.value).endswith(f"give {tmp_path}/train or {tmp_path}/test")
    assert JobSource([str(tmp_path / "train")]).scan(1).rows == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r"must be a file, or a folder that `Dataset.save_to_disk` wrote \(without state.json\)"),
        ("[", r"wrote \(state.json: "),
        ("[]", r"wrote \(state.json is no object\)"),
        ("{}", "must have the names of its files in state.json"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "must have the names of its files"),
        ('{"_data_files": [{"filename": ".."}]}', "must have the names of its files"),
        ('{"_data_files": [3]}', "must have the names of its files"),
        ('{"_data_files": 3}', "must have the names of its files"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, state: str | None, message: str) -> None:
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(InputError, match=message):
        JobSource([str(tmp_path)]).scan(1)


# ------------------------------------------------------------------------ jobs
def test_a_job_reads_only_the_columns_that_it_uses(make_job, loaded, tmp_path: Path) -> None:
    table = pa.table({"text": [f"ship {row}" for row in range(5)], "k": list("abcde"), "image": [b"x"] * 5})
    path = write(tmp_path / "a.parquet", table)
    used = make_job(source=path, id_column="k", sink=str(tmp_path / "used"))
    assert (used.run(*loaded).rows, used.run(*loaded).failed) == (5, 0)
    kept = make_job(source=path, keep_columns="image", sink=str(tmp_path / "kept"))
    assert kept.run(*loaded).failed == 5
    errors = (tmp_path / "kept" / "shard-00000.errors.jsonl").read_text()
    assert "`image` must hold values that JSON has, got 'bytes'" in errors


def test_the_columns_of_a_job(make_job) -> None:
    job = make_job(override_columns="top_k", keep_columns=["name"], template="{a b}{{c}} {d}")
    assert job.source_columns == {"a b", "d", "generation_config", "top_k", "name"}
    assert make_job(template=None).source_columns == {"prompt", "messages", "ids", "generation_config"}


def test_a_dataset_folder_is_a_source_of_a_job(make_job, loaded, tmp_path: Path) -> None:
    save_dataset(tmp_path / "data", [[4], [3]])
    job = make_job(source=str(tmp_path / "data"), template="{k}")
    assert job.run(*loaded).rows == 7
    with pytest.raises(InputError, match="or folders that exist, got"):
        make_job(source=str(tmp_path / "nowhere"))
