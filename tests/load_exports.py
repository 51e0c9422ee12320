# SPDX-License-Identifier: Apache-2.0
"""Loads exported folders as a user does who has torch and transformers only.

Arguments: a file to write, then folders. Packages of the training are hidden. For each folder the logits
of fixed ids and greedy and beam continuations, with the cache and without, are saved as tensors. Run by
test_export.py in this environment and in those that ASYMLOOP_PYTHONS names.
"""

import sys


class Hidden:
    """Makes the training's packages impossible to import, wherever they are installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('asymloop_foundry', 'composer', 'llmfoundry', 'streaming'):
            raise ModuleNotFoundError(f'{name} is hidden from this process')


sys.meta_path.insert(0, Hidden())

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

torch.set_num_threads(1)


def main(out, folders):
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    report = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        if model.dtype != torch.float32:
            model = model.float()
        found = {'logits': model(ids).logits.detach()}
        looped = model.config.n_decoder_layers > 0
        for k in (1, 3, 5) if looped else (1,):
            for beams in (1, 3) if k == 3 or not looped else (1,):
                found[f'{k} iterations, {beams} beams'] = [
                    model.generate(
                        ids,
                        attention_mask=mask,
                        max_new_tokens=12,
                        do_sample=False,
                        num_beams=beams,
                        num_iterations=k,
                        use_cache=use_cache,
                        pad_token_id=0,
                    )
                    for use_cache in (True, False)
                ]
        report[folder] = found
    first = folders[0]
    tokenizer = AutoTokenizer.from_pretrained(first, trust_remote_code=True)
    encoded = tokenizer('A model without its tokenizer is worth little.', return_tensors='pt')
    model = AutoModelForCausalLM.from_pretrained(first, trust_remote_code=True)
    report['encoded'] = dict(encoded.items())
    report['generated'] = model.generate(**encoded, max_new_tokens=4)
    model.save_pretrained(f'{first}-again')
    again = AutoModelForCausalLM.from_pretrained(f'{first}-again', trust_remote_code=True)
    report['again'] = again(ids).logits.detach()
    torch.save(report, out)


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
