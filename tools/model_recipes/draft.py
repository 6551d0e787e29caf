"""A draft model: distilled layers of this repository, with the embeddings and head of its target."""

import json
import shutil

from safetensors import safe_open
from safetensors.torch import load_file

from .errors import ModelError
from .folder import write_config, write_weights
from .recipe import Job

EMBEDDINGS = "model.embed_tokens.weight"


def convert(job: Job) -> None:
    """Write the folder: the target's config with fewer layers, its tokenizer, its tied embeddings."""
    (asset,), (target,) = job.assets, (job.models / name for name in job.recipe.needs)
    layers = load_file(asset)
    count = len({name.split(".")[2] for name in layers if name.startswith("model.layers.")})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if not config["tie_word_embeddings"]:
        raise ModelError(f"{target.name} must have tied embeddings to share them, got a separate head")
    with safe_open(target / "model.safetensors", "pt") as weights:
        tensors = layers | {EMBEDDINGS: weights.get_tensor(EMBEDDINGS)}
    write_config(job.folder, config | {"num_hidden_layers": count})
    write_weights(job.folder, tensors)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(target / name, job.folder / name)
