"""Run a script of transformers 4 on transformers 5: one line more, and what was taken out works again.

Contrastive search left transformers with version 5. `descant.attach(model)` puts Descant in the place of
the model's own `generate`; the rest of the script stays as it was. `descant.detach(model)` takes it back.

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

descant.attach(model)  # the line

output = model.generate(**inputs, penalty_alpha=0.6, top_k=4, max_new_tokens=40)
print(tokenizer.decode(output[0], skip_special_tokens=True))
