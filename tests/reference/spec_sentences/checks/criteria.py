"""Stopping criteria."""

from __future__ import annotations

import time

import torch

from tests.reference.spec_sentences.library import heard, refused
from tests.reference.spec_sentences.sentence import CRITERIA, NOTES, STRATEGIES, UTILITIES, page

says, notes, older, api = page(UTILITIES), page(NOTES), page(STRATEGIES), page(CRITERIA)

IDS = torch.tensor([[5, 6, 7], [5, 6, 2]])


@says("sc_abstract", 1541, "StoppingCriteria is abstract: its call is not implemented.")
def _(lib):
    class Mine(lib.StoppingCriteria):
        pass

    with refused(NotImplementedError):
        Mine()(IDS, None)


@says("sc_maxlen", 1556, "MaxLengthCriteria counts all tokens and answers row by row.")
def _(lib):
    return [lib.MaxLengthCriteria(limit)(IDS, None) for limit in (2, 3, 4)]


@says("sc_maxpos", 1562, "MaxLengthCriteria takes the model's maximum length.")
def _(lib):
    made = lib.MaxLengthCriteria(max_length=4, max_position_embeddings=8)
    assert made.max_position_embeddings == 8
    return made(IDS, None)


@api("sc_maxpos2", 79, "Rows beyond the model's maximum length give a warning and go on.")
def _(lib):
    with heard() as said:
        found = lib.MaxLengthCriteria(max_length=9, max_position_embeddings=2)(IDS, None)
    assert any("maximum length" in line or "positions of the model" in line for line in said), said
    return found


@says("sc_time", 1568, "MaxTimeCriteria counts from the time it is made.")
def _(lib):
    made = lib.MaxTimeCriteria(max_time=0.02)
    first = made(IDS, None)
    time.sleep(0.04)
    return first, made(IDS, None)


@says(
    "sc_time_initial",
    1575,
    "The beginning may be given as `initial_time`.",
    theirs="The argument is `initial_timestamp`.",
)
def _(lib):
    assert bool(lib.MaxTimeCriteria(max_time=1.0, initial_time=time.time() - 5)(IDS, None).all())


@api("sc_time_ts", 101, "The beginning may be given as `initial_timestamp`.")
def _(lib):
    return lib.MaxTimeCriteria(max_time=1.0, initial_timestamp=time.time() - 5)(IDS, None)


@older("sc_no_time", 86, "A `max_time` of 0 is one step.")
def _(lib):
    return lib.model().generate(lib.ids(), max_time=0.0, max_new_tokens=20, eos_token_id=None)


@older("sc_maxtime", 86, "`max_time` ends generation early.")
def _(lib):
    found = lib.model().generate(lib.ids(), max_time=1e-6, max_new_tokens=200, eos_token_id=None)
    assert found.shape[1] < 20


@says("sc_eos", 1716, "EosTokenCriteria takes one id, a list or a tensor.")
def _(lib):
    return [lib.EosTokenCriteria(given)(IDS, None) for given in (2, [2, 7], torch.tensor([7]))]


@says("sc_eos_gen", 1713, "By default the config's end token ends rows.")
def _(lib):
    plain = lib.model().generate(lib.ids(), max_new_tokens=8, eos_token_id=None)
    end = int(plain[0, 9])
    found = lib.model().generate(lib.ids(), max_new_tokens=8, eos_token_id=end)
    assert int(found[0, -1]) == end
    assert found.shape[1] <= 10
    return found


@says("sc_eos_several", 1716, "Several end tokens end rows.")
def _(lib):
    plain = lib.model().generate(lib.ids(), max_new_tokens=8, eos_token_id=None)
    return lib.model().generate(
        lib.ids(), max_new_tokens=8, eos_token_id=[int(plain[0, 8]), int(plain[0, 10])]
    )


@says("sc_list", 1548, "StoppingCriteriaList ends a row that any member ends, and is a list.")
def _(lib):
    made = lib.StoppingCriteriaList([lib.EosTokenCriteria(2), lib.MaxLengthCriteria(9)])
    assert isinstance(made, list)
    assert len(made) == 2
    return made(IDS, None)


@api("sc_list_max", 507, "The list knows its maximum length.")
def _(lib):
    found = [lib.StoppingCriteriaList(), lib.StoppingCriteriaList([lib.MaxLengthCriteria(9)])]
    return [one.max_length for one in found]


@says("sc_custom", 1539, "A criterion of one's own ends generation.")
def _(lib):
    class Three(lib.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    found = lib.model().generate(
        lib.ids(rows=2),
        stopping_criteria=lib.StoppingCriteriaList([Three()]),
        max_new_tokens=9,
        eos_token_id=None,
    )
    assert found.shape[1] == 9
    return found


@says("sc_rows", 1539, "A criterion may end some rows and not others.")
def _(lib):
    class Odd(lib.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 2 == 1

    return lib.model().generate(
        lib.ids(rows=4), stopping_criteria=lib.StoppingCriteriaList([Odd()]), max_new_tokens=6
    )


@notes("sc_notes", 51, "A criterion outside of a list, with a length and an iterator, may answer one bool.")
def _(lib):
    class Sql(lib.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return len(input_ids[0]) > 8 and input_ids[0][-1] >= 0

        def __len__(self):
            return 1

        def __iter__(self):
            yield self

    found = lib.model().generate(lib.ids(), stopping_criteria=Sql(), max_new_tokens=9, eos_token_id=None)
    assert found.shape[1] == 9
    return found


def watcher(lib, seen):
    """A list with a criterion that records what it is given as scores."""

    class Watch(lib.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(scores)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return lib.StoppingCriteriaList([Watch()])


@says("sc_scores", 1543, "A criterion sees the scores of all steps where the call returns them.")
def _(lib):
    seen = []
    out = lib.model().generate(
        lib.ids(),
        stopping_criteria=watcher(lib, seen),
        max_new_tokens=3,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert [len(one) for one in seen] == [1, 2, 3]
    assert torch.allclose(seen[-1][-1], out.scores[-1], atol=1e-5)
    return list(seen[-1])


@says("sc_noscores", 1543, "Without returned scores a criterion sees None.")
def _(lib):
    seen = []
    lib.model().generate(lib.ids(), stopping_criteria=watcher(lib, seen), max_new_tokens=2, eos_token_id=None)
    return seen


@says("sc_byhand", 1556, "A MaxLengthCriteria may be given by hand.")
def _(lib):
    given = lib.StoppingCriteriaList([lib.MaxLengthCriteria(9)])
    with heard():
        return lib.model().generate(lib.ids(), stopping_criteria=given, max_new_tokens=9, eos_token_id=None)


@api("sc_validate", 521, "`validate_stopping_criteria` adds a maximum length where there is none.")
def _(lib):
    found = lib.validate_stopping_criteria(lib.StoppingCriteriaList(), 9)
    return found.max_length
