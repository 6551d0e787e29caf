"""Models split over two processes by torchrun and gloo: all ranks choose the same and stop together."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import descant
from descant.errors import RankError
from descant.models.distributed import all_ranks_or_none, rank_group_of
from tests.e2e.devices import rank_script
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).resolve().parents[3]
Answers = list[dict[str, dict[str, Any]]]  # of each rank: part, then case


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Tiny]) -> Tiny:
    return tiny("llama")


@pytest.fixture(scope="module")
def answers(llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What both ranks answered; the processes are started once, also by several test processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "ranks"
    with (shared / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            done = subprocess.run(
                [*launch, rank_script.__file__, llama.folder, folder],
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            (folder / "log").write_text(done.stdout + done.stderr)
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    if not all(file.exists() for file in files):
        pytest.fail("the ranks did not come to their end:\n" + (folder / "log").read_text()[-3000:])
    return [json.loads(file.read_text()) for file in files]


def whole(llama: Tiny, rows: list[list[int]] = rank_script.PROMPTS, rank: int = 0, **how: Any) -> Any:
    """What the model answers where it is whole, with the chance of one rank."""
    torch.manual_seed(100 + rank)
    given = {"max_new_tokens": 8, "eos_token_id": None, **rank_script.padded(rows), **how}
    return descant.generate(llama.model, **given).tolist()


ALIKE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"rows": [rank_script.LEVEL[0]], "num_beams": 3},
    "ragged beams": {"num_beams": 3},
    "seeded": {"do_sample": True, "seed": 5},
    "by chance": {"do_sample": True},
    "looked up": {"rows": rank_script.LOOPED},
    "looked up, seeded": {"do_sample": True, "seed": 7},
    "beams by chance": {"do_sample": True, "num_beams": 2},
    "many by chance": {
        "rows": [rank_script.LEVEL[0]], "do_sample": True, "num_return_sequences": 150, "max_new_tokens": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("case", ALIKE)
def test_every_rank_gives_the_same_as_the_whole_model(
    answers: Answers, llama: Tiny, kind: str, case: str
) -> None:
    first, second = (answer[kind][case] for answer in answers)
    assert first == second
    assert first["tokens"] == whole(llama, **ALIKE[case])


@pytest.mark.parametrize("case", ALIKE)
def test_every_rank_gives_the_same_in_bfloat16(answers: Answers, case: str) -> None:
    first, second = (answer["half"][case] for answer in answers)
    assert first == second
    assert "tokens" in first


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_sampled_drafts_are_those_of_the_first_rank(answers: Answers, kind: str) -> None:
    first, second = (answer[kind]["guessed"] for answer in answers)
    assert first == second
    assert "tokens" in first


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_processors_that_draw_give_every_rank_the_same_scores(answers: Answers, kind: str) -> None:
    first, second = (answer[kind]["scores"] for answer in answers)
    assert first["tokens"] == pytest.approx(second["tokens"])


def test_greedy_and_beams_equal_the_models_own_generate(answers: Answers, llama: Tiny) -> None:
    for case, how in (("greedy", {}), ("beams", {"num_beams": 3})):
        given = rank_script.padded(ALIKE[case].get("rows", rank_script.PROMPTS))
        theirs = llama.model.generate(**given, **how, max_new_tokens=8, eos_token_id=None, do_sample=False)
        assert answers[0]["tensor"][case]["tokens"] == theirs.tolist()


# How long the longest sequence is where the first rank's word counts.
WORDS = {
    "other verdicts": 6,
    "verdict of the first": 6,
    "verdict of the second": 12,
    "time of the first": 5,
    "time of the second": 12,
    "beams end by verdict": 6,
}


@pytest.mark.parametrize("case", WORDS)
def test_the_first_ranks_clock_and_criteria_count(answers: Answers, case: str) -> None:
    first, second = (answer["apart"][case] for answer in answers)
    assert first == second
    assert {len(row) for row in first["tokens"]} == {WORDS[case]}


def test_the_first_ranks_seed_counts(answers: Answers, llama: Tiny) -> None:
    first, second = (answer["apart"]["other seeds"] for answer in answers)
    assert first == second
    assert first["tokens"] == whole(llama, do_sample=True, seed=0)


# Which rank fails of itself, and with what.
FAILURES = {
    "processor fails": (1, "OSError"),
    "processor fails first": (0, "OSError"),
    "criterion fails": (1, "OSError"),
    "streamer fails": (1, "OSError"),
    "streamer fails at the end": (0, "OSError"),
    "call inside a call fails": (1, "OSError"),
    "config is wrong": (1, "ConfigError"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_no_rank_goes_on_where_another_has_failed(answers: Answers, case: str) -> None:
    rank, error = FAILURES[case]
    assert answers[rank]["apart"][case]["error"] == error
    assert answers[1 - rank]["apart"][case] == {"error": "RankError", "rank": rank}


@pytest.mark.parametrize("case", ["prompts differ", "lengths differ"])
def test_ranks_with_different_requests_all_refuse(answers: Answers, case: str) -> None:
    assert [answer["apart"][case]["error"] for answer in answers] == ["InputError", "InputError"]


def test_streams_end_together(answers: Answers, llama: Tiny) -> None:
    parts = [answer["apart"] for answer in answers]
    rest = whole(llama, [rank_script.PROMPTS[0]], max_new_tokens=6)[0][2:]
    assert [part["stream"]["tokens"] for part in parts] == [rest, rest]
    assert [part["stream closed"]["tokens"] for part in parts] == [rest[:3], rest[:3]]
    assert parts[0]["stream closed by one"] == {"error": "RankError", "rank": 1}
    assert parts[1]["stream closed by one"] == {"tokens": rest[:3]}


def test_after_any_of_that_the_ranks_are_in_step(answers: Answers, llama: Tiny) -> None:
    sane = {"tokens": whole(llama, [rank_script.LEVEL[0]], max_new_tokens=3)}
    for answer in answers:
        after = {name: said for name, said in answer["apart"].items() if name.startswith("after: ")}
        assert len(after) == 19
        assert [name for name, said in after.items() if said != sane] == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["sharded", "wrapped"])
def test_sharded_weights_serve_ranks_with_prompts_of_their_own(
    answers: Answers, llama: Tiny, how: str, rank: int
) -> None:
    said, mine = answers[rank][how], [rank_script.PROMPTS, rank_script.LEVEL][rank]
    short, long = [4, 9][rank], [9, 4][rank]
    assert said["greedy"]["tokens"] == whole(llama, mine, max_new_tokens=short)
    assert said["asked for"] == said["greedy"]
    assert said["the other way"]["tokens"] == whole(llama, mine, max_new_tokens=long, num_beams=2)


@pytest.mark.parametrize("how", ["sharded", "wrapped"])
def test_a_rank_with_prompts_of_its_own_fails_alone(answers: Answers, llama: Tiny, how: str) -> None:
    first, second = (answer[how] for answer in answers)
    assert second["one fails"]["error"] == "ConfigError"
    assert first["one fails"]["tokens"] == whole(llama, max_new_tokens=6)
    assert first["one fails later"]["error"] == "OSError"
    assert second["one fails later"]["tokens"] == whole(llama, rank_script.LEVEL)


# ------------------------------------------------------------------------ in one process
def test_a_whole_model_has_no_ranks(llama: Tiny) -> None:
    assert rank_group_of(llama.model) is None
    with pytest.raises(OSError, match="as it is"), all_ranks_or_none(llama.model):
        raise OSError("as it is")


def test_synced_gpus_needs_processes(llama: Tiny) -> None:
    with pytest.raises(descant.InputError, match=r"synced_gpus.*torchrun"):
        descant.generate(llama.model, **rank_script.padded(rank_script.LEVEL), synced_gpus=True)
    quiet = whole(llama, rank_script.LEVEL)
    assert whole(llama, rank_script.LEVEL, synced_gpus=False) == quiet


def test_the_error_survives_a_pickle() -> None:
    again = pickle.loads(pickle.dumps(RankError(3)))
    assert (again.rank, str(again)) == (3, str(RankError(3)))
