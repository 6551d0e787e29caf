"""Drafts of a model with another tokenizer equal those of decoding and encoding everything."""

import random
from collections import Counter

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from descant.core.context import RowParams, columns_from_rows
from descant.core.interfaces import DraftContext, KVSpan, ModelTraits
from descant.core.records import ForwardOutput
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.speculative.cross_tokenizer import (
    RetokenizingDrafter,
    SharedVocabDrafter,
    check_draft_model,
)
from descant.decoding.speculative.token_alignment import ByteTokenizer, LookbehindWindows, TokenTranslator
from descant.engine.planning.planner import as_model, new_cache
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.stores.dense import DenseStore
from descant.tokenization.token_bytes import TokenBytes
from tests.support import pretrained, wordpiece

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big red ball. It's hers, isn't it? \"Can I play with you?\" she asked her "
    "friend Tom.\n\nTom said, \"Yes! Let's play together, it's 3 o'clock.\" They ran and ran until they "
    "were tired, and then they went home to eat unbelievably good cookies."
)
FACT = (
    "Water boils at 100 degrees Celsius (212 F) at sea level; the boiling point falls with pressure. "
    "def area(r):\n    return 3.14159 * r ** 2  # of a circle\n"
)
FOREIGN = "Zoë paid 5 € for naïve 日本語の本 — and 한국어 👩‍👧 too. Привет, мир! Then she smiled."
PAIRS = [("smollm2", "stories15m"), ("stories15m", "minimind2-small"), ("smollm2", "minimind2-small")]


@pytest.fixture(scope="module")
def tokenizers():
    return pretrained.tokenizer


def rows_of(sequences, **params):
    """A table of these rows; a parameter given as a list has one for each."""
    count = len(sequences)
    tokens = torch.zeros(count, max(map(len, sequences)) + 2, dtype=torch.long)
    for at, one in enumerate(sequences):
        tokens[at, : len(one)] = torch.tensor(one, dtype=torch.long)
    length, nothing = torch.tensor([len(one) for one in sequences]), torch.zeros(count, dtype=torch.long)
    given = {
        "do_sample": 0,
        "seed": -1,
        "noise_row": list(range(count)),
        "eos_token_ids": [[2]] * count,
    } | params
    lines = [
        {name: value[at] if isinstance(value, list) else value for name, value in given.items()}
        for at in range(count)
    ]
    columns = {"params": RowParams(columns_from_rows(lines))}
    return Rows(tokens, length, nothing, nothing, length, torch.arange(count), nothing, columns)


AID = DraftContext(lambda rows, logits: logits, DenseStore())


def commit_and_draft(drafter, parents, sequences, most, aid=AID, **params):
    """Commit and draft: the drafts of each row, and the proposal."""
    rows = rows_of(sequences, **params)
    drafter.commit(torch.tensor(parents), rows.length)
    most = torch.tensor(most if isinstance(most, list) else [most] * len(sequences))
    before = rows.tokens.clone()
    found = drafter.draft(rows, most, aid)
    known = torch.arange(before.shape[1]) < rows.length[:, None]
    assert torch.equal(rows.tokens[known], before[known])
    if found.drafts is None:
        return [[] for _ in sequences], found
    assert int(found.num_drafts.max()) == found.width
    assert bool((found.num_drafts <= most).all())
    return [line[:n] for line, n in zip(found.drafts.tolist(), found.num_drafts.tolist(), strict=True)], found


def built(pair, real, tokenizers, kind=RetokenizingDrafter, **options):
    target, assistant = pair
    model = as_model(real(assistant).model)
    theirs = tokenizers(assistant)
    return kind(
        model, new_cache(model.traits), tokenizer=tokenizers(target), assistant_tokenizer=theirs, **options
    )


