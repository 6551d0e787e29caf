"""Link entities: the answer is always one of a list of titles.

`AllowedSequences` compiles the list into a trie. Beam search over the trie can generate nothing else, and
returns the most likely titles, ranked. It stays fast for millions of titles; `save` and `load` keep the trie.
The trie guarantees that the answer is a title, not that it is the right one: see the last line.

    python tools/models.py smollm2
    python examples/entities.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
TITLES = [
    "Paris, France", "Paris, Texas", "Paris Hilton", "Jaguar (animal)", "Jaguar Cars", "Mercury (planet)",
    "Mercury (element)", "Mercury (Roman god)", "Freddie Mercury", "Java (island)", "Apple (fruit)",
    "Java (programming language)", "Apple Inc.", "Amazon River", "Amazon (company)", "Monty Python",
    "Python (programming language)", "Python (snake)", "Saturn (planet)", "Turkey (country)", "Turkey (bird)",
]  # fmt: skip
SENTENCES = [
    "The [Jaguar] hunts at night in the forest.",
    "[Mercury] is closest to the Sun.",
    "The thermometer is filled with [Mercury].",
    "She wrote the program in [Java].",
    "[Apple] presented a new phone.",
    "We had [turkey] for Thanksgiving dinner.",
]
PROMPT = """Sentence: He bought a new [Ford] last year.
Entity: Ford Motor Company
Sentence: The [Rhine] flows through Basel.
Entity: Rhine (river)
Sentence: {}
Entity:"""

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
titles = descant.AllowedSequences(
    [tokenizer.encode(" " + title, add_special_tokens=False) for title in TITLES], tokenizer.eos_token_id
)
inputs = tokenizer([PROMPT.format(sentence) for sentence in SENTENCES], return_tensors="pt", padding=True)
out = descant.generate(
    model, **inputs, prefix_allowed_tokens_fn=titles, max_new_tokens=12,
    num_beams=6, num_return_sequences=2, length_penalty=0.0,  # ranked by the probability of the whole title
)  # fmt: skip
answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
for number, sentence in enumerate(SENTENCES):
    first, second = (title.strip() for title in answers[2 * number : 2 * number + 2])
    print(f"{sentence:<43} {first}, or {second}")
