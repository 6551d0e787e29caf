"""lm-eval's own backend at batch 1 beside Descant's; prints every response, the scores and the tokens fed.

Arguments: the model's folder, a folder for the tasks. The tasks are written here.
"""

import json
import sys
import time
from pathlib import Path

import lm_eval.models  # noqa: F401 - registers its own backends
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model, model_registry
from lm_eval.tasks import TaskManager

folder, tasks = sys.argv[1], Path(sys.argv[2])
model_registry.register("descant", target="descant.api.compat.lm_eval_backend:DescantLM")

STORY = (
    "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog Max. "
    "One day they found a big red ball under a tree. A boy came and said that it was his ball. "
)
DOCUMENTS = {
    "stories": [
        {"start": STORY * (1 + at % 2) + ask, "choices": choices, "label": 0}
        for at, (ask, choices) in enumerate(
            [
                ("Lily was", ["happy to give it back.", "a tree.", "the of and."]),
                ("The dog's name was", ["Max.", "Tom.", "Ball.", "Park"]),
                ("Then the boy", ["said thank you", "ate the park", "red"]),
                ("They all went", ["home.", "blue.", "dog."]),
            ]
        )
    ],
    "letters": [
        {
            "start": f"{STORY}{question}\nA. {first}\nB. {second}\nC. {third}\nAnswer:",
            "choices": [*"ABC"],
            "label": label,
        }
        for question, first, second, third, label in (
            ("What was red?", "the ball", "the dog", "the boy", 0),
            ("Who is Max?", "a girl", "a dog", "a tree", 1),
        )
    ],
    "answers": [
        {
            "start": f"{STORY}Was there a {thing}?",
            "choices": ["yes", "no", "maybe, but nobody knows"],
            "label": at % 2,
        }
        for at, thing in enumerate(["ball", "car", "dog", "king"])
    ],
    "words": [
        {
            "start": f"A {thing} can",
            "choices": ["run and play.", "fly very high.", "sing a song."],
            "label": 0,
        }
        for thing in ("dog", "bird", "girl", "fish", "cat")
    ],
}
CHOICE = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: choices
doc_to_target: label
num_fewshot: {shots}
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
TEXTS = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}metadata: {{version: 1.0}}
"""
GENERATE = """generation_kwargs: {until: [".", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLLING = """metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
"""
for name, documents in DOCUMENTS.items():
    path = tasks / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    shots = 2 if name == "words" else 0
    (tasks / f"{name}.yaml").write_text(CHOICE.format(name=name, file=path, shots=shots))
long = tasks / "long.jsonl"
long.write_text("".join(json.dumps({"text": STORY * count}) + "\n" for count in (1, 4, 9)))
(tasks / "long.yaml").write_text(
    TEXTS.format(
        name="long", file=long, kind="loglikelihood_rolling", text="", target="{{text}}", more=ROLLING
    )
)
(tasks / "told.yaml").write_text(
    TEXTS.format(
        name="told", file=tasks / "stories.jsonl", kind="generate_until", text="{{start}}",
        target="{{choices[0]}}", more=GENERATE,
    )
)  # fmt: skip

ALL = [*DOCUMENTS, "long", "told"]
RUNS = {
    "hf": ("hf", 1, {}, ALL),
    "descant": ("descant", 1, {}, ALL),
    "seven": ("descant", 7, {}, ALL),
    "hf short": ("hf", 1, {"max_length": 100}, ["stories", "long", "told"]),
    "short": ("descant", 7, {"max_length": 100}, ["stories", "long", "told"]),
    "beams": ("descant", 7, {"num_beams": 3, "length_penalty": 0.6}, ["told"]),
}


def run(backend, batch_size, more, names):
    fed = {"tokens": 0, "forwards": 0}
    lm = get_model(backend)(folder, batch_size=batch_size, dtype="float32", device="cpu", **more)

    def count(module, args, kwargs):
        given = kwargs.get("input_ids", args[0] if args else None)
        fed["tokens"] += given.numel()
        fed["forwards"] += 1

    lm.model.register_forward_pre_hook(count, with_kwargs=True)
    out = {}
    for task in names:
        fed |= {"tokens": 0, "forwards": 0}
        began = time.process_time()
        result = simple_evaluate(
            model=lm,
            tasks=[task],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            batch_size=batch_size,
            log_samples=True,
        )
        samples = sorted(result["samples"][task], key=lambda one: one["doc_id"])
        out[task] = {
            "responses": [sample["resps"] for sample in samples],
            "scores": result["results"][task],
            "seconds": time.process_time() - began,
            **fed,
        }
    return out


print(json.dumps({name: run(*arguments) for name, arguments in RUNS.items()}, default=str))