# ------------------------------------------------------------------------ everything decoded and encoded anew
class Naive:
    """The same by text alone, from the beginning and without a cache. None: it is not defined."""

    def __init__(self, target, assistant, model):
        self.target, self.assistant, self.model = target, assistant, model
        self.begun = []  # what stands for the target's first token, where the assistant puts none by itself

    def continued(self, text, count):
        """The assistant's tokens for a text, and those that it puts after them."""
        ids = self.begun + self.assistant(text)["input_ids"]
        new = []
        for _ in range(count):
            with torch.no_grad():
                new.append(int(self.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
            if new[-1] in self.assistant.all_special_ids:
                break
        return ids, new

    def drafts(self, tokens, most):
        text = self.target.decode(tokens, skip_special_tokens=True)
        ids, new = self.continued(text, most)
        ends = new[-1] == self.assistant.eos_token_id
        said = [one for one in new if one not in self.assistant.all_special_ids]
        whole = self.assistant.decode(ids + said, skip_special_tokens=True)
        if "\ufffd" in whole or not whole.startswith(text):
            return None
        found = self.target(whole)["input_ids"]
        if tokens[0] == self.target.bos_token_id != found[0]:
            found = [tokens[0], *found]
        if found[: len(tokens)] != list(tokens):
            return None
        return (found[len(tokens) :] + [self.target.eos_token_id] * ends)[:most]


@pytest.mark.ci_cases("smollm2<-stories15m-fact", "stories15m<-minimind2-small-story")
@pytest.mark.parametrize("text", [STORY, FACT], ids=["story", "fact"])
@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_drafts_are_those_of_encoding_everything_anew(pair, text, real, tokenizers):
    drafter = built(pair, real, tokenizers)
    target = tokenizers(pair[0])
    naive = Naive(target, tokenizers(pair[1]), real(pair[1]).model)
    whole, chance = target(text)["input_ids"], random.Random(0)
    if pair[1] == "minimind2-small":  # which ends at once what does not begin so
        naive.begun = [1]
        whole = whole if whole[0] == 1 else [1, *whole]
    at, parents, compared, tried = chance.randint(3, 12), [-1], 0, 0
    while at < min(len(whole), 60):
        most = chance.randint(1, 4)
        (found,), _ = commit_and_draft(drafter, parents, [whole[:at]], most)
        wanted = naive.drafts(whole[:at], most)
        if wanted is not None:
            assert found == wanted, (at, target.decode(whole[:at][-8:]))
            compared += 1
            tried += len(found)
        at, parents = at + chance.randint(1, 3), [0]
    assert compared > 12
    assert tried > 12


def test_rows_that_fork_leave_join_and_keep_part_of_what_was_tried(real, tokenizers):
    pair = PAIRS[0]
    drafter = built(pair, real, tokenizers)
    target = tokenizers("smollm2")
    naive = Naive(target, tokenizers("stories15m"), real("stories15m").model)
    texts = [target(text)["input_ids"] for text in (STORY, FACT, STORY[94:], "The cat sat. " * 12)]
    chance = random.Random(3)
    rows, parents, guesses = [texts[0][:9], texts[1][:4]], [-1, -1], None
    seen = Counter()
    for step in range(20):
        most = [chance.choice([0, 1, 2, 4]) for _ in rows]
        guesses, _ = commit_and_draft(drafter, parents, rows, most)
        for row, found, limit in zip(rows, guesses, most, strict=True):
            wanted = naive.drafts(row, limit) if limit else []
            if wanted is not None:
                assert found == wanted, step
                seen["compared"] += 1
        following, parents = [], []
        for place, (row, found) in enumerate(zip(rows, guesses, strict=True)):
            if chance.random() < 0.12 and len(rows) > 1:
                seen["left"] += 1
                continue
            for _ in range(1 + (chance.random() < 0.2 and len(rows) < 6)):
                kept = found[: chance.randint(0, len(found))]
                seen["partly"] += 0 < len(kept) < len(found)
                said = texts[chance.randrange(4)]
                then = chance.randrange(len(said) - 3)
                following.append(row + kept + said[then : then + chance.randint(1, 2)])
                parents.append(place)
        seen["forked"] += len(parents) - len(set(parents))
        if chance.random() < 0.25 and len(following) < 6:
            seen["joined"] += 1
            following.append(texts[chance.randrange(4)][: chance.randint(2, 40)])
            parents.append(-1)
        order = list(range(len(following)))
        chance.shuffle(order)
        rows, parents = [following[at] for at in order], [parents[at] for at in order]
    assert seen["compared"] > 40
    assert min(seen[what] for what in ("left", "partly", "forked", "joined")) >= 2, seen


def test_a_step_costs_the_window_and_not_the_length(real, tokenizers, monkeypatch):
    drafter = built(PAIRS[0], real, tokenizers)
    target = tokenizers("smollm2")
    whole = target(STORY * 6)["input_ids"]
    sizes = []
    for tongue in (drafter._translator.target, drafter._translator.assistant):
        encode = tongue.encode
        monkeypatch.setattr(tongue, "encode", lambda text, e=encode: sizes.append(len(text)) or e(text))
    model = drafter._model
    at = len(whole) - 60
    commit_and_draft(drafter, [-1], [whole[:at]], 4)
    assert max(sizes) > 1000
    sizes.clear()
    fed = model.positions_fed
    steps = 0
    while at + 3 < len(whole):
        at, steps = at + 3, steps + 1
        commit_and_draft(drafter, [0], [whole[:at]], 4)
    assert steps > 15
    assert max(sizes) < 150
    # Three new tokens, at most a few encoded otherwise than before, and four that were tried.
    assert (model.positions_fed - fed) / steps < 16


@pytest.mark.parametrize("name", ["gemma3-270m", "stories15m"])
def test_a_byte_that_has_a_token_of_its_own_is_written_so(name, tokenizers):
    tongue = ByteTokenizer(tokenizers(name))
    letters = [one for one in "abcXYZ019.,!" if len(tongue.encode(f"\n{one}")) >= 2]
    assert len(letters) > 5
    for letter in letters:
        assert tongue.id_by_bytes[letter.encode()] == tongue.encode(f"\n{letter}")[-1]
    if name == "gemma3-270m":
        assert tongue.encode("\n") == [tongue.id_by_bytes[b"\n"]]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_any_window_reads_the_same(window, tokenizers):
    for target, assistant in PAIRS:
        between = TokenTranslator(ByteTokenizer(tokenizers(target)), ByteTokenizer(tokenizers(assistant)))
        for text in (STORY, FACT, "na na na na na na na na na na na na na na na na na na"):
            whole = tokenizers(target)(text)["input_ids"]
            reading, at = between.new_row(), 0
            chance = random.Random(window)
            while at < len(whole):
                step = chance.randint(1, 4)
                between.append_tokens(reading, whole[at : at + step], LookbehindWindows(window, window))
                at += step
                said = tokenizers(target).decode(whole[:at], skip_special_tokens=True)
                begun = [1] if (target, assistant) == PAIRS[1] else []  # its <s> is the other's beginning
                assert reading.assistant_ids == begun + tokenizers(assistant)(said)["input_ids"], said[-20:]


def test_the_end_token_is_that_of_the_assistant(tokenizers):
    """Their end tokens have different names."""
    target, assistant = ByteTokenizer(tokenizers("smollm2")), ByteTokenizer(tokenizers("stories15m"))
    between = TokenTranslator(target, assistant)
    reading = between.new_row()
    tokens = [*tokenizers("smollm2")("One.")["input_ids"], target.eos_token_id]
    between.append_tokens(reading, tokens, LookbehindWindows())
    assert reading.assistant_ids == [*tokenizers("stories15m")("One.")["input_ids"], assistant.eos_token_id]


@pytest.mark.parametrize(
    ("normalizer", "odd"),
    [(normalizers.NFKC(), "\ufb01\ufb01\ufb01"), (normalizers.Strip(left=False, right=True), "   ")],
    ids=["NFKC", "Strip"],
)
def test_what_is_not_the_text_itself_is_not_built_on(normalizer, odd, tokenizers):
    # A text that repeats itself looks the same a few bytes further on.
    text = "Oh," + " na" * 30 + odd + " na" * 12
    made = Tokenizer.from_str(tokenizers("minimind2-small").backend_tokenizer.to_str())
    made.normalizer = normalizer
    between = TokenTranslator(ByteTokenizer(tokenizers("smollm2")), ByteTokenizer(made))
    whole = tokenizers("smollm2")(text)["input_ids"]
    reading = between.new_row()
    for at, token in enumerate(whole):
        between.append_tokens(reading, [token], LookbehindWindows())
        said, whole_now = between.assistant.encode_bytes(between.target.decode_bytes(whole[: at + 1]))
        assert (reading.assistant_ids, reading.is_complete) == (said, whole_now)


def test_an_assistant_without_bytes_waits_for_the_whole_character(tokenizers):
    words = wordpiece.tokenizer()
    end = words("end", add_special_tokens=False)["input_ids"][0]
    drafter, _ = scripted(("smollm2", words), tokenizers, lambda seen: end)
    whole = tokenizers("smollm2")("The stopper stopped at the end of the last station 日 at")["input_ids"]
    inside = 0
    for at in range(10, len(whole) + 1):
        (found,), _ = commit_and_draft(drafter, [0 if at > 10 else -1], [whole[:at]], 1)
        try:
            drafter._translator.target.decode_bytes(whole[:at]).decode()
            assert drafter._translator.target.decode_bytes(found) == b" end"
        except UnicodeDecodeError:
            assert found == []
            inside += 1
    assert inside


# ------------------------------------------------------------------------ a scripted model
FACTS = ModelTraits(
    is_encoder_decoder=False,
    supports_position_ids=True,
    supports_logits_to_keep=True,
    supports_inputs_embeds=True,
    vocab_size=0,
    num_layers=1,
    attn_implementation="sdpa",
    sliding_windows={"full_attention": None},
    max_positions=None,
    context_length=None,
)


class Scripted:
    """A model whose next token a function tells from those that its cache holds; it keeps what it was fed."""

    def __init__(self, say, size, **facts):
        self.say, self.seen, self.opened = say, [], []
        self.traits = ModelTraits(**{**vars(FACTS), "vocab_size": size, **facts})
        self.device = torch.device("cpu")

    def add_requests(self, requests, inputs):
        self.opened.append((list(requests), dict(inputs)))

    def remove_requests(self, requests):
        self.opened.append(list(requests))

    def forward(self, rows, proposal, cache):
        assert len(rows) == len(cache)
        pending = rows.pending
        assert bool((pending > 0).all())
        width = int(pending.max())
        at = rows.cached_length[:, None] + torch.arange(width)
        fed = rows.tokens.gather(1, at.clamp(max=rows.tokens.shape[1] - 1)).double()[:, None, :, None]
        span = KVSpan(None, rows.cached_length, width, int(rows.cached_length.max()) + width)
        held, _ = cache.update(0, fed, fed, span)
        logits = torch.full((len(rows), 1, self.traits.vocab_size), -20.0)
        for row, stop in enumerate(rows.position.tolist()):
            tokens = held[row, 0, :stop, 0].long().tolist()
            assert tokens == rows.tokens[row, :stop].tolist()  # what some models read instead
            self.seen.append(tokens)
            logits[row, 0, self.say(tokens)] = 0.0
        return ForwardOutput(logits)


def scripted(pair, tokenizers, say, kind=RetokenizingDrafter, facts=None, **options):
    target, assistant = (tokenizers(one) if isinstance(one, str) else one for one in pair)
    model = Scripted(say, TokenBytes.from_tokenizer(assistant).size, **facts or {})
    return kind(model, DenseStore(), tokenizer=target, assistant_tokenizer=assistant, **options), model


def knowing(tongue, text):
    """The output of an assistant with the right continuation, in its own tokens."""
    whole = text.encode()

    def say(tokens):
        said = tongue.decode_bytes([one for one in tokens if one not in tongue.special_ids])
        said = said.removeprefix(tongue.leading_space)
        assert whole.startswith(said), (said, whole)
        rest = whole[len(said) :]
        if not rest:
            return tongue.eos_token_id
        lead = tongue.leading_space if not said else b""
        size = next(
            size for size in range(len(lead + rest), 0, -1) if (lead + rest)[:size] in tongue.id_by_bytes
        )
        return tongue.id_by_bytes[(lead + rest)[:size]]

    return say


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("pair", [*PAIRS, ("minimind2-small", "stories15m")], ids="<-".join)
def test_no_draft_breaks_a_character(pair, most, tokenizers):
    target = ByteTokenizer(tokenizers(pair[0]))
    drafter, _ = scripted(pair, tokenizers, knowing(ByteTokenizer(tokenizers(pair[1])), FOREIGN))
    whole = tokenizers(pair[0])(FOREIGN)["input_ids"]
    text = FOREIGN.encode()
    inside = tried = 0
    for at in range(1, len(whole)):
        (found,), _ = commit_and_draft(drafter, [0 if at > 1 else -1], [whole[:at]], most)
        end = [target.eos_token_id] if found[-1:] == [target.eos_token_id] else []
        so_far = [one for one in whole[:at] if one not in target.special_ids]
        said = target.decode_bytes(so_far + found[: len(found) - len(end)]).removeprefix(target.leading_space)
        # The assistant is right, so that what it drafts is the text, whatever the target has cut.
        assert text.startswith(said)
        assert not end or said == text
        decided = target.decode_bytes(so_far).removeprefix(target.leading_space)
        tried += bool(found)
        try:
            decided.decode()
        except UnicodeDecodeError:
            inside += bool(found)
    assert tried > len(whole) // 3
    if most > 3 and target.leading_space == b"":
        assert inside >= 3


def test_bytes_that_are_no_text_are_passed_over(tokenizers):
    pair = PAIRS[0]
    target = ByteTokenizer(tokenizers("smollm2"))
    stray = target.id_by_bytes[b"\x80"]
    words = tokenizers("smollm2")(" and then the little dog ran away")["input_ids"]
    goes_on = tokenizers("stories15m").encode("home", add_special_tokens=False)[0]
    drafter, model = scripted(pair, tokenizers, lambda tokens: goes_on)
    for size in range(1, len(words)):
        row = [words[0], stray, *words[:size]]
        (found,), _ = commit_and_draft(drafter, [0 if size > 1 else -1], [row], 2)
        assert target.decode_bytes(found) == b" home home"
    text = tokenizers("stories15m").decode(model.seen[-1])
    assert "\ufffd" in text
    assert text.endswith("and then the little dog ran home")


# ------------------------------------------------------------------------ beginnings and ends
def test_a_beginning_is_no_text_and_comes_once(tokenizers):
    stories, smol = tokenizers("stories15m"), tokenizers("smollm2")
    said = stories.encode("The dog", add_special_tokens=False)[-1]
    drafter, model = scripted(PAIRS[0], tokenizers, lambda tokens: said)
    text = smol(STORY)["input_ids"]
    for begun in ([], [smol.bos_token_id]):
        row = [*begun, *text[:20]]
        for step in range(8):
            commit_and_draft(drafter, [0 if step else -1], [row], 3)
            row = [*row, *text[20 + 2 * step : 22 + 2 * step]]
        for seen in model.seen:
            assert seen[0] == stories.bos_token_id
            assert seen.count(stories.bos_token_id) == 1
            assert stories.decode(seen[1:]).startswith("Once upon a time, there was a")
    # One that puts no beginning by itself is given one where there is one.
    said = tokenizers("minimind2-small")(" dog")["input_ids"][0]
    drafter, model = scripted(PAIRS[1], tokenizers, lambda tokens: said)
    commit_and_draft(drafter, [-1], [stories("The dog")["input_ids"]], 1)
    bare = stories("The dog", add_special_tokens=False)["input_ids"]
    commit_and_draft(drafter, [-1], [bare], 1)
    mind = tokenizers("minimind2-small")
    assert model.seen == [
        [mind.bos_token_id, *mind("The dog")["input_ids"]],
        mind("The dog")["input_ids"],
    ]


def test_marks_of_a_chat_are_the_other_s_of_that_name_or_nothing(tokenizers):
    smol, mind, stories = (tokenizers(name) for name in ("smollm2", "minimind2-small", "stories15m"))
    chat = "<|im_start|>user\nHi there!<|im_end|>\n<|im_start|>assistant\n"
    tokens = [*smol(chat)["input_ids"], smol.convert_tokens_to_ids("<file_sep>")]
    drafter, model = scripted(PAIRS[2], tokenizers, lambda seen: mind("Hello")["input_ids"][0])
    (found,), _ = commit_and_draft(drafter, [-1], [tokens], 1)
    assert model.seen == [mind(chat)["input_ids"]]
    assert smol.decode(found) == mind.decode(mind("Hello")["input_ids"][0])
    drafter, model = scripted(PAIRS[0], tokenizers, lambda seen: stories("Hello")["input_ids"][1])
    (found,), _ = commit_and_draft(drafter, [-1], [tokens], 1)
    begin, end = stories.bos_token_id, stories.eos_token_id
    parts = [
        stories(part, add_special_tokens=False)["input_ids"]
        for part in ("user\nHi there!", "\n", "assistant\n")
    ]
    assert model.seen == [[begin, *parts[0], end, *parts[1], begin, *parts[2]]]
    assert smol.decode(found) == "Hello"


@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_an_end_is_the_target_s_end_and_nothing_follows(pair, tokenizers):
    assistant = tokenizers(pair[1])
    words = assistant.encode(" big dog", add_special_tokens=False)[-2:]

    def say(tokens):
        return words[len(tokens) % 2] if len(tokens) < 5 else assistant.eos_token_id

    drafter, model = scripted(pair, tokenizers, say)
    row = tokenizers(pair[0]).encode("A", add_special_tokens=False)
    (found,), _ = commit_and_draft(drafter, [-1], [row], 10)
    assert found[-1] == tokenizers(pair[0]).eos_token_id
    assert len(found) > 1
    assert found.count(found[-1]) == 1
    assert max(map(len, model.seen)) == 5
    (found,), _ = commit_and_draft(drafter, [0], [row], 1)
    assert tokenizers(pair[0]).eos_token_id not in found


def test_no_end_follows_half_a_character(tokenizers):
    assistant = tokenizers("stories15m")
    dog = assistant.encode("a dog", add_special_tokens=False)[-1]
    half = assistant.convert_tokens_to_ids("<0xE6>")
    drafter, model = scripted(PAIRS[0], tokenizers, lambda seen: [dog, half, 2][len(seen) - 2])
    (found,), _ = commit_and_draft(drafter, [-1], [tokenizers("smollm2")("A")["input_ids"]], 5)
    assert len(model.seen[-1]) == 4
    assert tokenizers("smollm2").decode(found) == " dog"


def test_without_an_end_an_end_only_stops(tokenizers):
    bare = transformers.AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))
    bare.eos_token = None
    assistant = tokenizers("stories15m")
    dog = assistant.encode("a dog", add_special_tokens=False)[-1]
    drafter, model = scripted(
        (bare, assistant), tokenizers, lambda seen: dog if len(seen) < 4 else assistant.eos_token_id
    )
    (found,), _ = commit_and_draft(drafter, [-1], [bare("A")["input_ids"]], 6)
    assert bare.decode(found) == " dog dog"
    # A tokenizer without end tokens.
    drafter, model = scripted(
        (bare.backend_tokenizer, assistant.backend_tokenizer),
        tokenizers,
        lambda seen: (dog, 2)[len(seen) > 3],
    )
    (found,), _ = commit_and_draft(drafter, [-1], [bare("A")["input_ids"]], 6)
    assert bare.decode(found) == " dog dog"
    # Its tokenizer's own template begins like this.
    assert model.seen[0][0] == assistant.bos_token_id


