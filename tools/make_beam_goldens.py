#!/usr/bin/env python3
"""Makes tests/runtime/golden/beams.json: beam searches that transformers runs on models of tests/model/golden.

    python3 tools/make_beam_goldens.py tests/model/golden tests/runtime/golden/beams.json

Needs torch and transformers; a CPU is enough. Models run in f32 on the weights of their files, do_sample=False, everything
else as `generate` has it by default. Each case has every hypothesis, best first: tokens without the prompt (an eos that ends
one is the last of them) and its score. Seeds are taken so that no two hypotheses of a case have scores closer than MARGIN.
"""

import json
import os
import sys

import torch
import transformers

MARGIN = 1e-4
MODELS = ["llama_bias", "llama_gqa5", "qwen3", "mistral_full"]
CASES = [  # beams, new tokens, length penalty, eos ids
    dict(beams=2, new=12, penalty=1.0, eos=0),
    dict(beams=4, new=16, penalty=1.0, eos=1),
    dict(beams=3, new=20, penalty=2.0, eos=2),
    dict(beams=5, new=24, penalty=0.0, eos=1),
    dict(beams=4, new=24, penalty=-1.0, eos=3),
    dict(beams=8, new=10, penalty=0.7, eos=1),
]


def search(model, prompt, case, eos):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=case["beams"],
        num_return_sequences=case["beams"],
        do_sample=False,
        max_new_tokens=case["new"],
        length_penalty=case["penalty"],
        eos_token_id=eos or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        tokens = row[len(prompt):]
        for i, token in enumerate(tokens):
            if token in eos:
                tokens = tokens[: i + 1]
                break
        found.append(dict(tokens=tokens, score=score))
    return found


def make(name, path, case, index):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    vocab = model.config.vocab_size
    for seed in range(index * 100, index * 100 + 100):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, vocab, (7 + 5 * index,), generator=generator).tolist()
        # Ids that a search without eos meets early, so that hypotheses of many lengths end.
        free = search(model, prompt, dict(case, eos=0), [])
        eos = []
        for hypothesis in free:
            for token in hypothesis["tokens"][2::3]:
                if len(eos) < case["eos"] and token not in eos:
                    eos.append(token)
        found = search(model, prompt, case, eos)
        scores = sorted((h["score"] for h in found), reverse=True)
        if all(a - b > MARGIN for a, b in zip(scores, scores[1:])):
            return dict(model=name, num_beams=case["beams"], max_new_tokens=case["new"], length_penalty=case["penalty"],
                        eos=eos, prompt=prompt, hypotheses=found)
    raise SystemExit(f"{name}: no seed gives scores apart by {MARGIN}")


def main():
    models, out = sys.argv[1:]
    torch.set_num_threads(1)
    cases = [make(name, os.path.join(models, name), case, index)
             for name in MODELS for index, case in enumerate(CASES)]
    os.makedirs(os.path.dirname(out), exist_ok=True)
    with open(out, "w") as file:
        json.dump(dict(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], cases=cases), file, separators=(",", ":"))
        file.write("\n")
    ended = sum(h["tokens"][-1] in c["eos"] for c in cases for h in c["hypotheses"])
    print(len(cases), "cases,", ended, "hypotheses ended by an eos of", sum(len(c["hypotheses"]) for c in cases))


if __name__ == "__main__":
    main()
