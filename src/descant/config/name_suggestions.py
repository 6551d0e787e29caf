"""Suggestions for unknown parameter names: the closest known name, or that for another library's word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["OTHER_NAMES", "suggest_name"]

# Words of OpenAI's API, vLLM, llama.cpp, Ollama, TGI, CTranslate2 and lm-eval.
OTHER_NAMES: Final[Mapping[str, str]] = {
    "bad_words": "banned_phrases",
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "best_of": "num_return_sequences",
    "cfg_scale": "guidance_scale",
    "draft_model": "assistant_model",
    "gbnf": "grammar",
    "grammar_str": "grammar",
    "guided_choice": "grammar",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "json_schema": "grammar",
    "length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "max_gen_toks": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_tokens_to_sample": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "mirostat": "mirostat_tau",
    "n": "num_return_sequences",
    "n_predict": "max_new_tokens",
    "negative_prompt": "negative_prompt_ids",
    "num_predict": "max_new_tokens",
    "num_samples": "num_return_sequences",
    "random_seed": "seed",
    "regex": "grammar",
    "repeat_penalty": "repetition_penalty",
    "response_format": "grammar",
    "stop": "stop_strings",
    "stop_sequences": "stop_strings",
    "stop_words": "stop_strings",
    "structured_outputs": "grammar",
    "temp": "temperature",
    "typical": "typical_p",
    "until": "stop_strings",
}


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """What to write in place of an unknown name; None: no known name is close."""
    known = set(known)
    other = OTHER_NAMES.get(name)
    if other in known:
        return f"the name here is `{other}`"
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean `{close[0]}`?" if close else None