@pytest.mark.parametrize("pair", [*PAIRS, ("minimind2-small", "stories15m")], ids="<-".join)
def test_rows_without_text(pair, tokenizers):
    target, assistant = (tokenizers(name) for name in pair)
    ids = assistant("Once more")["input_ids"]
    ids = [one for one in ids if one != assistant.bos_token_id]
    drafter, model = scripted(
        pair, tokenizers, lambda seen: ids[len(seen) - 1] if len(seen) <= len(ids) else ids[0]
    )
    wanted = target("Once more", add_special_tokens=False)["input_ids"]
    rows = [[], [target.bos_token_id]]
    found, _ = commit_and_draft(drafter, [-1, -1], rows, len(ids))
    assert [one[:2] for one in found] == [wanted[: len(ids)][:2]] * 2
    assert model.seen[:2] == [[assistant.bos_token_id]] * 2
    found, _ = commit_and_draft(drafter, [0], [[]], 0)
    assert found == [[]]


def test_embeddings_stay_with_the_target(tokenizers):
    drafter, model = scripted(PAIRS[0], tokenizers, lambda seen: 5)
    drafter.add_requests([3, 4], {"inputs_embeds": [torch.zeros(2, 8), None]})
    drafter.remove_requests([3])
    assert model.opened == [([3, 4], {}), [3]]


