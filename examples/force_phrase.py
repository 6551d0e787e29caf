"""Force a phrase: texts that must say certain things, wherever these fit best.

A phrase is a `PhrasalConstraint`, a choice between phrases a `DisjunctiveConstraint`. Beam search keeps
texts alive that pay for the phrase early, and returns the best one that holds it. Mind the blank in front:
inside a text a word is another token than at its beginning.

    python tools/models.py smollm2
    python examples/force_phrase.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
BEAMS = 8

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")


def phrase(text: str) -> list[int]:
    """Its tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


refund = descant.DisjunctiveConstraint([phrase(" refund"), phrase(" money back")])
demands = {
    "The new train": [descant.PhrasalConstraint(phrase(" twice as fast"))],
    "The recipe is simple. First,": [descant.PhrasalConstraint(phrase(" a pinch of salt"))],
    "You may return the shoes": [descant.PhrasalConstraint(phrase(" within 14 days")), refund],
}
inputs = tokenizer(list(demands), return_tensors="pt", padding=True)
settings = descant.GenerationConfig(num_beams=BEAMS, max_new_tokens=20)

free = descant.generate(model, **inputs, generation_config=settings)
forced = descant.generate(
    model, **inputs, generation_config=[settings.replace(constraints=each) for each in demands.values()]
)
for one, other in zip(free, forced, strict=True):
    print("free:  ", tokenizer.decode(one, skip_special_tokens=True))
    print("forced:", tokenizer.decode(other, skip_special_tokens=True))
