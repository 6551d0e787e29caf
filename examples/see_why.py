"""Trace a beam search, print its tree, and write an HTML page that shows every step.

`trace=True` records the candidates and the choice of every step. The page is one file that needs no network.
It shows the tree of all beams step by step, the alternatives of each token, and the effect of each processor.

    python tools/models.py smollm2
    python examples/see_why.py
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
PROMPT = "The soup was made with"
PAGE = Path("soup.html")

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer(PROMPT, return_tensors="pt")
out = descant.generate(
    model, **inputs, num_beams=3, max_new_tokens=6, no_repeat_ngram_size=2, trace=True, tokenizer=tokenizer
)

print(tokenizer.decode(out.sequences[0]), "\n")
print(out.trace.text("tree"))
PAGE.write_text(out.trace.html(title=PROMPT), encoding="utf-8")
print(f"open {PAGE} in a browser to step through it")