# ------------------------------------------------------------------------ texts that come out otherwise
def lowered(tokenizers):
    """A tokenizer without capital letters."""
    made = Tokenizer.from_str(tokenizers("minimind2-small").backend_tokenizer.to_str())
    made.normalizer = normalizers.Lowercase()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def test_a_text_that_an_assistant_reads_otherwise_is_continued_all_the_same(tokenizers):
    assistant = lowered(tokenizers)
    again = assistant(" again")["input_ids"]
    drafter, model = scripted(("smollm2", assistant), tokenizers, lambda seen: again[0])
    whole = tokenizers("smollm2")("The CAPITAL Of FRANCE Is PARIS And It Is BIG, Says LE Monde Of TODAY")[
        "input_ids"
    ]
    for at in range(3, len(whole)):
        (found,), _ = commit_and_draft(drafter, [0 if at > 3 else -1], [whole[:at]], 1)
        said = tokenizers("smollm2").decode(whole[:at])
        assert model.seen[-1] == assistant(said)["input_ids"]
        assert tokenizers("smollm2").decode(found) == assistant.decode(again[:1])


def test_a_target_that_would_write_it_otherwise_tries_nothing(tokenizers):
    dog = tokenizers("stories15m").encode("a dog", add_special_tokens=False)[-1]
    capital = tokenizers("stories15m").encode("a Dog", add_special_tokens=False)[-1]
    for said, count in ((dog, 1), (capital, 0)):
        drafter, _ = scripted((lowered(tokenizers), "stories15m"), tokenizers, lambda seen, said=said: said)
        row = tokenizers("minimind2-small")("the big")["input_ids"]
        (found,), _ = commit_and_draft(drafter, [-1], [row], 1)
        assert len(found) == count


