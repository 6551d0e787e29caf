"""Generate code in fewer forwards: draft tokens, and verify several drafts in one forward.

Code repeats itself. `prompt_lookup_num_tokens` looks up the last n-gram earlier in the text and drafts what
followed it; `suffix_lookup_num_tokens` looks up the longest repeated suffix. (For new text, `assistant_model`
drafts with a smaller model.) The output equals that without drafts; only the number of forwards changes.

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
# The default adapts the draft length to this machine; "constant" gives the same counts on every machine.
settings = dict(max_new_tokens=32, return_dict_in_generate=True)
constant = dict(num_assistant_tokens_schedule="constant")

plain = descant.generate(model, **inputs, **settings).sequences
print(CODE + tokenizer.decode(plain[0, length:], skip_special_tokens=True))
print(f"\n{'drafter':<16}{'forwards':>8}  {'accepted drafts':>15}  same text")
print(f"{'none':<16}{plain.shape[1] - length:>8}")
for name, fields in {
    "prompt lookup": dict(prompt_lookup_num_tokens=8),
    "suffix lookup": dict(suffix_lookup_num_tokens=8),
}.items():
    out = descant.generate(model, **inputs, **settings, **constant, **fields)
    [report] = out.speculation
    accepted = f"{sum(report.accepted)} of {sum(report.drafted)}"
    print(f"{name:<16}{report.forwards:>8}  {accepted:>15}  {out.sequences.tolist() == plain.tolist()}")
