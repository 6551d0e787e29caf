"""Watermark generated text, and detect the watermark from the text alone.

The key selects the tokens whose probability is raised; a detector with the same key counts them. Its verdict
comes with a p-value, and "too short to tell" is one of the verdicts.

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
other_detector = descant.Detector(OTHER, model, tokenizer)
print(texts[1], "\n")
for name, detect, text in [
    ("unmarked", detector.text, texts[0]),
    ("marked", detector.text, texts[1]),
    ("its second half", detector.text, texts[1][len(texts[1]) // 2 :]),
    ("its first words", detector.text, " ".join(texts[1].split()[:5])),
    ("another key", other_detector.text, texts[1]),
]:
    print(f"{name:<18}{detect(text).verdict}")
