#!/usr/bin/env python3
"""Trains the unigram vocabularies of docs/results/tokenizers.md and writes each as the tokenizer.json of a kind that real models have.

    tools/train_unigram.py DIR corpus.jsonl models/books-7m/eval/heldout_books.txt

Makes DIR/t5.json, DIR/xlmr.json (one model: SentencePiece's nmt_nfkc) and DIR/albert.json (nfkc_cf, byte fallback). corpus.jsonl is that of
tools/tokenizer_corpus.py. Needs Debian's python3-sentencepiece (0.1.97, which gives the same files every time). Then, for each:

    build/dev/tests/text/tokenizer_ids DIR/t5.json corpus.jsonl > ids.jsonl
    node tools/tokenizer_compare.mjs NPM_DIR DIR/t5.json corpus.jsonl ids.jsonl
"""
import argparse
import base64
import json
import pathlib

import sentencepiece

from sentencepiece_model import CONTROL, SPACE, UNKNOWN, parts


def train(folder, name, **settings):
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "train.txt"), model_prefix=str(folder / name), model_type="unigram",
                                             hard_vocab_limit=False, character_coverage=0.98, minloglevel=2, **settings)
    return (folder / f"{name}.model").read_bytes()


def added(i, content, **more):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **more}


def metaspace(**more):
    return {"type": "Metaspace", "replacement": SPACE, **more}


def replace(kind, pattern, content):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def tokenizer(model, style):
    pieces, _, normalizer = parts(model)
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(normalizer[2]).decode()}
    tokens = [added(i, text) for i, (text, _, kind) in enumerate(pieces) if kind in (UNKNOWN, CONTROL)]
    decoder, n = metaspace(add_prefix_space=True), len(pieces)
    if style == "xlmr":
        pre = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace(add_prefix_space=True)]}
        normal = precompiled
        tokens.append(added(n, "<mask>", lstrip=True))
    elif style == "t5":
        pre = metaspace(prepend_scheme="always", split=True)
        normal = {"type": "Sequence", "normalizers": [precompiled, {"type": "Strip", "strip_left": False, "strip_right": True},
                                                      replace("Regex", " {2,}", SPACE)]}
        tokens += [added(n + i, f"<extra_id_{i}>", rstrip=i == 1, normalized=i > 1, special=i < 3) for i in range(4)]
    else:
        pre = metaspace(prepend_scheme="first", split=True)
        normal = {"type": "Sequence", "normalizers": [replace("String", "``", '"'), replace("String", "''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
                                                      {"type": "Lowercase"}, precompiled, replace("Regex", " {2,}", " ")]}
        tokens.append(added(n, "zqword", single_word=True, normalized=True, special=False))
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace(prepend_scheme="first", split=True)]}
    unknown = next(i for i, p in enumerate(pieces) if p[2] == UNKNOWN)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normal, "pre_tokenizer": pre, "post_processor": None,
            "decoder": decoder, "model": {"type": "Unigram", "unk_id": unknown, "vocab": [[text, score] for text, score, _ in pieces],
                                          "byte_fallback": style == "albert"}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("corpus", type=pathlib.Path)
    parser.add_argument("books", type=pathlib.Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sentences = [json.loads(line) for line in args.corpus.read_text().split("\n")[:70]]
    sentences = [" ".join(s.split()) for s in sentences * 3 if isinstance(s, str) and len(s) < 2000]
    (args.folder / "train.txt").write_text("\n".join(args.books.read_text().split("\n")[:20000] + sentences) + "\n")
    wide = train(args.folder, "nmt_nfkc", vocab_size=8000, normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    folded = train(args.folder, "nfkc_cf", vocab_size=6000, normalization_rule_name="nfkc_cf", byte_fallback=True)
    for style, model in [("t5", wide), ("xlmr", wide), ("albert", folded)]:
        path = args.folder / f"{style}.json"
        path.write_text(json.dumps(tokenizer(model, style)))
        print(f"{path}: {len(parts(model)[0])} pieces")


if __name__ == "__main__":
    main()
