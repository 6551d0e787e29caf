"""The least decoding method, with one argument of its own, as the documents describe it."""

import torch


def generate(model, input_ids, generation_config, left_padding=None, **kwargs):
    """Greedy search, with as many pad tokens before the prompt as `left_padding` says."""
    settings = generation_config or model.generation_config
    width = input_ids.shape[1]
    limit = settings.max_length or width + settings.max_new_tokens
    if left_padding is not None:
        if not isinstance(left_padding, int) or left_padding < 0:
            raise ValueError(f"left_padding must be a whole number, got {left_padding}")
        pad = kwargs.pop("pad_token", None) or settings.pad_token_id or model.config.pad_token_id
        if pad is None:
            raise ValueError("there is no pad token")
        before = torch.full((len(input_ids), left_padding), pad, device=input_ids.device)
        input_ids = torch.cat((before, input_ids), 1)
    for _ in range(limit - input_ids.shape[1]):
        best = model(input_ids).logits[:, -1].argmax(-1)
        input_ids = torch.cat((input_ids, best[:, None]), 1)
    return input_ids
