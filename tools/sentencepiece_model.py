"""SentencePiece's .model files: the fields that we need, read and written by hand, so that no protobuf library is needed.

Imported by tools/sentencepiece_compare.py and tools/train_unigram.py. Field numbers: google/sentencepiece, src/sentencepiece_model.proto.
"""
import struct

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
BPE = 2


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """(number, value) of each field; a message is still bytes."""
    out, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if kind == 2 else ({5: 4, 1: 8}[kind], at)
            value, at = data[at:at + size], at + size
        out.append((key >> 3, value))
    return out


def number(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def put(field, value):
    if isinstance(value, int):
        return number(field << 3) + number(value)
    if isinstance(value, float):
        return number(field << 3 | 5) + struct.pack("<f", value)
    return number(field << 3 | 2) + number(len(value)) + value


def parts(data):
    """pieces as [text, score, type] by id, and the messages TrainerSpec and NormalizerSpec as dictionaries of fields."""
    pieces, trainer, normalizer = [], {}, {}
    for field, value in fields(data):
        if field == 1:
            piece = dict(fields(value))
            pieces.append([piece[1].decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0, piece.get(3, NORMAL)])
        elif field == 2:
            trainer = dict(fields(value))
        elif field == 3:
            normalizer = dict(fields(value))
    return pieces, trainer, normalizer


def read_model(data):
    """Pieces of a BPE model that leaves its text alone, and whether it puts a space in front."""
    pieces, trainer, normalizer = parts(data)
    assert trainer.get(3) == BPE, "no BPE model"
    assert not normalizer.get(2) and normalizer.get(4, 1) == 0, "a model that normalizes (train with identity and no extra white space removed)"
    return pieces, bool(normalizer.get(3, 1))


def write_model(pieces, prefix):
    """A BPE model over `pieces`; `prefix`: a space in front of a text."""
    out = b"".join(put(1, put(1, text.encode()) + put(2, float(score)) + put(3, kind)) for text, score, kind in pieces)
    unknown = next(i for i, p in enumerate(pieces) if p[2] == UNKNOWN)
    trainer = put(3, BPE) + put(35, int(any(p[2] == BYTE for p in pieces))) + put(40, unknown) + put(45, pieces[unknown][0].encode())
    normalizer = put(1, b"identity") + put(3, int(prefix)) + put(4, 0) + put(5, 1)
    return out + put(2, trainer) + put(3, normalizer)
