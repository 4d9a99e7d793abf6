#!/usr/bin/env python3
"""Writes corpora of the fuzz targets chat_template, config, json, policy and tokenizer: small files, good and bad in one way each.

    tools/make_text_corpus.py [fuzz/corpus]

Files are named made_*; those of other names in the same folders were found by running the targets, or written by hand.
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "fuzz/corpus")
SPACE = "\u2581"


def save(target, items):
    folder = ROOT / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("made_*"):
        old.unlink()
    for i, item in enumerate(items):
        text = item if isinstance(item, (str, bytes)) else json.dumps(item, ensure_ascii=False)
        (folder / f"made_{i:03d}").write_bytes(text if isinstance(text, bytes) else text.encode())


def added(i, content, **more):
    return {"id": i, "content": content, **more}


def tokenizer():
    """Merge patches of the target's bases, a NUL byte and a text."""
    text = "\0ab <s> It's 42  \u00e9\u4e2d ab\n\tc\u0301 A\ufb01\u00a0<x>word "
    model = lambda **m: {"model": m}
    bad_models = [model(dropout=0.1), model(unk_token="zz"), model(unk_token=3), model(continuing_subword_prefix="##"), model(end_of_word_suffix="</w>"),
                  model(fuse_unk=1), model(ignore_merges=1), model(new=1), model(vocab=[]), model(vocab={"a": -1}), model(vocab={"a": 2}), model(type="WordPiece"),
                  model(merges=1), model(merges=["ab"]), model(merges=["a b c"]), model(merges=[["a"]]), model(merges=[["", "a"]]), model(merges=[["a", "zz"]]),
                  model(merges=[["a", "c"]]), model(merges=["a b", "a b"]), {"model": 3}, model(byte_fallback=True), model(byte_fallback=1),
                  model(unk_token="a", vocab={"b": None}), model(type=None), model(type=None, merges=None)]
    unigram = lambda **m: {"model": {"type": "Unigram", **m}}
    unigrams = [unigram(unk_id=99), unigram(unk_id=-1), unigram(unk_id=None), unigram(vocab=[["a"]]), unigram(vocab=[["a", 0], ["a", 1]]), unigram(vocab=[["", 0]]),
                unigram(vocab=[["x" * 200, 0]]), unigram(vocab=[]), unigram(vocab={}), unigram(byte_fallback=True, vocab=[["<unk>", 0], *[[f"<0x{b:02X}>", -9] for b in range(256)]]),
                {**unigram(), "pre_tokenizer": {"type": "ByteLevel"}}, unigram(unk_id=0, vocab=[["<s>", 0], ["aaaa", -1], ["zz", -2]])]
    normal = [{"type": "NFC"}, {"type": "NFD"}, {"type": "NFKC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "Strip"}, {"type": "Strip", "strip_left": False},
              {"type": "StripAccents"}, {"type": "Nmt"}, {"type": "Prepend", "prepend": "_"}, {"type": "Prepend", "prepend": "x" * 600}, {"type": "BertNormalizer"}, "NFC",
              {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}, {"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": ""},
              {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "x"}, {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"},
              {"type": "Replace", "pattern": {"String": "a", "Regex": "a"}, "content": "x"}, {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
              {"type": "Replace", "pattern": {"String": " "}, "content": "y" * 500}, {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 33},
              {"type": "Sequence", "normalizers": {}}, {"type": "Precompiled", "precompiled_charsmap": "AAA"}, {"type": "Precompiled", "precompiled_charsmap": "A?AA"},
              {"type": "Precompiled", "precompiled_charsmap": "/////w=="}, {"type": "NFC", "more": 1}]
    split = lambda pattern, behavior="Isolated", **more: {"type": "Split", "pattern": pattern, "behavior": behavior, **more}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    pre = [split({"String": "a"}, b, invert=i) for b in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"] for i in (False, True)]
    pre += [{"type": "Digits"}, {"type": "Digits", "individual_digits": True}, {"type": "Punctuation"}, {"type": "Punctuation", "behavior": "Removed"},
            {"type": "WhitespaceSplit"}, split({"Regex": "\\s+"}), split({"Regex": "(a+)+$"}), level]
    pre = [{"type": "Sequence", "pretokenizers": [p, level]} for p in pre]
    pre += [{"type": "ByteLevel"}, {"type": "ByteLevel", "add_prefix_space": 1}, {"type": "BertPreTokenizer"}, split({"String": "a"}, "Dropped"), split({"Regex": "("}),
            split({"Regex": "\\w"}), split("a"), {"type": "Sequence", "pretokenizers": [split({"String": "a"})] * 33}, {"type": "Sequence"}, 3]
    meta = lambda **m: {"type": "Metaspace", "replacement": SPACE, **m}
    metas = [meta(), meta(prepend_scheme="always"), meta(prepend_scheme="first"), meta(prepend_scheme="never"), meta(prepend_scheme="x"), meta(add_prefix_space=False),
             meta(str_rep=SPACE), meta(str_rep="_"), meta(split=False), meta(replacement="__"), meta(replacement=""), meta(add_prefix_space=1), meta(split=3)]
    template = lambda single, tokens=None: {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens if tokens is not None else
                                            {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}, "<e>": {"id": "<e>", "ids": [999], "tokens": ["<e>"]}}}
    token, sequence = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    post = [template([token, sequence, token]), template([sequence]), template([token]), template([sequence, sequence]), template([{**token, **sequence}]), template([{}]),
            template([{"Sequence": {"id": "B"}}]), template([{"SpecialToken": {"id": "<x>"}}, sequence]), template([{"SpecialToken": {"id": "<e>"}}, sequence]), template(3),
            template([token], 3), {"type": "ByteLevel"}, {"type": "BertProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]}, {"type": "BertProcessing", "sep": 3, "cls": ["<s>", 0]},
            {"type": "RobertaProcessing", "sep": ["<s>", 0], "cls": ["<s>", 999], "trim_offsets": True, "add_prefix_space": True}, {"type": "Other"}, "x",
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template([token, sequence])]},
            {"type": "Sequence", "processors": [template([sequence]), {"type": "BertProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]}]},
            {"type": "Sequence", "processors": [template([sequence]), template([sequence])]}]
    strip = lambda start=1, stop=0, content=" ": {"type": "Strip", "content": content, "start": start, "stop": stop}
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    fuse, fallback = {"type": "Fuse"}, {"type": "ByteFallback"}
    steps = [[replace, fallback, fuse, strip()], [fuse, strip(1, 1)], [fuse, strip(), strip()], [fuse, {"type": "ByteLevel"}], [replace, {"type": "ByteLevel"}], [fuse, replace],
             [fallback, replace], [fallback, strip()], [strip(1, 1)], [strip(content="ab")], [strip(start="x")], [fuse, fallback], [fuse, meta()], [meta(), replace],
             [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}], [replace] * 33, [{"type": "WordPiece"}], [3]]
    decoders = [{"type": "Sequence", "decoders": s} for s in steps] + [{"type": "ByteLevel"}, meta(), meta(prepend_scheme="first"), None, fuse]
    tokens = [[added(0, "<s>", special=1)], [added(-1, "x")], [added(300, "")], [added(300, "a")], [added(1, "<x>")], [added(300, "x" * 600)], [added(300, "<x>", more=1)],
              [added(300, "<x>"), added(301, "<x>")], [added(300, "<x>"), added(300, "<y>")], [3], 3, [added(300, "word", single_word=True)], [added(300, "<x>", lstrip=True)],
              [added(300, "<x>", rstrip=True, normalized=True)], [added(300, "<x>", special=True), added(301, "A", normalized=True)]]
    tops = [{"version": "2"}, {"version": None}, {"truncation": {}}, {"padding": {}}, {"more": 1}, [], 3]
    every = tops + bad_models + unigrams + [{"normalizer": n} for n in normal] + [{"pre_tokenizer": p} for p in pre] + [{"post_processor": p} for p in post]
    every += [{"decoder": d} for d in decoders] + [{"added_tokens": t} for t in tokens]
    every += [{**unigram(), "pre_tokenizer": m, "decoder": m} for m in metas] + [{**unigram(), "normalizer": n} for n in normal]
    every += [{"model": {"byte_fallback": False, "fuse_unk": f, "unk_token": u}, "normalizer": None} for f in (False, True) for u in ("<s>", None)]
    every += [{"model": {"byte_fallback": True}, "pre_tokenizer": m} for m in metas[:3]] + [{"model": {"byte_fallback": True, "ignore_merges": True}}]
    save("tokenizer", [json.dumps(e) + text for e in every])


def config():
    base = json.loads((pathlib.Path(__file__).parent.parent / "models/books-7m/config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
    changes = [("architectures", v) for v in (["GemmaForCausalLM"], [], "LlamaForCausalLM", [3], ["MistralForCausalLM"])]
    changes += [("model_type", "mistral"), ("model_type", 3), ("hidden_act", "gelu"), ("attention_bias", 1), ("mlp_bias", True), ("use_sliding_window", True),
                ("layer_types", ["full_attention"]), ("layer_types", 3), ("layer_types", [3] * 8), ("layer_types", ["x"] * 8), ("layer_types", ["full_attention"] * 8),
                ("partial_rotary_factor", 0.5), ("is_encoder_decoder", True), ("final_logit_softcapping", 30.0), ("auto_map", {"a": "b"}), ("tie_word_embeddings", "yes"),
                ("sliding_window", 4096), ("vocab_size", 0), ("vocab_size", 1.5), ("vocab_size", "x"), ("vocab_size", None), ("vocab_size", 1 << 64), ("vocab_size", -1),
                ("num_key_value_heads", 3), ("num_key_value_heads", None), ("head_dim", 63), ("head_dim", None), ("head_dim", 4096), ("rms_norm_eps", 0.0),
                ("rms_norm_eps", "x"), ("rms_norm_eps", 1e-300), ("rope_theta", 0), ("rope_theta", 5000), ("rope_theta", "x"), ("eos_token_id", 5000), ("eos_token_id", [1, 2]),
                ("eos_token_id", [1, -2]), ("eos_token_id", []), ("eos_token_id", None), ("bos_token_id", -1), ("bos_token_id", None), ("num_attention_heads", 3),
                ("hidden_size", 250), ("quantization_config", {"quant_method": "fp8"}), ("quantization_config", {"quant_method": "awq"}), ("torch_dtype", "float32"),
                ("unknown_field", None), ("unknown_field", 0), ("unknown_field", {"a": 1})]
    changes += [("rope_parameters", v) for v in (3, {}, {"rope_type": "x"}, {"rope_type": 3}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0.5},
                                                 {"rope_type": "linear", "factor": "x"}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "more": 1},
                                                 {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}, {"type": "linear", "rope_type": "yarn"}, yarn, llama3,
                                                 {**yarn, "beta_fast": 1.0, "beta_slow": 2.0}, {**yarn, "truncate": 1}, {**yarn, "truncate": False}, {**yarn, "mscale": 1.0},
                                                 {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}, {**yarn, "attention_factor": 0.5}, {**yarn, "attention_factor": -1},
                                                 {**llama3, "high_freq_factor": 1.0}, {**llama3, "low_freq_factor": None}, {**llama3, "original_max_position_embeddings": 0},
                                                 {**yarn, "original_max_position_embeddings": None}, {**yarn, "rope_theta": "x"})]
    out = []
    for name, value in changes:
        out.append({**base, name: value})
        if name == "rope_parameters":  # and by the older spelling
            out.append({**{k: v for k, v in base.items() if k != name}, "rope_scaling": value})
    mistral = {**{k: v for k, v in base.items()}, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    qwen = {**base, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    qwen3 = {**base, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    out += [{**mistral, "sliding_window": w} for w in (None, 0, -1, 128, "x")] + [mistral]
    for q in (qwen, qwen3):
        out += [q, {**q, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, {**q, "use_sliding_window": True, "sliding_window": None},
                {**q, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 100}, {**q, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": -1},
                {**q, "use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 4}, {**q, "use_sliding_window": 3},
                {**q, "layer_types": ["sliding_attention"] * 8}, {**q, "attention_bias": True}]
    save("config", out + ["[]", "{", "{}", {"architectures": None}])


def chat_template():
    errors = ["a\n{% if x %}", "{% for x y %}", "{{ 'a }}", "{{ a", "{# a", "{% raw %}", "{{ ! }}", "{{ }}", "{{ '\\ud800' }}", "{{ '\\u12' }}", "{% endif %}", "{% include 'x' %}",
              "{% break %}", "{% for a in b recursive %}{% endfor %}", "{{ f(*x) }}", "{{ 99999999999999999999 }}", "{{ x.y.z }}", "{{ 'a' + x }}", "{{ 'a' + 1 }}", "{{ 1 // 0 }}",
              "{{ 9223372036854775807 + 1 }}", "{{ 1 < 'a' }}", "{{ x() }}", "{{ 'a'|nothing }}", "{{ 'a' is nothing }}", "{{ 'a'.nothing() }}", "{{ {'items': 1}.items }}",
              "{{ '%s' % 1 }}", "{{ x|tojson }}", "{{ {1: 2} }}", "{{ [namespace()] }}", "{{ raise_exception('no') }}", "{% set a, b = [1] %}", "{% set x.y = 1 %}",
              "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", "{{ range(1, 2, 0)|list }}", "{{ [1][::0] }}", "{{ strftime_now('') }}",
              "{% for x in 5 %}{% endfor %}", "{{ 1 % 0 }}", "{{ 2 ** -1 }}", "{{ 2 ** 100 }}", "{{ -9223372036854775807 - 2 }}", "{{ [1] * -1 }}", "{{ 'a' * 'b' }}", "{{ -'a' }}",
              "{{ [1]['a'] }}", "{{ none.x }}", "{{ 'a'[9] }}", "{{ [1, 2][5:1:-1] }}", "{{ 'abc'['a':] }}", "{{ 5[1:] }}", "{{ 'a'.split('') }}", "{{ 'a b'.rsplit(none, 1) }}",
              "{{ 'a'.join(3) }}", "{{ 'a'.replace('a') }}", "{{ ['a', 1]|sort }}", "{{ [1]|join(',', attribute='x') }}", "{% set x = namespace(a=1) %}{% set x.b = 2 %}{{ x.b }}{{ x }}",
              "{% for a, b in [[1, 2], [3]] %}{% endfor %}", "{% set a, b = 1 %}", "{% macro m() %}{% endmacro %}{{ m }}", "{% call f() %}x{% endcall %}", "{% filter nothing %}x{% endfilter %}",
              "{% with a=1, b=2 %}{{ a + b }}{% endwith %}", "{% generation %}x{% endgeneration %}", "{% set a %}x{% endset %}{{ a }}", "{%- if 1 -%} x {%- endif -%} y",
              "{{ caller() }}", "{% continue %}", "{{ loop }}", "{{ loop.index }}", "{{ range() }}", "{{ range(1, 2, 3, 4) }}", "{{ range('a') }}", "{{ namespace(1) }}", "{{ dict(1) }}"]
    texts = ["'  aXb c '", "''", "'\u00fc\u00df'", "'1.5'", "'a\\nb'", "5", "2.5", "none", "true", "x", "[3, 1, 2]", "[]", "{'b': 1, 'a': [2]}", "['b', 'A', 'b']", "[[1, 2], [3]]",
             "[{'k': 1, 'n': {'m': 2}}, {'k': 0}]", "(1, 'a')"]
    filters = ["abs", "attr('k')", "batch(2)", "capitalize", "count", "default('d')", "default('d', true)", "dictsort", "e", "escape", "first", "float", "float(1.5)", "format(1)",
               "groupby('k')", "indent", "indent(2, true)", "indent('> ', blank=true)", "int", "int(7)", "items", "items|list", "join", "join(', ')", "join('-', 'k')", "last", "length", "list",
               "lower", "map('upper')|list", "map(attribute='k')|list", "map(attribute='n.m')|list", "map(attribute='z', default=1)|list", "max", "min", "reject('none')|list",
               "rejectattr('k')|list", "replace('b', 'cc')", "replace('b', 'cc', 1)", "replace('', '-')", "reverse|list", "reverse", "round", "round(1, 'floor')", "safe", "select|list",
               "select('odd')|list", "selectattr('k', 'equalto', 1)|list", "selectattr('k')|list", "slice(2)|list", "sort", "sort(reverse=true)", "sort(attribute='k')",
               "sort(case_sensitive=true)", "string", "sum", "sum(attribute='k')", "title", "tojson", "tojson(indent=2)", "tojson(separators=1)", "tojson(ensure_ascii=true)", "trim", "trim('a')",
               "truncate(2)", "unique|list", "upper", "urlencode", "wordcount", "xmlattr", "string|length"]
    methods = ["strip()", "strip(' a')", "lstrip()", "rstrip()", "split()", "split('X')", "split('X', 1)", "split(none, 1)", "rsplit('X', 1)", "rsplit()", "upper()", "lower()", "title()",
               "capitalize()", "startswith('a')", "startswith(('a', ' '))", "endswith('c')", "endswith(3)", "replace('a', 'b')", "replace('a', 'b', 1)", "find('X')", "find('X', 1)", "rfind('b')",
               "count('b')", "count('')", "removeprefix(' ')", "removesuffix(' ')", "join(['a', 'b'])", "join('ab')", "isdigit()", "isspace()", "isalpha()", "isupper()", "islower()",
               "splitlines()", "items()", "keys()|list", "values()|list", "get('a')", "get('z', 1)", "get()", "index(1)", "count(1)", "append(1)"]
    tests = ["defined", "undefined", "none", "string", "mapping", "sequence", "iterable", "number", "integer", "float", "boolean", "true", "false", "callable", "odd", "even", "lower", "upper",
             "eq(1)", "equalto('a')", "ne(1)", "sameas(1)", "in([1, 'a'])", "lt(2)", "gt(2)", "le(2)", "ge(2)", "divisibleby(2)", "divisibleby(0)", "eq"]
    one = lambda what: "{% for v in [" + ", ".join(t for t in texts if t != "x") + "] %}{{ v" + what + " }}{% endfor %}"
    out = list(errors)
    for t in texts:
        out += ["{{ " + t + "|" + f + " }}" for f in filters if t in texts[:1] + texts[5:6] + texts[10:11] + texts[12:13] + texts[15:16]]
        out += ["{{ (" + t + ")." + m + " }}" for m in methods if t in texts[:1] + texts[10:11] + texts[12:13]]
        out.append("".join("{{ (" + t + ") is " + x + " }}" for x in tests if not x.startswith(("odd", "even", "div", "l", "g", "eq")) or x in ("lower",)))
        out.append("{{ " + t + " }}{{ " + t + " == " + t + " }}{{ " + t + " in [1] }}{{ " + t + " ~ 1 }}{{ not " + t + " }}{{ " + t + " or 1 }}{{ " + t + " and 1 }}")
    out += ["{{ 5 is " + t + " }}" for t in tests]
    operators = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
    out += [f"{{{{ {a} {o} {b} }}}}" for o in operators for a, b in (("7", "2"), ("7", "-2"), ("2.5", "2"), ("'ab'", "'b'"), ("[1]", "[2]"), ("(1,)", "(2,)"), ("'ab'", "2"))]
    out += ["{{ strftime_now('%d %b %Y %H:%M') }}", "{{ cycler }}", "{% for m in messages %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.nextitem }}"
            "{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}", "{{ tools|tojson }}{{ messages[-1].content }}{{ messages[1:]|length }}", "{{ 'abcdef'[1:3] }}{{ 'abc'[-2:] }}{{ 'abc'[::-1] }}",
            "{{ 'a' if true }}{{ 'a' if false }}{{ 'a' if x else 'b' }}", "{{ {'a': 1, 'b': {'c': [1, 2.0, none, true, 'q\"']}}|tojson(indent=1) }}", "{{ 1e400 }}", "{{ 1.5e3 }}{{ 1_000 }}{{ 0x1F }}",
            "{{ '\\x41\\n\\t\\\\\\'\\u00e9\\U0001F600' }}", "{{ \"a\" 'b' }}", "{%+ if 1 +%}a{%+ endif %}", "a\n  {#- c -#}  b", "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
            "{% for i in range(9) if i is odd %}{% if i > 5 %}{% break %}{% elif i == 3 %}{% continue %}{% endif %}{{ i }}{% else %}none{% endfor %}",
            "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ caller('c') }}{{ varargs }}{{ kwargs }}{% endmacro %}{% call(z) m(1, b=2) %}{{ z }}{% endcall %}{{ m.name }}"]
    for name in [one("|string"), one("|tojson"), one(" == v")]:
        out.append(name)
    save("chat_template", out)


def policy():
    base = {"version": 1, "base": "f16"}
    good = [base, {**base, "contract": "chunk:64"}, {**base, "contract": "prompt"}, {**base, "scale_source": "warmup"}, {**base, "scale_source": "dataset", "calibration": "00"},
            {"version": 1, "k": "int8", "v": "kivi2"}, {"version": 1, "base": "kivi2", "skip": "bf16", "layers": [{"layers": "0,2-3", "base": "f16"}]},
            {**base, "k": {"kind": "scaled_fp", "dtype": "fp8_e4m3", "axis": "tensor", "static_scale": 2}}, {**base, "window": 128, "pinned_rows": 4},
            {"version": 1, "base": "int4", "k": {"qparam": "f32", "small_scale": "refuse"}, "k_stage": "pre", "exact_dtype": "bf16"},
            {"version": 1, "base": "qserve4", "k": {"overflow": "wrap"}}, {"version": 1, "base": "kivi2", "k_closure": {"lag": 0, "step": 128}, "packing_version": 1}]
    bad = [{**base, k: v} for k, v in [("version", 2), ("version", "1"), ("base", "nope"), ("base", ""), ("base", 3), ("skip", ""), ("skip", 3), ("scale_source", "x"), ("scale_source", "dataset"),
                                       ("bass", 1), ("k", 4), ("k", {"dtype": "f64"}), ("k", {"kind": None}), ("k", {"bit": 4}), ("k", "nope"), ("v", {"group": 48}), ("k_closure", {"lag": 0}),
                                       ("k_closure", 3), ("k_closure", {"lag": 0, "step": 128, "x": 1}), ("pinned_rows", 1 << 31), ("pinned_rows", -1), ("pinned_rows", True), ("pinned_rows", -(1 << 40)),
                                       ("window", -1), ("window", "x"), ("coded_page_rows", 64), ("exact_page_rows", 16), ("contract", "chunk:0"), ("contract", 3), ("layers", {}), ("layers", [1]),
                                       ("layers", [{"base": "f16"}]), ("layers", [{"layers": "9"}]), ("layers", [{"layers": "0"}, {"layers": "0-1"}]), ("layers", [{"layers": "1-0"}]),
                                       ("layers", [{"layers": "x"}]), ("layers", [{"layers": "0-"}]), ("layers", [{"layers": "0;1"}]), ("layers", [{"layers": "1,0"}]), ("layers", [{"layers": "0", "contract": "prompt"}]),
                                       ("k_stage", "mid"), ("exact_dtype", "int4"), ("packing_version", 2), ("calibration", 3)]]
    bad += [{"version": 1}, {"version": 1, "bass": "f16"}, {"version": 1, "k": "f16"}, {"version": 1, "layers": [{"layers": "0-2", "base": "f16"}]}, [], 3, "", "{}",
            {"version": 1, "base": "kivi2", "k": {"scale_lifetime": "running_max"}}, {"version": 1, "base": "kivi2", "k": {"scale_lifetime": "static"}},
            {"version": 1, "base": "fp8_e4m3", "k": {"static_scale": 1e39}}, {"version": 1, "base": "fp8_e4m3", "k": {"static_scale": "1"}}, {"version": 1, "base": "fp8_e4m3", "k": {"static_scale": 0.5}}]
    save("policy", good + bad)


def documents():
    save("json", ["", " ", "nul", "nulll", "tru", "[1,]", "[1 2]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{a:1}", "\"\\x\"", "\"\\ud800\"", "\"\\udc00\\ud800\"", "\"\\ud83d\\ude00\"", "\"a", "\"\t\"", "01", "-", "1.",
                  "1e", "1e400", "-1e-400", "1.5e+3", "123456789012345678901234567890", "-9223372036854775808", "18446744073709551615", "[1] x", "\ufeff{}", b"\"\xff\"", b"[\x00]", "[[[[1]]]]",
                  "{\"a\":{\"a\":1,\"a\":2}}", "//x\n1", "[true,false,null]", "\"\\b\\f\\n\\r\\t\\/\\\\\\\"\\u0041\"", "[" * 70, "{\"" + "k" * 300 + "\":1,\"" + "k" * 300 + "\":2}"])


tokenizer()
config()
chat_template()
policy()
documents()
