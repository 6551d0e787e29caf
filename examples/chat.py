"""Stream a conversation word by word, and stop each answer after its first paragraph.

`descant.stream` yields events with text that may be shown at once: never half a character, and never part
of a stop string, whose beginning is held back until it is known to be something else.

    python tools/models.py smollm2
    python examples/chat.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

import descant

MODEL = "models/smollm2"  # or from the Hub: "HuggingFaceTB/SmolLM2-135M-Instruct", or any model that chats
QUESTIONS = ["Why is the sky blue?", "And why is it red in the evening?"]

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)

talk: list[dict[str, str]] = []
for question in QUESTIONS:
    print("you>", question)
    talk.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)

    print("model> ", end="")
    answer = ""
    for event in descant.stream(model, prompt, tokenizer, max_new_tokens=80, stop_strings=["\n\n"]):
        print(event.text, end="", flush=True)
        answer += event.text
    print(f"  [{event.finish_reason}, {len(event.hypothesis.tokens)} tokens]")
    talk.append({"role": "assistant", "content": answer})
