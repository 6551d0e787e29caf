"""Serve requests that arrive at any time: each joins the running batch, and leaves it when it finishes.

A `Session` is the decoding loop as an object. Here a small schedule gives the step at which each request
arrives; a server would read a queue instead. A request's output does not depend on the rest of the batch.

    python tools/models.py smollm2
    python examples/serve.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant
from descant import GenerationConfig

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M"
ARRIVALS = {  # step: prompt and config
    0: ("The days of the week are Monday, Tuesday,", GenerationConfig(max_new_tokens=14)),
    3: ("The capital of France is", GenerationConfig(max_new_tokens=6, num_beams=4)),
    5: ("Once upon a time", GenerationConfig(max_new_tokens=12, do_sample=True, top_p=0.9, seed=1)),
}

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
session = descant.Session(model)
step = 0
while len(session) or step <= max(ARRIVALS):
    if step in ARRIVALS:
        text, config = ARRIVALS[step]
        [number] = session.admit(descant.Request(tokenizer(text)["input_ids"], config))
        print(f"step {step:>2}  request {number} arrives:  {text!r}")
    for event in session.step():
        if isinstance(event, descant.Finished):
            output = tokenizer.decode(event.hypotheses[0].tokens, skip_special_tokens=True)
            print(f"step {step:>2}  request {event.request} finishes: {output!r}")
        elif isinstance(event, descant.Failed):
            print(f"step {step:>2}  request {event.request} fails:    {event.error}")
    step += 1

text, config = ARRIVALS[3]
prompt = tokenizer(text, return_tensors="pt")
alone = descant.generate(model, **prompt, generation_config=config)
print("alone, the second request gives", repr(tokenizer.decode(alone[0, prompt["input_ids"].shape[1] :])))