def test_what_is_decided_is_not_cut_otherwise(tokenizers):
    smol, stories = tokenizers("smollm2"), tokenizers("stories15m")
    row = smol("The dog was unbel")["input_ids"]
    rest = stories.encode("xievably", add_special_tokens=False)[-2:]
    drafter, _ = scripted(PAIRS[0], tokenizers, lambda seen: rest[0] if seen[-1] != rest[0] else rest[1])
    (found,), _ = commit_and_draft(drafter, [-1], [row], 2)
    whole = smol("The dog was unbel" + stories.decode(rest).strip())["input_ids"]
    target = ByteTokenizer(smol)
    ends = [len(target.decode_bytes(whole[:at])) for at in range(len(whole))]
    assert found == [] or len(target.decode_bytes(row)) in ends
    # " unbelievably" is one token or two that end elsewhere, hence nothing can follow "unbel".
    assert len(target.decode_bytes(row)) not in ends
    assert found == []


def test_a_row_that_was_taken_back_is_read_again(real, tokenizers):
    drafter = built(PAIRS[0], real, tokenizers)
    whole = tokenizers("smollm2")(STORY)["input_ids"]
    commit_and_draft(drafter, [-1], [whole[:60]], 4)
    for row in (whole[:50], [*whole[:30], *whole[:30]], whole[:60]):
        found = commit_and_draft(drafter, [0], [row], 4)
        assert found[0] == commit_and_draft(built(PAIRS[0], real, tokenizers), [-1], [row], 4)[0]
        assert found[0][0]


