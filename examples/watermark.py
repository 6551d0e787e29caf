"""Mark what a model writes, and find the mark in text alone.

The key decides which tokens are made a little likelier; whoever has the key can count them. The answer
comes with a probability, and "too short to tell" is one of the answers.

    python tools/models.py smollm2
    python examples/watermark.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
PROMPT = "My grandmother's house"
KEY = descant.WatermarkingConfig(hashing_key=4_812_770_359)  # keep yours secret
OTHER = descant.WatermarkingConfig(hashing_key=1_234_567_891)

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer([PROMPT] * 2, return_tensors="pt")
plain, marked = (
    descant.GenerationConfig(do_sample=True, seed=2, max_new_tokens=100, watermarking_config=key)
    for key in (None, KEY)
)
texts = tokenizer.batch_decode(
    descant.generate(model, **inputs, generation_config=[plain, marked]), skip_special_tokens=True
)

detector = descant.Detector(KEY, model, tokenizer)
stranger = descant.Detector(OTHER, model, tokenizer)
print(texts[1], "\n")
for name, one, text in [
    ("without a mark", detector, texts[0]),
    ("with a mark", detector, texts[1]),
    ("its second half", detector, texts[1][len(texts[1]) // 2 :]),
    ("five words of it", detector, " ".join(texts[1].split()[:5])),
    ("another's key", stranger, texts[1]),
]:
    print(f"{name:<18}{one.text(text).verdict}")
