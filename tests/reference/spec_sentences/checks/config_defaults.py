"""Documented defaults of GenerationConfig, field by field."""

from __future__ import annotations

from tests.reference.spec_sentences.sentence import CONFIG, page

field = page(CONFIG)

DEFAULTS = {
    "max_length": (133, 20),
    "max_new_tokens": (136, None),
    "min_length": (138, 0),
    "min_new_tokens": (141, None),
    "early_stopping": (143, False),
    "max_time": (149, None),
    "stop_strings": (152, None),
    "do_sample": (157, False),
    "num_beams": (159, 1),
    "num_beam_groups": (161, 1),
    "penalty_alpha": (164, None),
    "dola_layers": (166, None),
    "use_cache": (178, True),
    "cache_implementation": (181, None),
    "cache_config": (194, None),
    "temperature": (203, 1.0),
    "top_k": (205, 50),
    "top_p": (207, 1.0),
    "min_p": (210, None),
    "typical_p": (214, 1.0),
    "epsilon_cutoff": (220, 0.0),
    "eta_cutoff": (225, 0.0),
    "diversity_penalty": (232, 0.0),
    "repetition_penalty": (235, 1.0),
    "encoder_repetition_penalty": (238, 1.0),
    "length_penalty": (241, 1.0),
    "no_repeat_ngram_size": (246, 0),
    "bad_words_ids": (248, None),
    "force_words_ids": (251, None),
    "renormalize_logits": (256, False),
    "constraints": (260, None),
    "forced_bos_token_id": (263, None),
    "forced_eos_token_id": (267, None),
    "remove_invalid_values": (270, False),
    "exponential_decay_length_penalty": (273, None),
    "suppress_tokens": (277, None),
    "begin_suppress_tokens": (280, None),
    "forced_decoder_ids": (283, None),
    "sequence_bias": (287, None),
    "token_healing": (291, False),
    "guidance_scale": (294, None),
    "watermarking_config": (301, None),
    "num_return_sequences": (308, 1),
    "output_attentions": (310, False),
    "output_hidden_states": (313, False),
    "output_scores": (316, False),
    "return_dict_in_generate": (321, False),
    "pad_token_id": (328, None),
    "bos_token_id": (330, None),
    "eos_token_id": (332, None),
    "encoder_no_repeat_ngram_size": (337, 0),
    "decoder_start_token_id": (340, None),
    "is_assistant": (346, False),
    "num_assistant_tokens": (348, 20),
    "num_assistant_tokens_schedule": (353, "constant"),
    "assistant_confidence_threshold": (359, 0.4),
    "prompt_lookup_num_tokens": (366, None),
    "max_matching_ngram_size": (368, None),
    "assistant_early_exit": (370, None),
    "assistant_lookbehind": (373, 10),
    "target_lookbehind": (377, 10),
    "disable_compile": (387, False),
}

OURS = {
    "num_assistant_tokens_schedule": "It is 'adaptive': as many drafts as save time.",
}

for _name, (_line, _default) in DEFAULTS.items():

    @field(
        f"default_{_name}",
        _line,
        f"The default of `{_name}` is {_default!r}.",
        ours=OURS.get(_name, ""),
    )
    def _(lib, name=_name, default=_default):
        found = getattr(lib.GenerationConfig(), name)
        assert found == default, found
        return found
