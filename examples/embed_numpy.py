#!/usr/bin/env python3
"""Does again what `livequant run --record FILE` did, in numpy, and compares every attention output and every cache byte.

    livequant run -p "It was a dark and stormy night" -n 40 --kv-cache-dtype kivi2 --record night.safetensors
    python3 examples/embed_numpy.py night.safetensors

Exit 1 if a bit differs. The file: docs/formats/record.md.
"""
import json
import sys

import livequant
import numpy

DTYPES = {"F32": numpy.float32, "F16": numpy.float16, "BF16": numpy.uint16, "U8": numpy.uint8}


def read_record(path):
    """(tensors by name, metadata) of a safetensors file."""
    raw = numpy.fromfile(path, numpy.uint8)
    size = int(raw[:8].view(numpy.uint64)[0])
    header = json.loads(raw[8:8 + size].tobytes())
    data, tensors = raw[8 + size:], {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            tensors[name] = data[begin:end].copy().view(DTYPES[t["dtype"]]).reshape(t["shape"])
    return tensors, header["__metadata__"]


def schema_of(meta):
    """The schema of the run: its policy, and what the model fixes."""
    shape, text = json.loads(meta["shape"]), {k.removeprefix("rope."): v for k, v in json.loads(meta["rope"]).items()}
    rope = {"type": text.pop("type"), "interleaved": text.pop("pairing") == "interleaved", "truncate": text.pop("truncate") == "true",
            "dims": int(text.pop("dims")), "original_max_positions": int(text.pop("original_max_positions")),
            **{k: float(v) for k, v in text.items()}}
    return livequant.Schema(meta["schema"], layers=shape["layers"], kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], rope=rope)


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def main(path):
    tensors, meta = read_record(path)
    if (meta["format"], meta["version"]) != ("livequant.record", "1"):
        sys.exit(f"{path}: not a livequant.record of version 1")
    shape, steps, scale = json.loads(meta["shape"]), json.loads(meta["steps"]), float(meta["scale"])
    schema, rows, layers = schema_of(meta), sum(steps), range(shape["layers"])
    cache = livequant.Cache(schema, max_len=rows, max_q_heads=shape["q_heads"], max_step_rows=max(steps))
    sequence, at, differing = cache.open(), 0, 0
    for n in steps:
        with cache.begin(sequence, n) as step:
            for layer in layers:
                k, v, q, expected = (tensors[f"{t}.{layer}"][at:at + n] for t in ("k", "v", "q", "attention"))
                step.prepare(layer, k, v)
                out = numpy.asarray(step.attend(layer, q, scale))
                differing += int((out.view(numpy.uint32) != expected.view(numpy.uint32)).sum())
            step.publish()
        at += n
    arrays = []
    with sequence.lease() as lease:
        for name in tensors:
            if name.count(".") == 2:  # k.3.codes
                tensor, layer, part = name.split(".")
                arrays.append(same_bits(numpy.asarray(lease.array(int(layer), tensor, part)), tensors[name]))
    state = sequence.state() == tensors["state"].tobytes()
    print(f"{rows} rows in {len(steps)} steps: {differing} of {rows * shape['q_heads'] * shape['head_dim'] * shape['layers']} attention "
          f"outputs differ; {sum(arrays)} of {len(arrays)} arrays are equal; {len(tensors['state'])} cache bytes are "
          f"{'equal' if state else 'DIFFERENT'}")
    return 0 if differing == 0 and all(arrays) and state else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
