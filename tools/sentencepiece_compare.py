#!/usr/bin/env python3
"""The ids that a GGUF file's SentencePiece tokenizer gives, against Google's library and against the tokenizer.json of the same vocabulary.

    tools/sentencepiece_compare.py build/dev/tests/text/tokenizer_ids MODEL corpus.jsonl [--work DIR] [--unused N]

MODEL is a SentencePiece BPE model (`.model`) or a tokenizer.json of that kind (Llama 2, Gemma), whose pieces get the scores that its merges
imply. It is written both as a GGUF file without tensors, which `tokenizer_ids` encodes, and as a `.model` for the library; the corpus is
that of tools/tokenizer_corpus.py. --unused makes every Nth piece an unused one. Exit 1 if an id differs. Needs Debian's
python3-sentencepiece. The library sees no control tokens in a text and puts no space behind user-defined ones, so texts where that
matters are compared with tokenizer.json only. And a tokenizer.json with user-defined runs of blanks (Gemma) looks for them before U+0020
becomes U+2581, the library (and we) after that: texts with a U+2581 of their own are then compared with the library only.
"""
import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import sentencepiece

from make_gguf import pieces_of_json, sentencepiece_pairs, text, u32
from sentencepiece_model import CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER, read_model, write_model


def write_gguf(path, pieces, prefix):
    pairs = {**sentencepiece_pairs(pieces, prefix), "tokenizer.ggml.bos_token_id": u32(1)}
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(text(k) + v for k, v in pairs.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer_ids", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("corpus", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--unused", type=int, default=0)
    args = parser.parse_args()
    work = args.work or pathlib.Path(tempfile.mkdtemp())
    document = json.loads(args.model.read_text()) if args.model.suffix == ".json" else None
    if document:
        pieces, prefix = pieces_of_json(document)
    else:
        pieces, prefix = read_model(args.model.read_bytes())
    if args.unused:
        for p in pieces[::args.unused]:
            if p[2] == NORMAL and len(p[0]) > 1:
                p[2] = UNUSED
    gguf, model = work / "tokenizer.gguf", work / "tokenizer.model"
    write_gguf(gguf, pieces, prefix)
    model.write_bytes(write_model(pieces, prefix))

    def ours(tokenizer):
        lines = subprocess.run([args.tokenizer_ids, tokenizer, args.corpus], check=True, capture_output=True).stdout.decode().strip().split("\n")
        return [json.loads(line) for line in lines]

    got = ours(gguf)
    directory = ours(args.model) if document and not args.unused else None
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    added = [p for p, _, kind in pieces if kind in (CONTROL, UNKNOWN) or (kind == USER and prefix and SPACE not in p)]
    blanks = any(kind == USER and SPACE in p for p, _, kind in pieces)
    texts = ids = different = skipped = json_different = json_skipped = 0
    for n, line in enumerate(args.corpus.read_text().strip().split("\n")):
        line = json.loads(line)
        if not isinstance(line, str):
            assert "error" in got[n], f"line {n} is not UTF-8 and was encoded"
            continue
        texts += 1
        ids += len(got[n]["ids"])
        if blanks and SPACE in line:
            json_skipped += 1
        elif directory and got[n] != directory[n]:
            json_different += 1
            if json_different <= 5:
                print(f"line {n}: {json.dumps(line)[:200]}\n  gguf {str(got[n])[:300]}\n  json {str(directory[n])[:300]}")
        if any(p in line for p in added) or "\0" in line:  # the library ends a text at NUL
            skipped += 1
            continue
        want = library.encode(line)
        if want != got[n]["ids"]:
            different += 1
            if different <= 5:
                print(f"line {n}: {json.dumps(line)[:200]}\n  ours    {str(got[n]['ids'])[:300]}\n  library {str(want)[:300]}")
    print(json.dumps({"model": args.model.name, "pieces": len(pieces), "prefix": prefix, "texts": texts, "ids": ids,
                      "compared with the library": texts - skipped, "different": different,
                      "compared with tokenizer.json": texts - json_skipped if directory else 0, "different from it": json_different, **got[-1]}))
    sys.exit(1 if different + json_different else 0)


if __name__ == "__main__":
    main()
