"""Every documented criterion against the reference's, and what the reference's stop strings miss."""

import random
import time

import pytest
import torch
import transformers

from descant.decoding import stopping as criteria
from descant.tokenization.token_bytes import TokenBytes
from tests.support import pretrained, wordpiece

ROWS = 600  # of each criterion, at least


def reference_criteria(reference, cases):
    return reference.ask("criteria", cases=cases)


def rows(draw, count, width, top):
    return torch.tensor([[draw.randrange(top) for _ in range(width)] for _ in range(count)])


def test_length(reference):
    draw = random.Random(0)
    cases = [
        {
            "name": "MaxLengthCriteria",
            "arguments": {
                "max_length": draw.randint(0, 9),
                "max_position_embeddings": draw.choice([None, 9]),
            },
            "calls": [rows(draw, draw.randint(1, 4), draw.randint(1, 10), 50) for _ in range(3)],
        }
        for _ in range(ROWS // 3)
    ]
    for case, theirs in zip(cases, reference_criteria(reference, cases), strict=True):
        ours = criteria.MaxLengthCriteria(**case["arguments"])
        for ids, verdict in zip(case["calls"], theirs, strict=True):
            assert torch.equal(ours(ids, None), verdict)
            assert ours(ids, None).dtype == verdict.dtype


def test_time(reference):
    draw, now = random.Random(1), time.time()
    cases = [
        {
            "name": "MaxTimeCriteria",
            "arguments": {
                "max_time": draw.choice([0, 1e6, 1e6 * draw.random()]),
                "initial_timestamp": now - draw.choice([1e7, -1e7, 1e6 * draw.random()]),
            },
            "calls": [rows(draw, draw.randint(1, 4), 2, 50)],
        }
        for _ in range(ROWS)
    ]
    seen = set()
    for case, theirs in zip(cases, reference_criteria(reference, cases), strict=True):
        # Minutes may pass between both answers: none of these is that close.
        over = time.time() - case["arguments"]["initial_timestamp"] - case["arguments"]["max_time"]
        if abs(over) < 600:
            continue
        ours = criteria.MaxTimeCriteria(**case["arguments"])(case["calls"][0], None)
        assert torch.equal(ours, theirs[0])
        seen |= set(ours.tolist())
    assert seen == {True, False}


def test_end_tokens(reference):
    draw = random.Random(2)
    cases = []
    for _ in range(ROWS):
        some = [draw.randrange(12) for _ in range(draw.randint(1, 4))]
        eos = draw.choice([some[0], some, torch.tensor(some)])
        calls = [rows(draw, draw.randint(1, 5), draw.randint(1, 4), 12)]
        cases.append({"name": "EosTokenCriteria", "arguments": {"eos_token_id": eos}, "calls": calls})
    seen = set()
    for case, theirs in zip(cases, reference_criteria(reference, cases), strict=True):
        ours = criteria.EosTokenCriteria(**case["arguments"])(case["calls"][0], None)
        assert torch.equal(ours, theirs[0])
        seen |= set(ours.tolist())
    assert seen == {True, False}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """`loaded(name)`: a tokenizer and its folder."""
    kept = {}

    def get(name):
        if name not in kept:
            if name == "wordpiece":
                folder = tmp_path_factory.mktemp(name)
                wordpiece.tokenizer().save_pretrained(folder)
            else:
                folder = pretrained.folder(name)
            kept[name] = transformers.PreTrainedTokenizerFast.from_pretrained(folder), str(folder)
        return kept[name]

    return get


class Near:
    """Rows of tokens around a stop string, cut at any place, with tokens that reach over its ends."""

    def __init__(self, tokenizer, strings, draw):
        self.tokenizer, self.strings, self.draw = tokenizer, strings, draw
        known = TokenBytes.from_tokenizer(tokenizer).bytes
        special = set(tokenizer.all_special_ids)
        self.plain = [at for at, one in enumerate(known) if whole(one) and at not in special]
        self.exact, self.begin, self.end = {}, {}, {}
        for text in strings:
            parts = {text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
            for at in self.plain:
                if known[at] in parts:
                    self.exact.setdefault(known[at], []).append(at)
            for size in range(1, len(text) + 1):
                head, tail = text[:size].encode(), text[-size:].encode()
                self.begin[text[-size:]] = [at for at in self.plain if known[at].startswith(tail)]
                self.end[text[:size]] = [at for at in self.plain if known[at].endswith(head)]

    def row(self, width):
        """Some tokens, the stop string more often than not."""
        draw, text = self.draw, self.draw.choice(self.strings)
        cuts = sorted(draw.sample(range(1, len(text)), min(draw.randint(0, 3), len(text) - 1)))
        parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if draw.random() < 0.3 else []
        for at, part in enumerate(parts if not ids else []):
            over = self.end if at == 0 and len(parts) > 1 else self.begin if at == len(parts) - 1 else {}
            some = over.get(part) if draw.random() < 0.6 else None
            some = some or self.exact.get(part.encode())
            ids += [draw.choice(some)] if some else self.spelled(part)
        chance = draw.random()
        if chance < 0.15:
            ids.append(draw.choice(self.plain))
        elif chance < 0.3:
            ids[draw.randrange(len(ids))] = draw.choice(self.plain)
        ids = draw.choices(self.plain, k=width) + ids
        return ids[-width:]

    def spelled(self, part):
        """A part letter by letter, as far as there are tokens for them."""
        letters = [self.exact.get(letter.encode()) for letter in part]
        return [self.draw.choice(some) for some in letters if some] or [self.draw.choice(self.plain)]


def whole(one):
    """Whether the bytes are text: the reference supports no others."""
    return bool(one) and "\ufffd" not in one.decode(errors="replace")


STRINGS = {
    "smollm2": [
        ["stop"],
        ["\n\nHuman:", "</answer>"],
        ["\n\n\n", "e"],
        ["aa", "aba", "abab"],
        ["café", "hers"],
        ["def f(x):\n    return"],
    ],
    "gemma3-270m": [["stop", "日本", "\n\n"]],
    "flan-t5-small-titles": [["stop"], ["the end", "é"], ["aa", "aba"]],
    "wordpiece": [["stop"], ["the end", "end of"], ["!"], ["s"], ["stopped at", "topper"], ["last stop"]],
}


@pytest.mark.ci_cases("smollm2", "flan-t5-small-titles", "wordpiece")
@pytest.mark.parametrize("name", STRINGS)
def test_stop_strings(name, reference, loaded):
    tokenizer, folder = loaded(name)
    draw = random.Random(name)
    each = -(-ROWS // len(STRINGS[name]))
    cases = []
    for strings in STRINGS[name]:
        near = Near(tokenizer, strings, draw)
        widths = 1, 4, draw.randint(5, 40)
        calls = [torch.tensor([near.row(width) for _ in range(each // 3 + 1)]) for width in widths]
        arguments = {"stop_strings": strings}
        cases.append(
            {"name": "StopStringCriteria", "tokenizer": folder, "arguments": arguments, "calls": calls}
        )
    for case, theirs in zip(cases, reference_criteria(reference, cases), strict=True):
        ours = criteria.StopStringCriteria(tokenizer, case["arguments"]["stop_strings"])
        verdicts = [ours(ids, None) for ids in case["calls"]]
        known = TokenBytes.from_tokenizer(tokenizer).bytes
        for ids, mine, other in zip(case["calls"], verdicts, theirs, strict=True):
            for row, a, b in zip(ids.tolist(), mine.tolist(), other.tolist(), strict=True):
                assert a == b, (case["arguments"], a, b, [known[at] for at in row])
        share = torch.cat(verdicts).float().mean()
        assert 0.05 < share < 0.95, f"{case['arguments']}: {share:.2f} of the rows end"


def verdict(reference, loaded, name, strings, ids):
    """Both verdicts on one row: the reference's and ours."""
    tokenizer, folder = loaded(name)
    ids = torch.tensor([ids])
    arguments = {"stop_strings": strings}
    case = {"name": "StopStringCriteria", "tokenizer": folder, "arguments": arguments, "calls": [ids]}
    theirs = reference_criteria(reference, [case])[0][0]
    return theirs.item(), criteria.StopStringCriteria(tokenizer, strings)(ids, None).item()


@pytest.mark.parametrize(("name", "text"), [("smollm2", "𐍈s"), ("smollm2", "क्ष!"), ("stories15m", "𐍈s")])
def test_a_character_of_several_tokens_is_never_seen(name, text, reference, loaded):
    """To the reference a token that is part of a character is a replacement mark, and no text."""
    tokenizer, _ = loaded(name)
    ids = tokenizer(f"x {text}", add_special_tokens=False)["input_ids"]
    assert verdict(reference, loaded, name, [text], ids) == (False, True)


def test_a_length_beyond_the_model_is_let_pass(reference):
    """The reference goes on and leaves a line in a log; ours goes on and warns."""
    arguments, ids = {"max_length": 9, "max_position_embeddings": 4}, torch.zeros(1, 6, dtype=torch.long)
    case = {"name": "MaxLengthCriteria", "arguments": arguments, "calls": [ids]}
    assert reference_criteria(reference, [case])[0][0].tolist() == [False]
    with pytest.warns(UserWarning, match="reached the 4 positions of the model"):
        assert criteria.MaxLengthCriteria(**arguments)(ids, None).tolist() == [False]