def test_an_assistant_stops_when_it_is_unsure(real, tokenizers):
    pair = PAIRS[0]
    row = tokenizers("smollm2")(STORY)["input_ids"][:24]
    naive = Naive(tokenizers("smollm2"), tokenizers("stories15m"), real("stories15m").model)
    ids, new = naive.continued(tokenizers("smollm2").decode(row), 6)
    with torch.no_grad():
        law = real("stories15m").model(torch.tensor([ids + new])).logits[0].softmax(-1)
    sure = [float(law[len(ids) - 1 + at].max()) for at in range(6)]
    for limit in (0.0, 0.3, 0.6, 0.9, 0.999):
        drafter = built(pair, real, tokenizers)
        commit_and_draft(drafter, [-1], [row], 6, assistant_confidence_threshold=limit)
        told = next((at + 1 for at, one in enumerate(sure) if one < limit), 6)
        assert drafter.forwards == told, limit
    assert min(sure) < 0.6


def test_a_row_beyond_the_assistant_s_positions_is_left_alone(tokenizers):
    dog = tokenizers("stories15m").encode("a dog", add_special_tokens=False)[-1]
    drafter, model = scripted(PAIRS[0], tokenizers, lambda seen: dog, facts={"max_positions": 12})
    whole = tokenizers("smollm2")(STORY)["input_ids"]
    found, _ = commit_and_draft(drafter, [-1, -1, -1], [whole[:40], whole[:4], whole[:9]], 6)
    assert [len(one) for one in found] == [0, 6, 3]
    assert max(map(len, model.seen)) == 12


def test_tokens_that_the_target_s_model_lacks_are_not_tried(tokenizers):
    more = transformers.AutoTokenizer.from_pretrained(pretrained.folder("smollm2"))
    more.add_tokens([" dragonfruit", " very"])
    words = tokenizers("stories15m")(" big dragonfruit", add_special_tokens=False)["input_ids"][1:]

    def say(seen):
        return words[min(len(seen) - 2, len(words) - 1)]

    (whole,), _ = commit_and_draft(
        scripted((more, "stories15m"), tokenizers, say)[0], [-1], [more("A")["input_ids"]], 9
    )
    assert more.convert_tokens_to_ids(" dragonfruit") in whole
    drafter, _ = scripted((more, "stories15m"), tokenizers, say, vocabulary=49152)
    assert commit_and_draft(drafter, [-1], [more("A")["input_ids"]], 9)[0] == [whole[:1]]
    assert more.decode(whole[:1]) == " big"


