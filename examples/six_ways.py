"""Decode one prompt with six methods in one batch: each row has its own config, all share every forward.

Every parameter of a sequence may differ by row, including the method. Each text is the one that its config
gives alone.

    python tools/models.py smollm2
    python examples/six_ways.py
"""

from textwrap import shorten

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant
from descant import GenerationConfig

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
PROMPT = "The best way to learn a language is"
METHODS = {
    "greedy search": GenerationConfig(),
    "sampling": GenerationConfig(do_sample=True, temperature=1.3, min_p=0.1, seed=5),
    "beam search": GenerationConfig(num_beams=4),
    "contrastive": GenerationConfig(penalty_alpha=0.6, top_k=4),
    "DoLa": GenerationConfig(dola_layers="high"),
    "guidance": GenerationConfig(guidance_scale=1.5),
}

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer([PROMPT] * len(METHODS), return_tensors="pt")
out = descant.generate(model, **inputs, generation_config=list(METHODS.values()), max_new_tokens=24)

print(PROMPT, "...")
for name, text in zip(METHODS, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True):
    print(f"{name:<14} {shorten(text.removeprefix(PROMPT), 96)}")
