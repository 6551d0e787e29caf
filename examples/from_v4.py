"""Run a transformers 4 script on transformers 5: with one more line, removed methods work again.

Transformers 5 removed contrastive search. `descant.attach(model)` replaces the model's own `generate` by
Descant's; the rest of the script is unchanged. `descant.detach(model)` restores the original.

    python tools/models.py smollm2
    python examples/from_v4.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
inputs = tokenizer("The robot looked at the sea and", return_tensors="pt")

try:
    model.generate(**inputs, penalty_alpha=0.6, top_k=4, max_new_tokens=40)
except ValueError as error:
    print("transformers 5:", error, "\n")

descant.attach(model)  # the added line

output = model.generate(**inputs, penalty_alpha=0.6, top_k=4, max_new_tokens=40)
print(tokenizer.decode(output[0], skip_special_tokens=True))
