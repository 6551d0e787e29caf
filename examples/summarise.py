"""Summarise tickets as short titles that must contain a given word.

A small model finds short titles, but drops the one word that identifies the ticket. `force_words_ids`
requires the word: beam search finds the best title that contains it. Each ticket of the batch has its own
required word, and so its own config.

    python tools/models.py flan-t5-small-titles
    python examples/summarise.py
"""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import descant

MODEL = "models/flan-t5-small-titles"  # or a name on the Hub, such as "google/flan-t5-base"
BEAMS = 6
TICKETS = {  # required word: ticket
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
for word, title, forced_title in zip(TICKETS, before, after, strict=True):
    print(f"{title}\n  with {word!r}: {forced_title}")
