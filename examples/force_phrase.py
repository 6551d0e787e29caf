"""Force phrases: the output must contain them, at the position where they fit best.

A phrase is a `PhrasalConstraint`, a choice between phrases a `DisjunctiveConstraint`. Beam search keeps
hypotheses that begin a phrase early at a cost, and returns the best one that contains it. Note the leading
space: a word inside a text has a different token than at its beginning.

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
    """The token ids of a text."""
    return tokenizer.encode(text, add_special_tokens=False)


refund = descant.DisjunctiveConstraint([phrase(" refund"), phrase(" money back")])
constraints = {
    "The new train": [descant.PhrasalConstraint(phrase(" twice as fast"))],
    "The recipe is simple. First,": [descant.PhrasalConstraint(phrase(" a pinch of salt"))],
    "You may return the shoes": [descant.PhrasalConstraint(phrase(" within 14 days")), refund],
}
inputs = tokenizer(list(constraints), return_tensors="pt", padding=True)
settings = descant.GenerationConfig(num_beams=BEAMS, max_new_tokens=20)

free = descant.generate(model, **inputs, generation_config=settings)
forced = descant.generate(
    model, **inputs, generation_config=[settings.replace(constraints=each) for each in constraints.values()]
)
for unconstrained, constrained in zip(free, forced, strict=True):
    print("free:  ", tokenizer.decode(unconstrained, skip_special_tokens=True))
    print("forced:", tokenizer.decode(constrained, skip_special_tokens=True))
