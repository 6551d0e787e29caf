"""Stream a conversation word by word, and stop each answer after its first paragraph.

`descant.stream` yields events with text that is safe to display: no partial characters, and no partial stop
strings. Text that may begin a stop string is held back until it is known not to be one.

    python tools/models.py smollm2
    python examples/chat.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M-Instruct", or any chat model
QUESTIONS = ["Why is the sky blue?", "And why is it red in the evening?"]

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)

messages: list[dict[str, str]] = []
for question in QUESTIONS:
    print("you>", question)
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    print("model> ", end="")
    answer = ""
    for event in descant.stream(model, prompt, tokenizer, max_new_tokens=80, stop_strings=["\n\n"]):
        print(event.text, end="", flush=True)
        answer += event.text
    print(f"  [{event.finish_reason}, {len(event.hypothesis.tokens)} tokens]")
    messages.append({"role": "assistant", "content": answer})
