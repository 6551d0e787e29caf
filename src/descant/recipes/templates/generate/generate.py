"""The likeliest of several samples."""

import torch

import descant
from descant.parts import check_number


def generate(model, input_ids=None, *, tries: int = 4, seed: int = 0, **arguments):
    """Sample `tries` continuations of each prompt, and return the likeliest of them.

    That is the one with the highest mean log-probability per token. A function replaces
    `generate`: it gets all arguments of the call and returns token ids. It may call
    `descant.generate` as often as needed.
    """
    tries = check_number("tries", tries, 1, integer=True)
    # With a seed the output is reproducible, and torch's global generator is not used.
    output = descant.generate(
        model,
        input_ids=input_ids,
        do_sample=True,
        seed=seed,
        num_return_sequences=tries,
        logprobs=0,
        return_dict_in_generate=True,
        **arguments,
    )
    means = torch.tensor([float(sequence.raw.mean()) for sequence in output.logprobs])
    means = means.view(-1, tries)  # [B, tries]
    best = (means.argmax(1) + torch.arange(len(means)) * tries).tolist()
    # Cut the padding that only the other sequences need.
    lengths = [len(sequence.raw) for sequence in output.logprobs]
    padding = max(lengths) - max(lengths[index] for index in best)
    return output.sequences[best, : output.sequences.shape[1] - padding]
