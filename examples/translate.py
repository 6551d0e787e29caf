"""Translate a batch of sentences with beam search and a glossary.

The most likely word at each position does not give the most likely sentence. Greedy search translates "mend"
as revenge and "ring me up" as a bell; four beams find the better translation. `force_words_ids` requires the
word of the glossary where the model prefers another.

    python tools/models.py opus-mt-en-fr
    python examples/translate.py
"""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import descant

MODEL = "models/opus-mt-en-fr"  # or from the Hub: "Helsinki-NLP/opus-mt-en-fr", "...-en-de", ...
SENTENCES = [
    "It is never too late to mend.",
    "He said he would ring me up as soon as he got home.",
    "She gave up smoking after the doctor had shown her the pictures.",
]
GLOSSARY = {  # required word: sentence
    "banque": "The bank was closed, so we sat down by the river.",
    "courriel": "We will send you the invoice by email next week.",
}

model = AutoModelForSeq2SeqLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)


def translate(sentences: list[str], **fields: object) -> list[str]:
    """The best translation of each sentence."""
    inputs = tokenizer(sentences, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(
        descant.generate(model, **inputs, max_new_tokens=40, **fields), skip_special_tokens=True
    )


greedy, beams = translate(SENTENCES, num_beams=1), translate(SENTENCES, num_beams=4)
for sentence, first, best in zip(SENTENCES, greedy, beams, strict=True):
    print(f"{sentence}\n  greedy:   {first}\n  4 beams:  {best}")

terms = [tokenizer(text_target=word, add_special_tokens=False)["input_ids"] for word in GLOSSARY]
rules = [descant.GenerationConfig(force_words_ids=[term]) for term in terms]  # one per sentence
free, forced = translate(list(GLOSSARY.values())), translate(list(GLOSSARY.values()), generation_config=rules)
for sentence, unconstrained, constrained in zip(GLOSSARY.values(), free, forced, strict=True):
    print(f"{sentence}\n  free:     {unconstrained}\n  glossary: {constrained}")
