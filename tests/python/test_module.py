"""The Python module against numpy: attention, bytes, buffers and DLPack in and out, errors, lifetimes, threads.

    PYTHONPATH=BUILD/python python3 -m pytest tests/python
"""
import array
import gc
import math
import mmap
import pathlib
import re
import sys
import threading
import weakref

import livequant as lq
import numpy as np
import pytest

PRESETS = ["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "kivi4", "kivi2", "kivi2_sync", "qserve8", "qserve4"]
LAYERS, KV, Q, DIM = 2, 2, 4, 64


def make_schema(text="f32"):
    return lq.Schema(text, layers=LAYERS, kv_heads=KV, head_dim=DIM)


def make_cache(text="f32", **options):
    return lq.Cache(make_schema(text), **{"max_len": 600, "max_q_heads": Q, "max_sequences": 4, **options})


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def append(cache, sequence, rng, rows, **kw):
    """One step of random rows; (k, v, q, out) by layer."""
    done = []
    with cache.begin(sequence, rows) as step:
        for layer in range(LAYERS):
            k, v, q = normal(rng, rows, KV, DIM), normal(rng, rows, KV, DIM), normal(rng, rows, Q, DIM)
            step.prepare(layer, k, v)
            done.append((k, v, q, np.asarray(step.attend(layer, q, 1 / math.sqrt(DIM)))))
        step.publish()
    return done


def attend_f64(q, k, v, scale):
    """[rows, heads, dim] of the last rows of k and v [length, kv_heads, dim]."""
    rows, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("rhd,jhd->hrj", q.astype(np.float64), k) * scale
    scores[:, np.arange(rows)[:, None] + length - rows < np.arange(length)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hrj,jhd->rhd", weights / weights.sum(-1, keepdims=True), v)


def test_attention_is_attention():
    rng, cache = np.random.default_rng(1), make_cache("f32")
    sequence, history = cache.open(), [([], []) for _ in range(LAYERS)]
    for rows in (200, 1, 1, 40, 1):
        for layer, (k, v, q, out) in enumerate(append(cache, sequence, rng, rows)):
            history[layer][0].append(k), history[layer][1].append(v)
            assert out.shape == (rows, Q, DIM) and out.dtype == np.float32
            np.testing.assert_allclose(out, attend_f64(q, *map(np.concatenate, history[layer]), 1 / math.sqrt(DIM)), atol=2e-6)
    assert len(sequence) == 243


@pytest.mark.parametrize("preset", PRESETS)
def test_how_rows_lie_in_memory_changes_no_bit(preset):
    """Dense, strided, flat, by buffer, by DLPack, into `out`, on memory of the caller, cut otherwise: one state, one output."""
    class OnlyDlpack:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self):
            return self.x.__dlpack__()

    def strided(x):
        wide = np.full((len(x), x[0].size + 5), np.nan, np.float32)
        wide[:, :x[0].size] = x.reshape(len(x), -1)
        return wide[:, :x[0].size]

    rows, rng = 170, np.random.default_rng(2)
    data = [[normal(rng, rows, KV, DIM), normal(rng, rows, KV, DIM), normal(rng, rows, Q, DIM)] for _ in range(LAYERS)]
    need = lq.Cache.memory_bytes(make_schema(preset), max_len=600, max_q_heads=Q, max_sequences=4)
    ways = [(lambda x: x, {}, [170]), (strided, {"threads": 2}, [1, 100, 69]), (OnlyDlpack, {"memory": mmap.mmap(-1, need)}, [64, 106]),
            (lambda x: memoryview(x.reshape(len(x), -1)), {}, [169, 1])]
    results = []
    for way, options, cuts in ways:
        cache = make_cache(preset, **options)
        sequence, at, outs = cache.open(), 0, [[] for _ in range(LAYERS)]
        for n in cuts:
            with cache.begin(sequence, n) as step:
                assert (step.rows, step.count(0), step.first_row(0), step.position(0)) == (n, n, 0, at)
                for layer in range(LAYERS):
                    k, v, q = (x[at:at + n] for x in data[layer])
                    step.prepare(layer, way(k), way(v))
                    if way is strided:
                        out = strided(np.zeros((n, Q, DIM), np.float32))
                        assert step.attend(layer, way(q), 0.125, out=out) is out
                        assert np.isnan(out.base[:, -5:]).all()
                    else:
                        out = np.from_dlpack(step.attend(layer, way(q), scale=0.125))
                    outs[layer].append(np.array(out).reshape(n, -1))
                step.publish()
            at += n
        results.append((sequence.state(), [np.concatenate(o).tobytes() for o in outs]))
    for other in results[1:]:
        assert other[1] == results[0][1]
        assert other[0] == results[0][0]


def test_codes_are_what_the_pages_say():
    """int8: scale = max / 127 of a row's head, as docs/formats/symmetric_rows.md; read() is codes times scales."""
    rng, cache = np.random.default_rng(3), make_cache("int8")
    sequence = cache.open()
    (k, v, _, _), *_ = append(cache, sequence, rng, 90)
    with sequence.lease() as lease:
        for tensor, rows in (("k", k), ("v", v)):
            codes = np.asarray(lease.array(0, tensor, "codes"))
            scales = np.asarray(lease.array(0, tensor, "scales"))
            assert codes.dtype == np.uint8 and codes.shape == (KV, 90, DIM) and scales.dtype == np.float16
            for head in range(KV):
                read = np.asarray(lease.read(0, tensor, head))
                values = codes[head].view(np.int8).astype(np.float32) * scales[head].astype(np.float32)
                assert read.tobytes() == values.tobytes()
                # Rows are rounded to f16 first; the scale may be rounded up by an ulp of f16.
                assert (np.abs(read - rows[:, head]) <= scales[head].astype(np.float32) * 0.51 + 2e-3).all()
        empty = lease.array(0, "k", "zeros")
        assert math.prod(empty.shape) == 0 and np.asarray(empty).size == 0
        with pytest.raises(lq.InvalidArgument, match='"codes"'):
            lease.array(0, "k", "bits")
        with pytest.raises(lq.InvalidArgument, match='"keys"'):
            lease.read(0, "keys", 0)
    with pytest.raises(lq.Closed):
        len(lease)


def test_random_operations_match_a_list_of_rows():
    for seed in range(1, 16):
        rng, cache = np.random.default_rng(seed), make_cache("f32")
        lives = [(cache.open(), np.zeros((0, KV, DIM), np.float32))]
        for _ in range(15):
            i = int(rng.integers(len(lives)))
            sequence, rows = lives[i]
            match int(rng.integers(4)):
                case 0 if len(lives) < 4:
                    lives.append((sequence.fork(), rows))
                case 1:
                    to = int(rng.integers(len(rows) + 1))
                    sequence.truncate(to)
                    lives[i] = (sequence, rows[:to])
                case 2 if len(lives) > 1:
                    lives.pop(i)  # nobody refers to it: released
                    del sequence
                case _:
                    n = int(rng.integers(1, 80))
                    if len(rows) + n <= 600:
                        keep = int(rng.integers(n + 1))
                        with cache.begin([(sequence, n, True)]) as step:
                            count = step.count()
                            new = normal(rng, count, KV, DIM)
                            for layer in range(LAYERS):
                                step.prepare(layer, new, new)
                            step.publish([min(keep, count)])
                        lives[i] = (sequence, np.concatenate([rows, new[:min(keep, count)]]))
            for sequence, rows in lives:
                assert len(sequence) == len(rows), seed
                with sequence.lease() as lease:
                    for head in range(KV):
                        assert np.array_equal(np.asarray(lease.read(1, "v", head)).reshape(-1, DIM), rows[:, head]), seed


def test_a_batch_is_its_sequences():
    rng, cache, other = np.random.default_rng(4), make_cache("kivi2"), make_cache("kivi2")
    a, b, alone = cache.open(), cache.open(), other.open()
    append(cache, b, rng, 17)
    k, v, q = normal(rng, 163, KV, DIM), normal(rng, 163, KV, DIM), normal(rng, 163, Q, DIM)
    with cache.begin([(b, 3, False), (a, 160, False)]) as step, other.begin(alone, 160) as single:
        assert [step.first_row(i) for i in range(3)] == [0, 3, -1] and step.position(0) == 17
        for layer in range(LAYERS):
            step.prepare(layer, k, v), single.prepare(layer, k[3:], v[3:])
            both, one = np.asarray(step.attend(layer, q, 0.125)), np.asarray(single.attend(layer, q[3:], 0.125))
            assert both[3:].tobytes() == one.tobytes()
        step.publish(), single.publish()
    assert a.state() == alone.state() and len(b) == 20


def test_errors_are_typed_and_change_nothing():
    rng, cache = np.random.default_rng(5), make_cache("kivi4")
    sequence = cache.open()
    append(cache, sequence, rng, 140)
    before = sequence.state()
    rows, queries = normal(rng, 2, KV, DIM), normal(rng, 2, Q, DIM)

    def refused(error, match, call, *args, **kw):
        with pytest.raises(error, match=match) as info:
            call(*args, **kw)
        assert isinstance(info.value, lq.Error)

    with cache.begin(sequence, 2) as step:
        bad = [
            (rows.astype(np.float64), '"d"'), (rows.astype(np.float16), '"e"'), (rows[:1], "1 rows of 128 values"),
            (rows[:, :1], "2 rows of 64"), (rows[::-1], "stride of -512 bytes"), (np.asfortranarray(rows), "lie apart"),
            (rows[0, 0], r"shape \[64\]"), (array.array("f", [0.0] * 256), r"shape \[256\]"), ([[0.0] * 128] * 2, "list"), (None, "NoneType"),
            (np.zeros((2, 2 * KV * DIM), np.float32)[:, ::2], "lie apart"), (np.zeros((2, KV, DIM), ">f4"), '">f"')]
        for x, match in bad:
            refused(lq.InvalidArgument, match, step.prepare, 0, x, rows)
            refused(ValueError, match, step.prepare, 0, rows, x)
        refused(lq.InvalidArgument, "layer is 2", step.prepare, 2, rows, rows)
        refused(lq.InvalidArgument, "layer", step.attend, 0, queries, 0.125)
        step.prepare(0, rows, rows)
        refused(lq.InvalidArgument, "whole heads", step.attend, 0, normal(rng, 2, 100), 0.125)
        refused(lq.InvalidArgument, "3", step.attend, 0, normal(rng, 2, 3, DIM), 0.125)
        locked = np.zeros((2, Q, DIM), np.float32)
        locked.flags.writeable = False
        refused(lq.InvalidArgument, "cannot be written", step.attend, 0, queries, 0.125, out=locked)
        refused(lq.InvalidArgument, "out holds 1 rows", step.attend, 0, queries, 0.125, out=np.zeros((1, Q, DIM), np.float32))
        step.attend(0, queries, 0.125)
        refused(lq.InvalidArgument, "2 numbers of accepted", step.publish, [1, 1])
        rows[1, 0, 7] = np.nan
        refused(lq.NonFinite, "layer 1 V, position 141, head 0, channel 7", step.prepare, 1, normal(rng, 2, KV, DIM), rows)
        refused(lq.FailedStep, "", step.publish)
    refused(lq.FailedStep, "ended", step.publish)
    with cache.begin(sequence, 1) as step:
        step.prepare(0, rows[:1], rows[:1])
        refused(lq.DuplicateLayer, "0", step.prepare, 0, rows[:1], rows[:1])
    with cache.begin(sequence, 1) as step:
        step.prepare(0, rows[:1], rows[:1])
        refused(lq.MissingLayer, "1", step.publish)
    with cache.begin(sequence, 1) as step:
        for layer in range(LAYERS):
            step.prepare(layer, rows[:1], rows[:1])
        sequence.truncate(139)
        refused(lq.Stale, "", step.publish)
    assert sequence.state() != before and len(sequence) == 139
    refused(lq.OutOfRange, "600", cache.begin, sequence, 500)
    refused(lq.InvalidArgument, "", cache.begin, sequence, 0)
    refused(lq.InvalidArgument, "", cache.begin, [])
    refused(lq.InvalidArgument, "another cache", make_cache().begin, sequence, 1)
    refused(lq.InvalidArgument, "140", sequence.truncate, 140)
    others = [cache.open() for _ in range(3)]
    refused(lq.OutOfPages, "", cache.open)
    refused(MemoryError, "", sequence.fork)
    others[0].release()
    refused(lq.Closed, "", len, others[0])
    refused(lq.Closed, "", others[0].release)


def test_schemas():
    with pytest.raises(lq.NotFound, match="kivi2"):
        make_schema("kivi3")
    with pytest.raises(lq.InvalidArgument, match="bass"):
        make_schema('{"version": 1, "base": "f16", "bass": 1}')
    with pytest.raises(lq.Unsupported, match="80"):
        lq.Schema("kivi2", layers=1, kv_heads=1, head_dim=80)
    with pytest.raises(lq.InvalidArgument, match="theta"):
        lq.Schema("f16", layers=1, kv_heads=1, head_dim=64, rope={"thetas": 1})
    assert make_schema("kivi2").digest == make_schema('{"version": 1, "base": "kivi2"}').digest != make_schema("kivi4").digest
    yarn = {"type": "yarn", "factor": 4.0, "original_max_positions": 32, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2}
    schema = lq.Schema("int4", layers=3, layer_kv_heads=[1, 2, 1], layer_head_dims=[64, 128, 64], windows=[0, 64, 0], rope=yarn)
    assert schema.layers == 3
    assert schema.layer(1) == {"kv_heads": 2, "head_dim": 128, "window": 64, "pinned_rows": 0, "keys_before_rope": False}
    with pytest.raises(lq.InvalidArgument):
        schema.layer(3)
    ledger = make_schema("int8").ledger(1000)
    assert ledger["codes"] == 1000 * LAYERS * 2 * KV * DIM and ledger["qparams"] == 1000 * LAYERS * 2 * KV * 2
    with pytest.raises(lq.OutOfRange):
        make_schema().ledger(-1)
    assert lq.__version__.count(".") == 2


def test_arrays_share_their_memory():
    rng, cache = np.random.default_rng(6), make_cache("bf16")
    sequence = cache.open()
    append(cache, sequence, rng, 5)
    with cache.begin(sequence, 1) as step:
        step.prepare(0, normal(rng, 1, KV, DIM), normal(rng, 1, KV, DIM))
        out = step.attend(0, normal(rng, 1, Q, DIM), 0.125)
        view, again = np.asarray(out), np.from_dlpack(out)
        assert out.shape == (1, Q, DIM) and out.dtype == "float32" and out.__dlpack_device__() == (1, 0)
        view[0, 0, 0] = 42
        assert again[0, 0, 0] == 42 and memoryview(out)[0, 0, 0] == 42
        assert np.from_dlpack(type("Copy", (), {"__dlpack__": lambda s: out.__dlpack__(copy=True),
                                               "__dlpack_device__": lambda s: (1, 0)})())[0, 0, 0] == 42
        step.attend(0, normal(rng, 1, Q, DIM), 0.125, out=out)  # an Array is a buffer too
        assert view[0, 0, 0] != 42
        for kw in ({"stream": 1}, {"dl_device": (2, 0)}):
            with pytest.raises(lq.InvalidArgument):
                out.__dlpack__(**kw)
    # What a consumer took outlives the array; a capsule that nobody took is freed with its array.
    del out, view
    gc.collect()
    assert np.isfinite(again).all()

    source = np.arange(12, dtype=np.float32).reshape(3, 4).copy()
    held = sys.getrefcount(source)
    borrowed = lq.from_dlpack(source[:, 1:])
    assert sys.getrefcount(source) > held
    assert np.asarray(borrowed).tolist() == source[:, 1:].tolist() and np.shares_memory(np.asarray(borrowed), source)
    borrowed.__dlpack__()
    del borrowed
    gc.collect()
    assert sys.getrefcount(source) == held
    with pytest.raises(lq.Unsupported, match="64 bits"):
        lq.from_dlpack(np.zeros(3))
    with pytest.raises(lq.InvalidArgument, match="capsule"):
        lq.from_dlpack(type("No", (), {"__dlpack__": lambda s: 7})())


def test_memory_of_the_caller():
    schema = make_schema("kivi2")
    need = lq.Cache.memory_bytes(schema, max_len=600, max_q_heads=Q)
    memory = mmap.mmap(-1, need)
    cache = lq.Cache(schema, max_len=600, max_q_heads=Q, memory=memory)
    sequence = cache.open()
    del cache
    gc.collect()
    with pytest.raises(BufferError):
        memory.close()  # the sequence still stands on it
    assert len(sequence) == 0
    del sequence
    gc.collect()
    memory.close()
    with pytest.raises(lq.OutOfRange, match="4096"):
        lq.Cache(schema, max_len=600, max_q_heads=Q, memory=mmap.mmap(-1, 4096))
    with pytest.raises(lq.InvalidArgument, match="align"):
        lq.Cache(schema, max_len=600, max_q_heads=Q, memory=np.zeros(need + 4096, np.uint8)[1:])
    with pytest.raises(lq.InvalidArgument, match="budget_bytes"):
        lq.Cache(schema, max_len=600, max_q_heads=Q, memory=mmap.mmap(-1, need), budget_bytes=need)
    with pytest.raises(lq.OutOfRange, match=str(need)):
        lq.Cache(schema, max_len=600, max_q_heads=Q, budget_bytes=need - 1)


def test_objects_may_go_in_any_order():
    rng = np.random.default_rng(7)
    cache = make_cache("int4")
    sequence = cache.open()
    append(cache, sequence, rng, 9)
    lease, step, gone = sequence.lease(), cache.begin(sequence, 1), weakref.ref(sequence)
    del cache, sequence
    gc.collect()
    assert gone() is None and len(lease) == 9 and np.isfinite(np.asarray(lease.read(0, "k", 0))).all()
    with pytest.raises(lq.Stale):  # its sequence was released
        for layer in range(LAYERS):
            step.prepare(layer, normal(rng, 1, KV, DIM), normal(rng, 1, KV, DIM))
        step.publish()
    del step
    gc.collect()
    assert len(lease) == 9


def test_threads_on_one_cache_give_the_bits_of_one_thread():
    expected, cache = [], make_cache("kivi2", threads=2)
    for seed in range(4):
        alone = make_cache("kivi2")
        sequence = alone.open()
        for rows in (130, 1, 1, 40):
            append(alone, sequence, np.random.default_rng(seed), rows)
        expected.append(sequence.state())
    got = [None] * 4

    def work(seed):
        sequence = cache.open()
        for rows in (130, 1, 1, 40):
            append(cache, sequence, np.random.default_rng(seed), rows)
        got[seed] = sequence.state()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == expected


def test_the_readme_example():
    text = (pathlib.Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    code, = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {}
    exec(code, names)
    assert names["out"].shape == (300, 8, 64) and names["codes"].shape == (2, 256, 16) and len(names["branch"]) == 300


def test_a_step_in_two_threads_is_refused_not_raced():
    rng, cache = np.random.default_rng(8), make_cache("f32")
    sequence = cache.open()
    append(cache, sequence, rng, 300)
    q = normal(rng, 200, Q, DIM)
    with cache.begin(sequence, 200) as step:
        step.prepare(0, normal(rng, 200, KV, DIM), normal(rng, 200, KV, DIM))
        want, problems = np.asarray(step.attend(0, q, 0.125)).tobytes(), []

        def work():
            for _ in range(20):
                try:
                    if np.asarray(step.attend(0, q, 0.125)).tobytes() != want:
                        problems.append("other bits")
                except lq.InvalidArgument as e:
                    if "another thread" not in str(e):
                        problems.append(str(e))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert problems == []