def test_encoders_that_read_tokens_are_refused():
    check_draft_model(FACTS)
    check_draft_model(
        ModelTraits(**{**vars(FACTS), "is_encoder_decoder": True, "main_input_name": "input_features"})
    )
    with pytest.raises(UnsupportedModel, match="assistant_tokenizer"):
        check_draft_model(ModelTraits(**{**vars(FACTS), "is_encoder_decoder": True}))


@pytest.mark.parametrize("most", [3])
@pytest.mark.parametrize("kind", ["rwkv", "mamba"])
def test_an_assistant_without_rewind_starts_again(kind, most, tokenizers):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"vocab_size": 6400, "hidden_size": 32, "num_hidden_layers": 2}
        given = {
            "rwkv": {**sizes, "attention_hidden_size": 32},
            "mamba": {**sizes, "state_size": 8},
        }
        config = transformers.AutoConfig.for_model(kind, **given[kind])
        network = transformers.AutoModelForCausalLM.from_config(config).eval()
    pair = tokenizers("stories15m"), tokenizers("minimind2-small")
    whole = pair[0](STORY)["input_ids"]

    def make_drafter():
        model = as_model(network)
        return RetokenizingDrafter(model, new_cache(model.traits), *pair)

    drafter, parents, tried = make_drafter(), [-1, -1], 0
    for step in range(5):
        rows = [whole[: 9 + step], whole[3 : 30 + 3 * step]][:: (-1) ** step]
        found, _ = commit_and_draft(drafter, parents, rows, most)
        assert found == commit_and_draft(make_drafter(), [-1, -1], rows, most)[0]
        tried += sum(map(len, found))
        parents = [1, 0]
    assert tried > most


# ------------------------------------------------------------------------ tokens that both have
def crossed(pair, real, tokenizers, lines=1):
    noise = SamplingNoise()
    noise.num_rows = lines
    size = TokenBytes.from_tokenizer(tokenizers(pair[0])).size
    return built(pair, real, tokenizers, SharedVocabDrafter, noise=noise, vocabulary=size)


def shared_bytes(pair, tokenizers):
    """The bytes that a token of text stands for in both, by nothing but the lists of tokens."""
    kept = []
    for name in pair:
        known = TokenBytes.from_tokenizer(tokenizers(name))
        kept.append(Counter(text for at, text in enumerate(known.bytes) if at not in known.special_ids))
    return {text: kept[0][text] * kept[1][text] for text in kept[0] if text and text in kept[1]}


@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_a_law_is_the_assistant_s_of_the_tokens_that_both_have(pair, real, tokenizers):
    drafter = crossed(pair, real, tokenizers)
    mine, theirs = (TokenBytes.from_tokenizer(tokenizers(name)).bytes for name in pair)
    both = shared_bytes(pair, tokenizers)
    ends = tokenizers(pair[0]).eos_token_id, tokenizers(pair[1]).eos_token_id
    naive = Naive(tokenizers(pair[0]), tokenizers(pair[1]), real(pair[1]).model)
    naive.begun = [1] if pair[1] == "minimind2-small" else []
    row = tokenizers(pair[0])(STORY)["input_ids"][:30]
    row = row if row[0] == 1 or not naive.begun else [1, *row]
    (found,), proposal = commit_and_draft(drafter, [-1], [row], 3, do_sample=1)
    assert len(found) == 3 == proposal.draft_probs.shape[1]
    ids, _ = naive.continued(tokenizers(pair[0]).decode(row, skip_special_tokens=True), 0)
    by_bytes = {text: at for at, text in enumerate(theirs) if both.get(text) == 1}
    for place, token in enumerate(found):
        law = proposal.draft_probs[0, place]
        assert float(law.double().sum()) == pytest.approx(1.0, abs=1e-4)
        assert float(law[token]) > 0
        with torch.no_grad():
            plain = real(pair[1]).model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        inside = torch.tensor([text in both or at == ends[0] for at, text in enumerate(mine)])
        special = torch.tensor(sorted(TokenBytes.from_tokenizer(tokenizers(pair[0])).special_ids - {ends[0]}))
        outside = ~inside
        outside[special] = False
        assert float(law[outside].sum()) == 0
        # Of tokens that only one pair can be, what the assistant says, each by the same factor.
        pairs = [(at, by_bytes[text]) for at, text in enumerate(mine) if text in by_bytes] + [ends]
        ours, its = torch.tensor(pairs).T
        assert len(pairs) > 2000
        factor = float(law[ours].sum() / plain[its].sum())
        assert factor >= 1
        torch.testing.assert_close(law[ours], plain[its] * factor, rtol=1e-3, atol=1e-7)
        if mine[token] not in by_bytes:
            break
        ids = [*ids, by_bytes[mine[token]]]


