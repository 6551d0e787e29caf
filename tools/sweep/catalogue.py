"""The classes of the sweep: every generative class in the auto mappings of transformers."""

from __future__ import annotations

from transformers.models.auto import modeling_auto

from tools.sweep.subject import Entry

__all__ = ["MEDIA", "TASKS", "TEXT", "entries"]

# A class that several mappings list belongs to the first of these: the one with the richer inputs.
_MAPPINGS = {
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "vision2seq": "VISION_2_SEQ",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
    "text-to-audio": "TEXT_TO_WAVEFORM",
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
}

TEXT = ("causal-lm", "seq2seq-lm")
MEDIA = ("image-text-to-text", "vision2seq", "speech-seq2seq", "text-to-audio", "multimodal-lm")
TASKS = (*TEXT, *MEDIA)

# Models with audio input that transformers lists only among the text models.
_AUDIO_INPUT = frozenset({"audioflamingo3", "musicflamingo"})


def entries() -> list[Entry]:
    """Every generative class once, text first, each task in alphabetical order of its classes."""
    found: dict[str, Entry] = {}
    for task, mapping in _MAPPINGS.items():
        for name, model_types in sorted(_listed(mapping).items()):
            if name not in found:
                _, model_type = min((_rank(kind, name), kind) for kind in model_types)
                found[name] = Entry(_task_of(task, model_type, name), model_type, name)
    return sorted(found.values(), key=lambda entry: (TASKS.index(entry.task), entry.name.lower()))


def _listed(mapping: str) -> dict[str, list[str]]:
    """The classes of one auto mapping, each with the model types that lead to it."""
    names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
    classes: dict[str, list[str]] = {}
    for model_type, classes_of_type in names.items():
        for name in (classes_of_type,) if isinstance(classes_of_type, str) else classes_of_type:
            classes.setdefault(name, []).append(model_type)
    return classes


def _rank(model_type: str, name: str) -> tuple[bool, bool]:
    """Smallest for the model type a class is named after, a text model's own before its wrapper's."""
    text = model_type.endswith("_text")
    plain = model_type.removesuffix("_text").replace("_", "").replace("-", "")
    return not text, not name.lower().replace("_", "").startswith(plain)


def _task_of(task: str, model_type: str, name: str) -> str:
    """The task of a class; "multimodal-lm" where a text mapping lists a model with other inputs."""
    media = name in _listed("MULTIMODAL_LM") or model_type in _AUDIO_INPUT
    return "multimodal-lm" if task in TEXT and media else task
