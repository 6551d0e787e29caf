"""Write code in fewer forwards: guess what comes next, and let the model judge several guesses at once.

Code repeats itself. `prompt_lookup_num_tokens` finds the last words earlier in the text and guesses that
what followed there follows again, `suffix_lookup_num_tokens` goes by the longest end that was there before.
(For text that is new, `assistant_model` lets a smaller model guess.) The tokens are those without guesses;
only the number of times that the model is asked changes.

    python tools/models.py smollm2
    python examples/speculate.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: any model, such as "Qwen/Qwen2.5-Coder-1.5B"
CODE = '''class Point:
    def set_x(self, x):
        """Set the x coordinate."""
        self.x = x

    def set_y(self, y):
        """'''

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer(CODE, return_tensors="pt")
length = inputs["input_ids"].shape[1]
# By default as many are guessed as pay on this machine; "constant" makes the counts below the same anywhere.
settings = dict(max_new_tokens=32, return_dict_in_generate=True)
always = dict(num_assistant_tokens_schedule="constant")

plain = descant.generate(model, **inputs, **settings).sequences
print(CODE + tokenizer.decode(plain[0, length:], skip_special_tokens=True))
print(f"\n{'who guesses':<16}{'forwards':>8}  {'guesses that stood':>18}  same text")
print(f"{'nobody':<16}{plain.shape[1] - length:>8}")
for name, fields in {
    "the text itself": dict(prompt_lookup_num_tokens=8),
    "its longest end": dict(suffix_lookup_num_tokens=8),
}.items():
    out = descant.generate(model, **inputs, **settings, **always, **fields)
    [report] = out.speculation
    stood = f"{sum(report.accepted)} of {sum(report.drafted)}"
    print(f"{name:<16}{report.forwards:>8}  {stood:>18}  {out.sequences.tolist() == plain.tolist()}")