def test_seeds_greed_and_neighbours(real, tokenizers):
    rows = [tokenizers("smollm2")(STORY)["input_ids"][:size] for size in (24, 24, 9, 15)]

    def drafts_of(do_sample, seed, which=range(4)):
        which = list(which)
        drafter = crossed(PAIRS[0], real, tokenizers, len(which))
        given = {"do_sample": [do_sample[at] for at in which], "seed": [seed[at] for at in which]}
        return commit_and_draft(drafter, [-1] * len(which), [rows[at] for at in which], 3, **given)

    torch.manual_seed(0)
    mixed, proposal = drafts_of([0, 1, 1, 0], [-1, 7, -1, -1])
    assert proposal.draft_probs.shape == (4, 3, 49152)
    assert proposal.draft_probs.double().sum(-1)[2].tolist() == pytest.approx([1.0] * 3, abs=1e-4)
    found, proposal = drafts_of([0, 1, 1, 0], [-1, 7, 8, -1])
    assert proposal.draft_probs is None
    assert [found[at] for at in (0, 1, 3)] == [mixed[at] for at in (0, 1, 3)]
    for at in range(4):
        alone, proposal = drafts_of([0, 1, 1, 0], [-1, 7, 8, -1], [at])
        assert alone == [found[at]]
        assert proposal.draft_probs is None
    assert found[0] != found[1]
    # A seed's draft is what its noise at that place makes of the law.
    drafter = crossed(PAIRS[0], real, tokenizers, 1)
    _, told = commit_and_draft(drafter, [-1], [rows[1]], 1, do_sample=1)
    at_place = SamplingNoise().draw(rows_of([rows[1]], do_sample=1, seed=7), 49152)
    assert int((told.draft_probs[0, 0] / at_place[0]).argmax()) == found[1][0]


def test_processors_apply(real, tokenizers):
    row = tokenizers("smollm2")(STORY)["input_ids"][:24]
    (free,), _ = commit_and_draft(crossed(PAIRS[0], real, tokenizers), [-1], [row], 3)
    lengths = []

    def ban(rows, logits):
        lengths.append(rows.length.tolist())
        assert rows.tokens[0, : len(row)].tolist() == row
        return logits.index_fill(1, torch.tensor(free[:1]), -torch.inf)

    (found,), _ = commit_and_draft(
        crossed(PAIRS[0], real, tokenizers), [-1], [row], 3, aid=DraftContext(ban, DenseStore())
    )
    assert free[0] not in found
    assert found
    assert lengths == [[24], [25], [26]][: len(lengths)]
    # A token that the assistant does not have can only be forced, and nothing is known to follow it.
    foreign = tokenizers("smollm2").convert_tokens_to_ids("<file_sep>")

    def force(rows, logits):
        if int(rows.length[0]) > len(row):
            return logits
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([foreign]), 0.0)

    drafter = crossed(PAIRS[0], real, tokenizers)
    found, proposal = commit_and_draft(
        drafter, [-1], [row], 3, aid=DraftContext(force, DenseStore()), do_sample=1
    )
    assert found == [[foreign]]
    assert float(proposal.draft_probs[0, 0, foreign]) == 1.0
    assert drafter.forwards == 1


@pytest.mark.parametrize("pair", [*PAIRS, ("minimind2-small", "stories15m")], ids="<-".join)
def test_common_tokens_continue_a_character_that_has_begun(pair, tokenizers):
    target = ByteTokenizer(tokenizers(pair[0]))
    noise = SamplingNoise()
    drafter, _ = scripted(
        pair,
        tokenizers,
        knowing(ByteTokenizer(tokenizers(pair[1])), FOREIGN),
        SharedVocabDrafter,
        noise=noise,
        vocabulary=len(target.token_bytes),
    )
    whole, text, tried = tokenizers(pair[0])(FOREIGN)["input_ids"], FOREIGN.encode(), 0
    for at in range(1, len(whole)):
        (found,), _ = commit_and_draft(drafter, [0 if at > 1 else -1], [whole[:at]], 1)
        if found and drafter._assistant_by_target[found[0]] >= 0 and found[0] not in target.special_ids:
            so_far = [one for one in whole[:at] if one not in target.special_ids]
            said = target.decode_bytes([*so_far, *found]).removeprefix(target.leading_space)
            tried += text.startswith(said)
    # It says the token that both have and the assistant finds likeliest: the text, where that is common.
    assert tried > len(whole) // 4


def test_tokenizers_without_a_common_token_are_refused(tokenizers):
    def words(*names):
        made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token=names[0]))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token=names[0])

    one, other = words("[A]", "red", "blue"), words("[B]", "rouge", "bleu")
    with pytest.raises(InputError, match=r"assistant_tokenizer.*in common"):
        scripted(
            (one, other), tokenizers, lambda seen: 0, SharedVocabDrafter, noise=SamplingNoise(), vocabulary=3
        )
    # Tokens that the target's model has no line for are none.
    with pytest.raises(InputError, match="in common"):
        scripted((words("[A]", "x", "blue"), words("[B]", "blue")), tokenizers, int, SharedVocabDrafter,
                 noise=SamplingNoise(), vocabulary=2)  # fmt: skip
