"""Summarise tickets in a few words, and make sure that the words that matter are in the title.

A small model finds short titles, and drops the one word by which people will look for the ticket.
`force_words_ids` demands it: beam search then looks for the best title that holds it. Each ticket of the
batch has demands of its own, so each has a config of its own.

    python tools/models.py flan-t5-small-titles
    python examples/summarise.py
"""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import descant

MODEL = "models/flan-t5-small-titles"  # or a name on the Hub, such as "google/flan-t5-base"
BEAMS = 6
TICKETS = {  # what must be in the title, and the ticket
    "Android 14": (
        "After the update the app crashes on Android 14 as soon as I open the settings page and tap on "
        "notifications. On iOS everything is fine. Please find out why and repair it."
    ),
    "cookie": (
        "please add a dark mode to the settings page and remember the user's choice in a cookie so that it "
        "is still there after the next login"
    ),
    "photos": (
        "We need a script that renames all photos in a folder by the date on which they were taken and moves "
        "doubles to the bin."
    ),
}

model = AutoModelForSeq2SeqLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer(list(TICKETS.values()), return_tensors="pt", padding=True)

free = descant.generate(model, **inputs, num_beams=BEAMS, max_new_tokens=16)
configs = [
    descant.GenerationConfig(
        num_beams=BEAMS,
        max_new_tokens=16,
        force_words_ids=[tokenizer.encode(word, add_special_tokens=False)],
    )
    for word in TICKETS
]
forced = descant.generate(model, **inputs, generation_config=configs)

before = tokenizer.batch_decode(free, skip_special_tokens=True)
after = tokenizer.batch_decode(forced, skip_special_tokens=True)
for word, one, other in zip(TICKETS, before, after, strict=True):
    print(f"{one}\n  with {word!r}: {other}")
